"""DeepSpeed's config as a value, and the settings that it shares with the training arguments.

Takes a config under present names; gives what a key says, where it stands, and where it differs from what the trainer
says. Keeps true: a difference names both places.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forgather.errors import Diagnostic, TrainingError
from forgather.source import Span

AUTO = "auto"
ZERO = "zero_optimization"


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """DeepSpeed's config of a run.

    Args:
        config: as the engine gets it; sizes that follow from the model may be "auto" still.
        source: where it was written, for people.
        notes: what was translated, a line each.
        text: of the file it was read from; None for a mapping.
    """

    config: dict[str, Any]
    source: str
    notes: tuple[str, ...] = ()
    text: str | None = None

    @property
    def stage(self) -> int:
        """What is shared out among the processes: 1 optimizer state, 2 gradients too, 3 weights too."""
        return int(self.config[ZERO]["stage"])

    def section(self, name: str) -> dict[str, Any]:
        """Returns a section of the config, empty where it has none."""
        return dict(self.config.get(name) or {})

    def place(self, *keys: str) -> Span | None:
        """Returns the line of the file that a key stands on."""
        if self.text is None:
            return None
        start = 0
        for key in keys:
            found = self.text.find(f'"{key}"', start)
            start = found if found >= 0 else start
        return Span(self.source, self.text.count("\n", 0, start) + 1)

    def filled_for_model(self, hidden_size: int | None) -> ZeroConfig:
        """Returns the config without any "auto": sizes by the width of the model, the rest as DeepSpeed chooses."""
        config = copy.deepcopy(self.config)
        if hidden_size is not None:
            sizes = {
                "reduce_bucket_size": hidden_size * hidden_size,
                "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
                "stage3_param_persistence_threshold": 10 * hidden_size,
            }
            config[ZERO] |= {name: size for name, size in sizes.items() if config[ZERO].get(name) == AUTO}
        _drop_auto(config)
        return dataclasses.replace(self, config=config)


@dataclass(frozen=True)
class Knob:
    """A setting that DeepSpeed's config and the training arguments both have.

    Args:
        keys: where it stands in DeepSpeed's config.
        argument: what gives its value, as the training arguments name it.
        value: that value.
    """

    keys: tuple[str, ...]
    argument: str
    value: Any


def knobs_of(args: Any, processes: int) -> Iterator[Knob]:
    """Yields the settings that the training arguments own, for so many processes."""
    rows, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    yield Knob(("train_micro_batch_size_per_gpu",), "per_device_train_batch_size", rows)
    yield Knob(("gradient_accumulation_steps",), "gradient_accumulation_steps", steps)
    product = f"per_device_train_batch_size {rows} x gradient_accumulation_steps {steps} x {processes} processes"
    yield Knob(("train_batch_size",), product, rows * steps * processes)
    yield Knob(("gradient_clipping",), "max_grad_norm", float(args.max_grad_norm))
    yield Knob(("bf16", "enabled"), "bf16", bool(args.bf16))
    yield Knob(("fp16", "enabled"), "fp16", bool(getattr(args, "fp16", False)))
    yield Knob(("managed_gradient_accumulation",), "the trainer's accumulation", True)


def optimizer_knobs(kind: str, settings: Mapping[str, Any]) -> Iterator[Knob]:
    """Yields the settings of the optimizer that the trainer made.

    Args:
        kind: name of its class.
        settings: its defaults (lr, betas, ...).
    """
    yield Knob(("optimizer", "type"), "the optimizer", kind)
    for name in ("lr", "betas", "eps", "weight_decay", "momentum"):
        if name in settings:
            yield Knob(("optimizer", "params", name), f"{name} of the optimizer", settings[name])


ABSENT = object()


def written_in(config: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    """Returns what a config says under a key, or `ABSENT`."""
    value: Any = config
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return ABSENT
        value = value[key]
    return value


def put(config: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    """Sets a value under a key, and makes the sections that it needs."""
    for key in keys[:-1]:
        held = config.get(key)
        config[key] = dict(held) if isinstance(held, Mapping) else {}
        config = config[key]
    config[keys[-1]] = value


def refuse_differences(found: ZeroConfig, knobs: list[Knob], where: str) -> None:
    """Raises where DeepSpeed's config says something else than the arguments; names both places of each.

    Raises:
        TrainingError: FG742, with every further difference.
    """
    differences = [
        (knob, written)
        for knob in knobs
        if (written := written_in(found.config, knob.keys)) not in (ABSENT, AUTO) and not _same(written, knob.value)
    ]
    if not differences:
        return
    findings = []
    for knob, written in differences:
        name, span = ".".join(knob.keys), found.place(*knob.keys)
        source = "" if span else f" in {found.source}"
        findings.append(
            Diagnostic(
                code="FG742",
                message=f"{name} is {_shown(written)}{source}, and {knob.argument} is {_shown(knob.value)} in {where}",
                span=span,
                hint=f'write "auto" for {name}, or leave it out; or make both {_shown(knob.value)}',
            )
        )
    first = findings[0]
    raise TrainingError(first.message, code="FG742", span=first.span, hint=first.hint, others=findings[1:])


def _same(written: Any, value: Any) -> bool:
    if isinstance(written, bool) or isinstance(value, bool):
        return written is value
    if isinstance(written, str) and isinstance(value, str):
        return written.casefold() == value.casefold()
    if isinstance(written, list | tuple) and isinstance(value, list | tuple):
        return len(written) == len(value) and all(map(_same, written, value))
    if isinstance(written, int | float) and isinstance(value, int | float):
        return math.isclose(written, value, rel_tol=1e-9)
    return bool(written == value)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


def _drop_auto(config: dict[str, Any]) -> None:
    """Removes what is "auto" still, so that DeepSpeed's own choice holds."""
    for key in list(config):
        if isinstance(config[key], dict) and key != "data_types":
            _drop_auto(config[key])
        elif config[key] == AUTO:
            del config[key]
