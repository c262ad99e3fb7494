"""The training batches of a user's loader as windows, with a position that a checkpoint stores.

The input is any iterable of batches; the output is windows, one for each optimizer step. Batches are read one at a time
while the step computes, so that random numbers are drawn in the order in which Lightning draws them. A run that resumes
within an epoch puts the random generators back to where they were at the beginning of the epoch, reads past the batches
that it has trained on, and compares the last of them: other rows than before are an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils._pytree import tree_leaves

from forgather.errors import CheckpointError, TrainingError
from forgather.lightning import loaders
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.losses import LossRule
from forgather.ml.number_format import plural
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.data_changes import batch_digest
from forgather.ml.trainer.data_fingerprint import Fingerprint
from forgather.ml.trainer.rewind import RowRange
from forgather.ml.types import Topology, Window

_log = get_logger(__name__)


class _OneByOne(list[Any]):
    """The batches of a window, each of which is read when the strategy comes to it."""

    def __init__(self, source: Iterator[Any], count: int) -> None:
        super().__init__()
        self._source, self._count = source, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            yield next(self._source)


class LoaderBatches:
    """The training batches of a loader, and the position in them, in the form that our loop takes.

    Args:
        loader: the loader, which gives this rank its rows.
        limit: the number of batches of an epoch, or the share of them.
        args: the training arguments, whose accumulation and number of steps are read.
        topology: the topology of this process.
        metrics: what has the metrics of the epoch, which a checkpoint stores next to the position in it.

    Raises:
        TrainingError: FG803 if there are no batches; FG805 if their number is unknown and that of the steps, too;
            FG865 if the ranks have different numbers of batches.
    """

    def __init__(
        self, loader: Any, limit: int | float, args: TrainingArguments, *, topology: Topology, metrics: Stateful
    ) -> None:
        self.loader = loader
        self.accumulation = args.accumulation
        self.seed = args.seed
        self.epoch = self.row = 0
        self.has_last = False
        """Whether the window that was given last has the last batch of the epoch."""
        self._topology, self._metrics = topology, metrics
        self.num_batches = loaders.limited(loaders.length(loader), limit, "limit_train_batches")
        loaders.require_equal_counts([self.num_batches], "the training data")
        self.share = SimpleNamespace(rows=getattr(loader, "batch_size", None) or 1, size=topology.dp_size)
        self._opened: Iterator[Any] | None = None
        self._begin: dict[str, Any] = {}
        self._latest: Any = None
        self._expected: str | None = None
        if self.num_batches == 0:
            raise TrainingError("the training data gives no batches", code="FG803", hint="check how it is filtered")
        if self.num_batches is None and args.max_steps <= 0:
            raise TrainingError(
                "the training data has no length, and max_steps is not set",
                code="FG805",
                hint="set max_steps, or limit_train_batches to a number of batches",
            )

    @property
    def dataset(self) -> Any:
        """The data set of the loader, or the loader itself."""
        return getattr(self.loader, "dataset", self.loader)

    @property
    def num_rows(self) -> int | None:
        """The number of batches of an epoch: positions are counted in batches."""
        return self.num_batches

    rows_left_out = 0
    has_streams = False
    copies_ahead = False
    may_be_read_early = False

    @property
    def batch(self) -> int:
        """The number of batches of the current epoch that were trained on."""
        return self.row

    @property
    def fingerprint(self) -> Fingerprint:
        """The number of batches of an epoch; the batches themselves are compared when a run resumes."""
        return Fingerprint(self.num_batches)

    @property
    def at_end_of_epoch(self) -> bool:
        """True if no batch of the epoch is left; False if their number is unknown."""
        return self.num_batches is not None and self.row >= self.num_batches

    def epoch_ends(self) -> Iterator[int] | None:
        """Yields the number of optimizer steps after each epoch; None if it is unknown."""
        return None if self.num_batches is None else self.accumulation.epoch_ends(self.num_batches)

    def open(self) -> None:
        """Begins to read an epoch now: this draws the random numbers that a loader draws at its beginning."""
        loaders.set_epoch(self.loader, self.epoch)
        if self.row:
            self._put_back()
        self._begin = {"rng": capture_rng(), "generators": [one.get_state() for one in generators_of(self.loader)]}
        self._opened = iter(self.loader)
        if self.row:
            self._read_past(self._opened)

    def _put_back(self) -> None:
        for generator, state in zip(generators_of(self.loader), self._begin["generators"], strict=True):
            generator.set_state(state.cpu())
        restore_rng(self._begin["rng"])

    def _read_past(self, batches: Iterator[Any]) -> None:
        _log.warning("reading past %s of epoch %d, which the run has trained on", plural(self.row, "batch"), self.epoch)
        last = None
        for _ in range(self.row):
            last = next(batches, None)
        found = _digest(last)
        if found != self._expected:
            raise CheckpointError(
                f"batch {self.row} of epoch {self.epoch} has other rows than before the checkpoint",
                code="FG610",
                hint="a loader must give the same batches again after the same seed; resume from a checkpoint at the "
                "end of an epoch otherwise",
            )

    def windows(self, rule: LossRule, *, step: int = 0, padded: bool = False) -> Iterator[Window]:
        """Returns the windows of the epoch, from the current position on.

        Args:
            rule: the loss rule, which is not used.
            step: the number of optimizer steps that are done, on which the number of micro-batches may depend.
            padded: not used, because no batches are read by virtual streams.
        """
        if self._opened is None:
            self.open()
        opened, self._opened = self._opened, None
        assert opened is not None  # noqa: S101
        return self._sized(opened, step) if self.num_batches is not None else self._unsized(opened, step)

    def _sized(self, batches: Iterator[Any], step: int) -> Iterator[Window]:
        place = self.row
        assert self.num_batches is not None  # noqa: S101
        while place < self.num_batches:
            wanted = self.accumulation.at(epoch=self.epoch, step=step)
            count = min(wanted, self.num_batches - place)
            place, step = place + count, step + 1
            self.has_last = place == self.num_batches
            yield self._window(_OneByOne(self._noted(batches), count), wanted)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._latest = batch
            yield batch
        raise TrainingError(
            f"the loader says that it has {self.num_batches} batches, and gave fewer",
            code="FG803",
            hint="correct its length, or set limit_train_batches",
        )

    def _unsized(self, batches: Iterator[Any], step: int) -> Iterator[Window]:
        # One batch ahead, as in Lightning: whether a batch is the last one is known when there is none after it.
        following = next(batches, self)
        while following is not self:
            wanted = self.accumulation.at(epoch=self.epoch, step=step)
            read: list[Any] = []
            while len(read) < wanted and following is not self:
                read.append(following)
                following = next(batches, self)
            self._latest, self.has_last, step = read[-1], following is self, step + 1
            yield self._window(read, wanted)

    def _window(self, batches: list[Any], wanted: int) -> Window:
        # As in Lightning: a short last window is divided by the whole number of batches, too.
        return Window(batches=batches, num_valid=float(wanted), num_tokens=0, num_rows=len(batches))

    def same_everywhere(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Returns the windows: ranks of a loader without a length read their own rows."""
        return windows

    def rows_of(self, window: Window) -> RowRange:
        """Returns the range of batches of a window at the current position."""
        return RowRange(self.epoch, self.row, self.row + len(window.batches))

    def advance(self, window: Window) -> None:
        """Moves the position past the batches of a window."""
        self.row += len(window.batches)

    def next_epoch(self) -> None:
        """Moves the position to the beginning of the next epoch."""
        self.epoch, self.row = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, and what is needed to read the same epoch again. Collective."""
        state: dict[str, Any] = {"epoch": self.epoch, "row": self.row, "batch": self.row, "loader": True}
        state["num_batches"] = self.num_batches
        if self.row:
            # Also at the end of an epoch, whose hooks follow after the checkpoint.
            state["metrics"] = collectives.all_gather(self._metrics.state_dict())
        if self.row and not self.at_end_of_epoch:
            state["ranks"] = collectives.all_gather({**self._begin, "digest": _digest(self._latest)})
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the position of a checkpoint.

        Raises:
            CheckpointError: FG610 if the epoch cannot be read from there.
        """
        if not state.get("loader"):
            raise _other("the checkpoint is not one of a module's loader", "resume with the data that it was made from")
        if state["num_batches"] != self.num_batches:
            raise _other(
                f"an epoch had {state['num_batches']} batches, and has {self.num_batches} now",
                "resume with the same data, batch size, limits and number of processes",
            )
        self.epoch, self.row = state["epoch"], state["row"]
        # Absent at the beginning of an epoch, and in checkpoints of earlier releases.
        if metrics := state.get("metrics"):
            self._load_metrics(metrics)
        if ranks := state.get("ranks"):
            if len(ranks) != self._topology.world_size:
                raise _other(
                    f"the checkpoint is within an epoch of {plural(len(ranks), 'process', 'processes')}, and there are "
                    f"{self._topology.world_size}",
                    "resume with the same number, or from a checkpoint at the end of an epoch",
                )
            own = ranks[self._topology.rank]
            self._begin = {"rng": own["rng"], "generators": own["generators"]}
            self._expected = own["digest"]

    def _load_metrics(self, ranks: list[dict[str, Any]]) -> None:
        if len(ranks) == self._topology.world_size:
            self._metrics.load_state_dict(ranks[self._topology.rank])
            return
        _log.warning(
            "the metrics of epoch %d are lost: the checkpoint has those of %s, and there are %d",
            self.epoch,
            plural(len(ranks), "process", "processes"),
            self._topology.world_size,
        )


def _other(message: str, hint: str) -> CheckpointError:
    return CheckpointError(f"the training data changed since the checkpoint: {message}", code="FG610", hint=hint)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the generators that a loader and its samplers have of their own.

    Args:
        loader: the loader.
    """
    sampler = getattr(loader, "sampler", None)
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found: list[torch.Generator] = []
    for owner in (loader, sampler, inner):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is one for one in found):
            found.append(generator)
    return found


def _digest(batch: Any) -> str | None:
    return batch_digest(tree_leaves(batch))
