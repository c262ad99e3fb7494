"""The rows of an optimizer step: rows of a micro-batch x micro-batches x replicas, with the missing number solved.

The input is the settings of a trainer's arguments, with the names of those that the user gave; the output is the sizes
by name, for the arguments themselves and for the conditions of rules (`computed: batch`). `train_batch_size` of a
DeepSpeed mapping counts as the global batch size where none is given. Contradictory numbers give a text that shows the
arithmetic, and the nearest numbers that fit. What is not known before a run (`UNKNOWN`), such as the number of
processes, is left out of the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from forgather.accumulation import AccumulationFault, read_accumulation
from forgather.parallel_sizes import layout_facts
from forgather.rule_conditions import SOMETHING, UNKNOWN

GLOBAL, ROWS, STEPS = "global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"
SCHEDULE = "accumulate_grad_batches"
SOLVED = (ROWS, STEPS)
"""The settings whose value may follow from the others."""
_USUAL = {ROWS: 8, STEPS: 1}
"""The defaults, which are those of transformers."""


class Phrase(str):
    """A text that messages of rules print without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def batch_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sizes of a step by name, in place of the numbers that are missing.

    Args:
        settings: the settings, with defaults. `given` lists the names of those that the user gave; `world_size`, or
            else `nproc_per_node`, is the number of processes.

    Returns:
        per_device_train_batch_size, gradient_accumulation_steps: as given, solved, or the default. With a schedule of
            accumulation, the second is its largest number.
        written_steps: `gradient_accumulation_steps` as given; None if it is not.
        batch_fault, batch_advice: what is wrong with the numbers, and what to write; None if they fit.
        accumulation_fault, accumulation_advice: the same for the schedule of accumulation.
        accumulation_largest: the largest number of micro-batches of the schedule; None without one.
        accumulation_end: the epoch or step of the last entry of the schedule; None without one.
        accumulation_unit: "epochs" or "steps", in which the entries are counted.

    Example:
        >>> given = {"global_batch_size": 64, "per_device_train_batch_size": 8}
        >>> batch_facts({**given, "given": tuple(given), "trainer": "single"})["gradient_accumulation_steps"]
        8
    """
    given = settings.get("given", ())
    numbers = {name: _number(settings.get(name)) if name in given else None for name in (GLOBAL, ROWS, STEPS)}
    facts = {"written_steps": numbers[STEPS], "batch_fault": None, "batch_advice": None, **_schedule(settings)}
    missing = {name: usual for name, usual in _USUAL.items() if numbers[name] is None}
    if facts["accumulation_largest"] is not None:
        # A bad value of `gradient_accumulation_steps` stays, so that it is reported.
        return facts | missing | ({STEPS: facts["accumulation_largest"]} if numbers[STEPS] is not UNKNOWN else {})
    total = numbers[GLOBAL] or engine_total(settings)
    if total is None:
        return facts | missing
    if UNKNOWN in (total, numbers[ROWS], numbers[STEPS]):
        return facts | dict.fromkeys(missing, UNKNOWN)
    if len(missing) == len(SOLVED):
        numbers[ROWS] = _USUAL[ROWS]
    found = _Triangle(total, numbers[ROWS], numbers[STEPS], _replicas(settings))
    if numbers[GLOBAL] is None and found.fault:
        # The strategy compares every number of DeepSpeed's config with those of the run, and points at the key.
        return facts | missing
    facts |= {"batch_fault": found.fault, "batch_advice": found.fault and found.advice}
    return facts | {name: found.solved(name) for name in missing}


def engine_total(settings: Mapping[str, Any]) -> int | None:
    """Returns `train_batch_size` of a DeepSpeed config that is a mapping; None if it names no number.

    Args:
        settings: the settings of a trainer's arguments.
    """
    config = settings.get("deepspeed")
    total = _number(config.get("train_batch_size")) if isinstance(config, Mapping) else None
    return total if isinstance(total, int) else None


def _number(value: Any) -> Any:
    if value is None:
        return None
    # The rule about the setting itself reports a value of another type.
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else UNKNOWN


def _schedule(settings: Mapping[str, Any]) -> dict[str, Any]:
    value = settings.get(SCHEDULE)
    found: dict[str, Any] = {f"accumulation_{name}": None for name in ("fault", "advice", "largest", "end", "unit")}
    if value is None:
        return found
    if value is UNKNOWN or value is SOMETHING:
        return dict.fromkeys(found, UNKNOWN) | {"accumulation_fault": None}
    try:
        schedule = read_accumulation(value)
    except AccumulationFault as fault:
        problem = {"accumulation_fault": Phrase(fault.message), "accumulation_advice": Phrase(fault.hint)}
        return found | {"accumulation_largest": UNKNOWN} | problem
    facts = {"largest": schedule.largest, "end": schedule.entries[-1][0], "unit": Phrase(schedule.unit)}
    return found | {f"accumulation_{name}": fact for name, fact in facts.items()}


def _replicas(settings: Mapping[str, Any]) -> int | None:
    """Returns the number of data-parallel ranks; None if it is unknown."""
    if settings.get("trainer") == "single":
        return 1
    layout = layout_facts(settings)
    if isinstance(layout["replicas_asked"], int):
        return layout["replicas_asked"]
    world, each = settings.get("world_size") or settings.get("nproc_per_node"), layout["per_replica"]
    # A remainder is a conflict of the sizes, which rules of their own report.
    return world // each if isinstance(world, int) and isinstance(each, int) and world % each == 0 else None


class _Triangle(NamedTuple):
    """The numbers of a step; None for one that is to be solved, and for an unknown number of replicas."""

    total: Any
    rows: int | None
    steps: int | None
    replicas: int | None

    @property
    def unit(self) -> int:
        """The product of the numbers that are known."""
        return math.prod(number for number in (self.rows, self.steps, self.replicas) if number is not None)

    @property
    def is_whole(self) -> bool:
        """Whether all three numbers besides the total are known."""
        return None not in (self.rows, self.steps, self.replicas)

    @property
    def fault(self) -> Phrase | None:
        """What is wrong; None if the numbers fit."""
        if self.total % self.unit == 0 and not (self.is_whole and self.total != self.unit):
            return None
        parts = [
            f"{self.rows} rows ({ROWS})" if self.rows is not None else "",
            f"{self.steps} micro-batches ({STEPS})" if self.steps is not None else "",
            f"{self.replicas} data-parallel processes" if (self.replicas or 1) > 1 else "",
        ]
        product = f"{' x '.join(filter(None, parts))} = {self.unit}"
        verb = "and" if self.is_whole else "which is not a multiple of"
        return Phrase(f"{GLOBAL} is {self.total}, {verb} {product}")

    @property
    def advice(self) -> Phrase:
        """The nearest numbers that fit."""
        totals = [self.unit] if self.is_whole else self._multiples()
        fitting = [f"{GLOBAL}: {' or '.join(map(str, totals))}"]
        for name in SOLVED:
            if getattr(self, _FIELDS[name]) is not None and (numbers := list(self._fitting(name))):
                fitting.append(f"{name}: {' or '.join(map(str, numbers))}")
        # Leaving a number out helps only if the total can be reached.
        leave = f"; or leave out {ROWS} or {STEPS}, which then follows" if self.is_whole and len(fitting) > 1 else ""
        times = "" if self.replicas else "; with several processes, a multiple of this product and their number"
        return Phrase(f"write {', or '.join(fitting)}{leave}{times}")

    def solved(self, name: str) -> Any:
        """Returns a number that follows from the others; `UNKNOWN` if it does not."""
        own = getattr(self, _FIELDS[name])
        if own is not None:
            return own
        return self.total // self.unit if self.replicas is not None and self.total % self.unit == 0 else UNKNOWN

    def _multiples(self) -> list[int]:
        below = self.total // self.unit * self.unit
        return [number for number in (below, below + self.unit) if number]

    def _fitting(self, name: str) -> Iterator[int]:
        """Yields the one or two numbers nearest to the given one with which the total can be reached."""
        own = getattr(self, _FIELDS[name])
        others = self.unit // own
        if self.total % others:
            return
        rest = self.total // others
        if self.is_whole:
            yield rest
            return
        divisors = [number for number in range(1, min(rest, 65536) + 1) if rest % number == 0]
        yield from [number for number in divisors if number < own][-1:]
        yield from [number for number in divisors if number > own][:1]


_FIELDS = {ROWS: "rows", STEPS: "steps"}
