"""The values that a module logs: the newest of a step, and those of an epoch, averaged as Lightning averages them.

The input is each call of `self.log`; the output is the metrics of a step and of an epoch, by name. A mean is weighted
by the rows of each batch. A value that is logged both per step and per epoch has the names `<name>_step` and
`<name>_epoch`. With `sync_dist`, a value is that of all ranks; without, each rank has its own. Ranks are reduced where
all of them log or end an epoch, so that one rank alone may read metrics. A checkpoint has the values of its epoch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from forgather.errors import nearest
from forgather.lightning.hooks import LOGGED, unsupported
from forgather.ml.log import get_logger
from forgather.value_text import shown

_log = get_logger(__name__)
_REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max", "min": "min"}
_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
Reduce = Callable[[Tensor, str], Tensor]
"""A function of a tensor and "sum", "max" or "min", which returns that of all ranks."""


@dataclass(frozen=True)
class LogOptions:
    """The options of `self.log`, with Lightning's names and defaults.

    Args:
        prog_bar: whether the progress bar shows the value.
        logger: whether trackers get it; they do by default.
        on_step: whether the value of each step is a metric; the hook has a default.
        on_epoch: whether the value of the epoch is a metric; the hook has a default.
        reduce_fx: how the values of an epoch become one: "mean", "sum", "max" or "min", or torch's functions.
        enable_graph: must be false: logged values have no gradients.
        sync_dist: whether the value is that of all ranks.
        sync_dist_group: must be None.
        add_dataloader_idx: whether the name says which of several loaders it comes from.
        batch_size: the rows of the batch, by which a mean is weighted; by default those of its first tensor.
        metric_attribute: not needed: the metric itself is kept.
        rank_zero_only: whether only the main process logs it; then it is not that of all ranks.
    """

    prog_bar: bool = False
    logger: bool | None = None
    on_step: bool | None = None
    on_epoch: bool | None = None
    reduce_fx: Any = "mean"
    enable_graph: bool = False
    sync_dist: bool = False
    sync_dist_group: Any = None
    add_dataloader_idx: bool = True
    batch_size: int | None = None
    metric_attribute: str | None = None
    rank_zero_only: bool = False


def _read_options(name: str, options: Mapping[str, Any]) -> LogOptions:
    known = [part.name for part in dataclasses.fields(LogOptions)]
    if unknown := [option for option in options if option not in known]:
        raise unsupported(f"self.log({name!r}, {unknown[0]}=...)", nearest(unknown[0], known))
    found = LogOptions(**options)
    if found.enable_graph or found.sync_dist_group is not None:
        raise unsupported(f"self.log({name!r}) with enable_graph or sync_dist_group", "remove both")
    return found


@dataclass
class _Logged:
    """One value of one hook, over an epoch.

    Args:
        name: the name that the module gave it.
        hook: the hook that logged it.
        on_step, on_epoch: whether the value of a step, and of an epoch, is a metric.
        bar, logger: whether the progress bar and the trackers get it.
        reduction: how the values of an epoch become one.
        is_synced: whether it is that of all ranks.
        loader: the number of the loader, if there are several.
        names_loader: whether the name of the metric says which loader it is of.
    """

    name: str
    hook: str
    on_step: bool
    on_epoch: bool
    bar: bool
    logger: bool
    reduction: str
    is_synced: bool
    loader: int | None
    names_loader: bool = True
    newest: Tensor | None = None
    total: Tensor | None = None
    weight: float = 0.0
    metric: Any = None
    done: Tensor | None = None
    """The value of the epoch, once it was computed."""
    misses_batches: bool = False
    """Whether a run has resumed within the epoch, and the metric has not seen the batches before."""

    def settings(self) -> tuple[Any, ...]:
        return (self.on_step, self.on_epoch, self.bar, self.logger, self.reduction, self.loader)

    def shown_name(self, *, of_step: bool) -> str:
        suffix = "" if not (self.on_step and self.on_epoch) else "_step" if of_step else "_epoch"
        return f"{self.name}{suffix}{self._of_loader}"

    @property
    def plain_name(self) -> str:
        return f"{self.name}{self._of_loader}"

    @property
    def _of_loader(self) -> str:
        return "" if self.loader is None or not self.names_loader else f"/dataloader_idx_{self.loader}"


@dataclass
class Metrics:
    """Metrics by name, for callbacks, for trackers and for the progress bar."""

    callback: dict[str, Tensor] = field(default_factory=dict)
    log: dict[str, Tensor] = field(default_factory=dict)
    bar: dict[str, float] = field(default_factory=dict)

    def update(self, other: Metrics) -> None:
        """Takes the values of other metrics, which replace those of the same names."""
        self.callback.update(other.callback)
        self.log.update(other.log)
        self.bar.update(other.bar)


class LoggedValues:
    """The values that the hooks of one stage log.

    Args:
        is_training: whether the stage is training, whose callbacks also get the values of steps.
        reduce: a function that reduces a tensor over all ranks; None in a single process.
    """

    def __init__(self, *, is_training: bool, reduce: Reduce | None = None) -> None:
        self._is_training, self._reduce = is_training, reduce
        self._values: dict[tuple[str, str, int | None], _Logged] = {}
        self._batch: Any = None
        self._rows: int | None = None
        self.loader: int | None = None
        self.within_batches = False
        """Whether metrics are now those of a step."""

    def begin_batch(self, batch: Any, loader: int | None = None) -> None:
        """Takes note of the batch, whose number of rows weighs what is logged for it."""
        self._batch, self._rows, self.loader = batch, None, loader
        self.within_batches = True

    def end_batch(self) -> None:
        """Forgets the batch."""
        self._batch = self._rows = None

    def end_batches(self) -> None:
        """Metrics are those of the epoch from now on. With `sync_dist`, every rank must call it."""
        self.within_batches = False
        for known in self._values.values():
            if known.on_epoch:
                self._of_epoch(known)

    def log(self, hook: str, name: str, value: Any, **options: Any) -> None:
        """Adds a value.

        Args:
            hook: the hook that logs it.
            name: its name.
            value: a number, a tensor with one element, or a metric of torchmetrics.
            **options: see `LogOptions`.

        Raises:
            TrainingError: FG865 if the value cannot be logged in this way.
        """
        given = _read_options(name, options)
        on_step, on_epoch = _levels(hook, name, given.on_step, given.on_epoch)
        made = _Logged(
            name,
            hook,
            on_step,
            on_epoch,
            given.prog_bar,
            given.logger is not False,
            _reduction(given.reduce_fx, name),
            given.sync_dist and not given.rank_zero_only,
            self.loader,
            given.add_dataloader_idx,
        )
        known = self._values.setdefault((hook, name, self.loader if given.add_dataloader_idx else None), made)
        if known.settings() != made.settings():
            raise unsupported(f"self.log({name!r}) is called twice in {hook} with other options", "give both the same")
        known.done = None
        if hasattr(value, "compute") and hasattr(value, "reset"):
            known.metric, known.newest = value, getattr(value, "_forward_cache", None)
        else:
            self._add(known, _as_tensor(value, name), given.batch_size)
        if known.on_epoch and not self.within_batches:
            # All ranks log, but one of them alone may read the metrics in the hook that follows.
            self._of_epoch(known)

    def _add(self, known: _Logged, value: Tensor, batch_size: int | None) -> None:
        if known.on_step:
            known.newest = self._over_ranks(known, value)
        if not known.on_epoch:
            return
        if known.reduction == "mean":
            rows = batch_size if batch_size is not None else self._rows_of_batch()
            known.total = value * rows if known.total is None else known.total + value * rows
            known.weight += rows
        elif known.total is None:
            known.total = value.clone()
        else:
            known.total = _COMBINED[known.reduction](known.total, value)

    def _rows_of_batch(self) -> int:
        if self._rows is None:
            self._rows = 1 if self._batch is None else rows_of(self._batch)
        return self._rows

    def _over_ranks(self, known: _Logged, value: Tensor) -> Tensor:
        if not known.is_synced or self._reduce is None:
            return value.clone()
        if known.reduction != "mean":
            return self._reduce(value, known.reduction)
        both = self._reduce(torch.stack([value, torch.ones_like(value)]), "sum")
        return both[0] / both[1]

    def _of_epoch(self, known: _Logged) -> Tensor | None:
        if known.done is None and known.metric is not None:
            known.done = torch.as_tensor(known.metric.compute())
        elif known.done is None and known.total is not None:
            if known.reduction != "mean":
                known.done = self._over_ranks(known, known.total)
            else:
                pair = torch.stack([known.total, torch.full_like(known.total, known.weight)])
                pair = self._reduce(pair, "sum") if known.is_synced and self._reduce is not None else pair
                known.done = pair[0] / pair[1]
        return known.done

    def metrics(self) -> Metrics:
        """Returns the metrics of the current step, or those of the epoch."""
        of_step, found = self.within_batches, Metrics()
        for known in list(self._values.values()):
            if known.loader != self.loader:
                continue
            if not (known.on_step if of_step else known.on_epoch):
                continue
            value = known.newest if of_step else self._of_epoch(known)
            if value is None:
                continue
            name = known.shown_name(of_step=of_step)
            if known.logger:
                found.log[name] = value
            if self._is_training or not of_step:
                found.callback[known.plain_name] = found.callback[name] = value
            if known.bar:
                found.bar[name] = float(value)
        return found

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns what this rank has logged in the epoch, as plain values and tensors on the CPU."""
        return [
            on_host({name: of for name, of in vars(known).items() if name not in ("metric", "done")})
            | {"misses_batches": known.misses_batches or known.metric is not None}
            for known in self._values.values()
        ]

    def load_state_dict(self, state: list[dict[str, Any]]) -> None:
        """Restores what a rank had logged in the epoch of a checkpoint.

        Args:
            state: what `state_dict` returned.
        """
        for kept in state:
            known = _Logged(**kept)
            self._values[known.hook, known.name, known.loader if known.names_loader else None] = known
            if known.misses_batches and known.on_epoch:
                _log.warning("%r of this epoch is that of the batches after the checkpoint", known.name)

    def reset(self) -> None:
        """Forgets all values, at the end of an epoch."""
        for known in self._values.values():
            if known.metric is not None:
                known.metric.reset()
        self._values.clear()
        self.within_batches = False
        self.loader = None


def on_host(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mapping whose tensors are on the CPU.

    Args:
        values: tensors and other values by name.
    """
    return {name: value.cpu() if isinstance(value, Tensor) else value for name, value in values.items()}


def _levels(hook: str, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
    defaults = LOGGED.get(hook)
    if defaults is None:
        raise unsupported(f"self.log({name!r}) is called in {hook}", "log in a step, or in a hook of a batch or epoch")
    step, epoch = defaults[0] if on_step is None else on_step, defaults[1] if on_epoch is None else on_epoch
    # Hooks outside of batches have no step.
    of_batch = defaults[0] or hook.endswith(("_step", "_batch_start", "_batch_end"))
    if step and not of_batch:
        raise unsupported(f"self.log({name!r}, on_step=True) is called in {hook}", "remove on_step: it has no step")
    if not epoch and not of_batch:
        raise unsupported(f"self.log({name!r}, on_epoch=False) is called in {hook}", "remove on_epoch")
    if not step and not epoch:
        raise unsupported(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing", "set one of them")
    return step, epoch


def _reduction(given: Any, name: str) -> str:
    found = given.lower() if isinstance(given, str) else getattr(given, "__name__", "")
    if found not in _REDUCTIONS:
        raise unsupported(
            f"self.log({name!r}, reduce_fx={shown(given)})",
            f"one of mean, sum, max, min; {nearest(found, list(_REDUCTIONS))}",
        )
    return _REDUCTIONS[found]


def _as_tensor(value: Any, name: str) -> Tensor:
    if isinstance(value, Mapping):
        raise unsupported(f"self.log({name!r}) is given a mapping", "call self.log_dict")
    try:
        found = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError):
        raise unsupported(
            f"self.log({name!r}) is given a {type(value).__name__}", "give a number or a tensor"
        ) from None
    if found.numel() != 1:
        raise unsupported(f"self.log({name!r}) is given {found.numel()} values", "give one, such as their mean")
    whole = torch.get_default_dtype()
    wide = whole if whole in (torch.float32, torch.float64) else torch.float32
    found = found.reshape(())
    return found if found.dtype in (torch.float32, torch.float64) else found.to(wide)


def rows_of(batch: Any) -> int:
    """Returns the number of rows of a batch: the first dimension of its first tensor, as in Lightning.

    Args:
        batch: a tensor, or mappings, lists and data classes of tensors.

    Raises:
        TrainingError: FG865 if the batch has no tensor.
    """
    found = next(_sizes(batch), None)
    if found is None:
        raise unsupported(
            f"the rows of a {type(batch).__name__} without tensors are unknown", "give self.log batch_size"
        )
    return found


def _sizes(batch: Any) -> Iterator[int | None]:
    if isinstance(batch, Tensor):
        yield 1 if batch.ndim == 0 else batch.size(0)
    elif isinstance(batch, Iterable) and not isinstance(batch, str):
        for item in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _sizes(item)
    elif dataclasses.is_dataclass(batch):
        for part in dataclasses.fields(batch):
            yield from _sizes(getattr(batch, part.name))
    else:
        yield None
