"""Ways out of a run that does not fit: changes of its config that need less memory, and what was planned with each.

`changes_of` takes a plan and the settings of its config; gives the changes that can make its largest parts smaller.
`launch/ways_out.py` plans them and gives `WayOut`s, which `nearest_first` orders. What a change brings is known only
when it is planned.

Units:
    bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from forgather.planner.choices import MICRO_BATCHES, RECOMPUTE, ROWS
from forgather.planner.efficiency import Range
from forgather.planner.fit import Verdict
from forgather.planner.memory_plan import OPTIMIZER_STEP, format_size

EVAL_ROWS = "per_device_eval_batch_size"
OFFLOADING, IN_BACKWARD = "activation_offloading", "optimizer_in_backward"
BUDGET, CLIPPING = "activation_memory_budget", "max_grad_norm"

READ = (
    *("accumulate_grad_batches", "pipeline_chunks", "fsdp", "fsdp_config", "deepspeed", EVAL_ROWS),
    *(OFFLOADING, IN_BACKWARD, BUDGET, CLIPPING, "gradient_checkpointing_kwargs"),
)
"""The settings of a config on which its changes depend."""

EVALUATIONS = ("evaluation", "generation")
"""The phases whose batch is that of the evaluation."""

NUMBER = 3
"""How many ways out are looked for and shown."""

EIGHT_BITS = "8-bit AdamW, which rounds its state"
"""The title of two changes, by two libraries, of which one is enough."""

_FACTORY = "optimizer_factory"
_DECAYED = ["bias", "norm"]  # what AdamW of this library leaves out of weight decay if nothing is said


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a config that may make its run smaller.

    Args:
        title: the name of the change.
        settings: new values of settings of the trainer.
        of_main: new arguments of the trainer, as YAML text.
        of_optimizer: new arguments of the factory of the optimizer, as YAML text.
        divides: whether an update is divided into more and smaller micro-batches; how many follows from the plans.
    """

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    of_main: Mapping[str, str] = field(default_factory=dict)
    of_optimizer: Mapping[str, str] = field(default_factory=dict)
    divides: bool = False

    @property
    def sets(self) -> frozenset[str]:
        """The names of the settings and arguments that are changed."""
        return frozenset((*self.settings, *self.of_main, *([_FACTORY] if self.of_optimizer else [])))

    def plus(self, other: Change) -> Change:
        """Returns both changes together."""
        return Change(
            title=f"{self.title}, {other.title}",
            settings={**self.settings, **other.settings},
            of_main={**self.of_main, **other.of_main},
            of_optimizer={**self.of_optimizer, **other.of_optimizer},
            divides=self.divides or other.divides,
        )


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change that was planned.

    Args:
        title: the name of the change.
        assignments: the paths and YAML texts for `--set`.
        peak_bytes: the planned peak of the rank with the largest need.
        least: the need of this rank with the lower bounds of what is assumed.
        most: the same with the upper bounds.
        available: the free memory of a device.
        verdict: whether each rank fits.
        seconds: the time of an update; None if the device has no rates.
        host_bytes: what this rank keeps in the memory of the host.
        phase: the phase in which this rank has its peak.
        at: the part of the phase in which it has it.
        reason: why the config cannot be changed like this; None if it can.
    """

    title: str
    assignments: tuple[tuple[str, str], ...]
    peak_bytes: int = 0
    least: int = 0
    most: int = 0
    available: int = 0
    verdict: Verdict = Verdict.TOO_LARGE
    seconds: Range | None = None
    host_bytes: int = 0
    phase: str = ""
    at: str = ""
    reason: str | None = None

    @property
    def fits(self) -> bool:
        """Whether each rank surely fits."""
        return self.reason is None and self.verdict is Verdict.FITS

    def as_data(self) -> dict[str, Any]:
        """Returns the fields as plain data, with the words for the command line."""
        words = [word for path, text in self.assignments for word in ("--set", f"{path}={text}")]
        return {**asdict(self), "verdict": str(self.verdict), "words": shlex.join(words)}


def changes_of(plan: Mapping[str, Any], given: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> list[Change]:
    """Returns the changes that the run of a plan does not use yet, those that leave its numbers alone first.

    Rounding of weights at random (`bf16_stochastic_round`) is none of them: it needs a model in bfloat16.

    Args:
        plan: the plan as data, see `forgather.planner.memory_plan.MemoryPlan`.
        given: settings of the trainer as the config gives them, as far as they are plain; "trainer" is its constructor.
        optimizer: the arguments of the optimizer if it is an AdamW; None if it is another one.
    """
    settings, mesh = plan["settings"], plan["mesh"]
    rows = settings[ROWS] or 1
    found = []
    if (evaluation := evaluation_change(given)) and any(
        _largest_phase(rank)["phase"] in EVALUATIONS for rank in plan["ranks"]
    ):
        found.append(evaluation)
    if rows > 1 and not given.get("accumulate_grad_batches"):
        found.append(Change(title="smaller micro-batches", divides=True))
    if (fused := fused_change(plan, optimizer)) and any(
        _largest_phase(rank)["at"] == OPTIMIZER_STEP for rank in plan["ranks"]
    ):
        found.append(fused)
    if mesh.get("pipeline", 1) > 1 and rows > 1 and given.get("pipeline_chunks") != rows:
        found.append(Change(title="micro-batches of one row in the pipeline", settings={"pipeline_chunks": rows}))
    found += _sharded(plan, given)
    found += _activations(plan, given)
    found += _without_gradients(plan, given)
    if not (settings["bf16"] or settings["fp16"]):
        found.append(Change(title="bfloat16", settings={"bf16": True}))
    if optimizer is not None:
        found += _optimizers(optimizer)
    return found


def evaluation_change(given: Mapping[str, Any]) -> Change | None:
    """Returns an evaluation of one row at a time as a change; None if the settings of the trainer say that already."""
    if given.get(EVAL_ROWS) == 1:
        return None
    return Change(title="evaluation of one row at a time", settings={EVAL_ROWS: 1})


def fused_change(plan: Mapping[str, Any], optimizer: Mapping[str, Any] | None) -> Change | None:
    """Returns the fused kernel of AdamW as a change; None if the run has it, or has no use for it.

    On a GPU, an AdamW that is not fused updates all weights at once, and needs a copy of them all.

    Args:
        plan: the plan as data.
        optimizer: the arguments of the optimizer if it is an AdamW; None if it is another one.
    """
    if optimizer is None or plan["device_type"] == "cpu" or optimizer.get("fused") or optimizer.get("foreach"):
        return None
    return Change(title="fused AdamW, without a copy of the weights", of_optimizer={"fused": "true"})


def _activations(plan: Mapping[str, Any], given: Mapping[str, Any]) -> list[Change]:
    """Returns the changes with which fewer activations are kept, or which keep them in the memory of the host."""
    found = []
    details = given.get("gradient_checkpointing_kwargs")
    if not plan["settings"][RECOMPUTE]:
        # What a compiled block keeps is decided by one of the two.
        undone = {} if given.get(BUDGET) is None else {BUDGET: None}
        found.append(Change(title="recomputed activations", settings={RECOMPUTE: True, **undone}))
    elif isinstance(details, Mapping) and details.get("mode") == "selective":
        whole = {"gradient_checkpointing_kwargs": {**details, "mode": "full"}}
        found.append(Change(title="layers recomputed as a whole", settings=whole))
    if plan["device_type"] != "cpu" and _is_of_ours(plan, given) and not given.get(OFFLOADING):
        found.append(Change(title="activations in host memory", settings={OFFLOADING: True}))
    return found


def _without_gradients(plan: Mapping[str, Any], given: Mapping[str, Any]) -> list[Change]:
    """Returns updates in the backward pass, if no other part of the run needs all gradients at once."""
    several = plan["settings"].get(MICRO_BATCHES) not in (None, 1) or given.get("accumulate_grad_batches")
    mesh, clips = plan["mesh"], given.get(CLIPPING) != 0
    if (
        given.get(IN_BACKWARD)
        or several
        or plan["settings"]["fp16"]
        or mesh.get("pipeline", 1) > 1
        or mesh.get("tensor", 1) > 1
        or not _is_of_ours(plan, given)
    ):
        return []
    title = "gradients freed in the backward pass" + (", whose norm is not clipped" if clips else "")
    return [Change(title=title, settings={IN_BACKWARD: True, **({CLIPPING: 0.0} if clips else {})})]


def _is_of_ours(plan: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Returns whether the trainer runs the passes of a step itself: not DeepSpeed, nor transformers' trainer."""
    return plan["strategy"] != "DeepSpeedZero" and not str(given.get("trainer")).endswith("HFTrainer")


def _largest_phase(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    largest: Mapping[str, Any] = max(rank["phases"], key=lambda phase: phase["num_bytes"])
    return largest


def _sharded(plan: Mapping[str, Any], given: Mapping[str, Any]) -> list[Change]:
    """Returns the changes that divide more among the processes, or move it to the host."""
    if plan["world_size"] == 1 or not str(given.get("trainer")).endswith("AccelTrainer"):
        return []
    zero = given.get("deepspeed")
    if plan["strategy"] == "DeepSpeedZero":
        if not isinstance(zero, Mapping) or zero.get("zero_optimization", {}).get("stage") == 3:
            return []
        config = {**zero.get("zero_optimization", {}), "stage": 3}
        return [Change(title="ZeRO 3", settings={"deepspeed": {**zero, "zero_optimization": config}})]
    own = given.get("fsdp_config") or {}
    if not isinstance(own, Mapping):
        return []
    kept = {key: value for key, value in own.items() if key.removeprefix("fsdp_") not in _DIVISION}
    found = []
    if given.get("fsdp") not in (True, "full_shard") or kept != own:
        config = {"fsdp_config": kept} if own else {}
        found.append(Change(title="weights sharded by FSDP2", settings={"fsdp": "full_shard", **config}))
    if plan["device_type"] == "cpu" or own.get("cpu_offload"):
        return found
    if plan["mesh"].get("shard", 1) > 1:
        config = {"fsdp_config": {**own, "cpu_offload": True}}
        found.append(Change(title="weights and optimizer in host memory", settings=config))
    else:
        config = {"fsdp": "full_shard", "fsdp_config": {**kept, "cpu_offload": True}}
        found.append(Change(title="weights sharded by FSDP2, in host memory", settings=config))
    return found


_DIVISION = ("sharding_strategy", "reshard_after_forward", "shard_size")


def _optimizers(optimizer: Mapping[str, Any]) -> list[Change]:
    """Returns optimizers with a smaller state than AdamW, with its weight decay and betas; none if it has more."""
    given = {name: value for name, value in optimizer.items() if value is not None}
    if given.get("no_decay") == _DECAYED:
        del given["no_decay"]
    for kernel in ("fused", "foreach"):
        given.pop(kernel, None)
    decay, (beta1, beta2) = given.pop("weight_decay", None), given.pop("betas", (0.9, 0.999))
    if given:
        return []
    # A factory that gives no weight decay gets that of the trainer's arguments.
    usual = {"adam_beta1": beta1, "adam_beta2": beta2} | ({} if decay is None else {"weight_decay": decay})
    arguments = "{}" if decay is None else f"{{weight_decay: {decay}}}"
    return [
        Change(title=EIGHT_BITS, settings={"optim": "adamw_8bit", **usual}, of_main={_FACTORY: "null"}),
        Change(title=EIGHT_BITS, settings={"optim": "adamw_torch_8bit", **usual}, of_main={_FACTORY: "null"}),
        Change(
            title="Adafactor, another optimizer",
            of_main={_FACTORY: f"!partial:forgather.ml.optim:adafactor {arguments}"},
        ),
    ]


def nearest_first(ways: Iterable[WayOut]) -> list[WayOut]:
    """Returns ways in the order in which they are shown.

    Those that fit keep their order, in which single changes come before several; then those that come nearest to
    fitting; last those that cannot be used.
    """

    def key(way: WayOut) -> tuple[bool, bool, int, int]:
        far = (0, 0) if way.fits else (way.least - way.available, way.most)
        return way.reason is not None, not way.fits, *far

    return sorted(ways, key=key)


def way_lines(ways: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the nearest ways out as lines: the planned need of each, and the words of its change.

    Args:
        ways: ways as data, the nearest first.

    Example:
        >>> gib = 2**30
        >>> way = WayOut(title="bfloat16", assignments=(("a.bf16", "true"),), peak_bytes=gib, least=2 * gib,
        ...              most=3 * gib, available=4 * gib, verdict=Verdict.FITS)
        >>> print(*way_lines([way.as_data()]), sep="\\n")
        bfloat16: fits. The planned peak is 1.0 GiB; it needs 2.0 GiB to 3.0 GiB of 4.0 GiB
          --set a.bf16=true
    """
    usable = [way for way in ways if way["reason"] is None][:NUMBER]
    return [line for way in usable for line in (_line(way), f"  {way['words']}")]


def _line(way: Mapping[str, Any]) -> str:
    least, most, available = way["least"], way["most"], way["available"]
    need = format_size(least) if least == most else f"{format_size(least)} to {format_size(most)}"
    over = f", {format_size(least - available)} too much" if least > available else ""
    whole = f"it needs {need} of {format_size(available)}"
    seconds = way["seconds"]
    host = f", and {format_size(way['host_bytes'])} of the host" if way.get("host_bytes") else ""
    time = "" if seconds is None else f"; a step takes {seconds['low']:.3g} s to {seconds['high']:.3g} s"
    return (
        f"{way['title']}: {way['verdict']}{over}. The planned peak is {format_size(way['peak_bytes'])}; {whole}{host}"
        f"{time}"
    )
