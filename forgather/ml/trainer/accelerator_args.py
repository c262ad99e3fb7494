"""`accelerator_args`: what `accelerate.Accelerator` would take, at the places where this trainer keeps it.

Takes the mapping as the user wrote it, its names and types checked; gives settings of the arguments, and what the
strategy and the process group are told. Keeps true: a setting that belongs elsewhere is taken there, with one line that
says so; a setting of the arguments that differs is left for the rules to refuse; nothing is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accelerate.utils import DistributedDataParallelKwargs, GradScalerKwargs, InitProcessGroupKwargs

from forgather.errors import nearest
from forgather.ml.log import get_logger
from forgather.ml.trainer.arguments_check import SettingError

_log = get_logger(__name__)

MOVES = {
    "cpu": "use_cpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_accumulation_plugin.num_steps": "gradient_accumulation_steps",
    "dataloader_config.num_workers": "dataloader_num_workers",
    "dataloader_config.pin_memory": "dataloader_pin_memory",
    "dataloader_config.persistent_workers": "dataloader_persistent_workers",
    "dataloader_config.prefetch_factor": "dataloader_prefetch_factor",
    "dataloader_config.data_seed": "data_seed",
    "dynamo_backend": "torch_compile_backend",
    "log_with": "report_to",
}
"""Settings that are the same thing under another name."""

_EVEN = "each row is computed once, and what is missing at the end counts for nothing; no row is repeated or dropped"
_DISPATCH = "every process reads its own rows of the batch that dispatching would have cut up"
_SCHEDULE = "the learning rate moves on once an update, whatever the accumulation"
REMARKS: dict[tuple[str, Any], str] = {
    ("dispatch_batches", True): _DISPATCH,
    ("dataloader_config.dispatch_batches", True): _DISPATCH,
    ("even_batches", True): _EVEN,
    ("even_batches", False): _EVEN,
    ("dataloader_config.even_batches", True): _EVEN,
    ("dataloader_config.even_batches", False): _EVEN,
    ("gradient_accumulation_plugin.adjust_scheduler", True): _SCHEDULE,
    ("gradient_accumulation_plugin.adjust_scheduler", False): _SCHEDULE,
    ("dataloader_config.use_seedable_sampler", False): "the order of the rows follows from the seed alone",
    ("dataloader_config.use_stateful_dataloader", True): "a checkpoint holds the position in the data by itself",
    ("dataloader_config.non_blocking", False): "copies from pinned memory do not wait",
}
"""Settings that ask for what happens in another way, by name and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSettings:
    """What is told to the strategy and to the process group.

    Args:
        backend: of the process group; None for that of the environment.
        timeout_seconds: of the process group; None for that of the environment.
        ddp: settings of DistributedDataParallel; None for those of the arguments.
        scaling: settings of the loss scale of float16.
        sync_each_batch: add gradients with every micro-batch.
    """

    backend: str | None = None
    timeout_seconds: float | None = None
    ddp: DistributedDataParallelKwargs | None = None
    scaling: Mapping[str, Any] = field(default_factory=dict)
    sync_each_batch: bool = False


def settled(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the arguments, those that stand in `accelerator_args` included.

    Args:
        given: settings as the user wrote them.
        defaults: of all settings. One that has its default value counts as not written: templates write those.
    """
    settings = dict(given)
    for name, value in _flat(given.get("accelerator_args") or {}):
        if (name, value) in REMARKS:
            _log.warning(
                "accelerator_args.%s %s has no effect of its own: %s", name, _shown(value), REMARKS[name, value]
            )
        if name == "mixed_precision" and (settings.get("bf16") or settings.get("fp16")):
            continue
        for target, moved in _targets(name, value):
            if settings.get(target, defaults.get(target)) == defaults.get(target):
                settings[target] = moved
                _log.warning("accelerator_args.%s was taken as %s: %s", name, target, _shown(moved))
    return settings


def _targets(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the settings that one of Accelerate stands for; none where it asks for what happens anyway."""
    if value is None:
        return
    if name == "mixed_precision":
        if value in ("bf16", "fp16"):
            yield value, True
    elif name == "cpu":
        # Accelerate's `false` is no wish for an accelerator.
        if value:
            yield "use_cpu", True
    elif name == "dynamo_backend":
        if str(value).lower() != "no":
            yield "torch_compile_backend", str(value).lower()
    elif name in MOVES:
        yield MOVES[name], value


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif not isinstance(value, list | tuple) or name == "log_with":
            yield prefix + name, value


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def accelerator_settings(given: Mapping[str, Any] | None) -> AcceleratorSettings:
    """Returns what the strategy and the process group are told.

    Raises:
        SettingError: FG723 for a handler that has no place here.
    """
    given = given or {}
    handlers = {type(handler): handler for handler in given.get("kwargs_handlers") or ()}
    group, ddp, scaling = (handlers.pop(kind, None) for kind in _HANDLERS)
    for kind in handlers:
        raise SettingError(
            f"accelerator_args.kwargs_handlers has a {kind.__name__}, which has no place here",
            code="FG723",
            hint=nearest(kind.__name__, [known.__name__ for known in _HANDLERS]),
        ).about("accelerator_args")
    timeout = getattr(group, "timeout", None)
    return AcceleratorSettings(
        backend=given.get("backend") or getattr(group, "backend", None),
        timeout_seconds=None if timeout is None else timeout.total_seconds(),
        ddp=ddp,
        scaling=scaling.to_kwargs() if scaling is not None else {},
        sync_each_batch=bool((given.get("gradient_accumulation_plugin") or {}).get("sync_each_batch")),
    )


_HANDLERS = (InitProcessGroupKwargs, DistributedDataParallelKwargs, GradScalerKwargs)
