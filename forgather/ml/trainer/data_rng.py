"""The random numbers of rows: what a data set or a collator draws while it makes a micro-batch.

Takes a data set and its collator; gives both as a loader reads them. Keeps true: what is drawn for a micro-batch of a
data set with positions follows from the seed, the epoch, its first row and the replica alone, so that neither the
number of workers nor where a run was stopped changes it; a data set without positions draws, over an epoch, what one
seed gives, the same on every process, whatever a collator draws meanwhile; the global random state is not touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from forgather.ml.checkpoint.rng import capture_rng, seed_everything
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.types import Topology

Collate = Callable[[list[Any]], Any]

# Documented, and missing in the stubs. NumPy's state is slow to copy, and quick to change for another.
_bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
_set_bit_generator: Callable[[Any], None] = np.random.set_bit_generator  # type: ignore[attr-defined]


class _States(NamedTuple):
    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any


def _present() -> _States:
    return _States(torch.default_generator.get_state(), random.getstate(), _bit_generator())


def _set(states: _States) -> None:
    torch.default_generator.set_state(states.torch)
    random.setstate(states.python)
    _set_bit_generator(states.numpy)


class IsolatedRNG:
    """Random numbers of torch, Python and NumPy beside the global ones: its body draws from them.

    Example:
        >>> torch.manual_seed(1).initial_seed(), random.seed(1)
        (1, None)
        >>> apart, drawn = Apart(), []
        >>> for _ in range(2):
        ...     with apart.seeded(5):
        ...         drawn.append(random.random())
        >>> drawn[0] == drawn[1], random.random() == random.Random(1).random()
        (True, True)
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        self._kept: _States | None = None

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Runs its body with the numbers of a seed of 64 bits, of which each source takes its own."""
        outside = _present()
        _set_bit_generator(self._numpy)
        _seed_sources(seed)
        try:
            yield
        finally:
            self._kept = _present()
            _set(outside)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Runs its body with the numbers that come after those of the last body."""
        assert self._kept is not None, "there was a body before"  # noqa: S101
        outside = _present()
        _set(self._kept)
        try:
            yield
        finally:
            self._kept = _present()
            _set(outside)


def _seed_sources(seed: int) -> None:
    # Generators of torch and NumPy are alike, and look at 32 bits each: equal bits would give equal numbers.
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)
    np.random.seed(seed >> 32)
    random.seed(seed)


def seed_of(*facts: int) -> int:
    """Returns 64 bits that follow from some numbers; other numbers give others.

    Example:
        >>> seed_of(1, 0) == seed_of(1, 0), len({seed_of(one, two) for one in range(99) for two in range(99)})
        (True, 9801)
    """
    mixed = 0
    for fact in facts:  # the steps of SplitMix64, which cost a tenth of a digest
        mixed = (mixed + fact + 0x9E3779B97F4A7C15) & _BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
        mixed ^= mixed >> 31
    return mixed


_BITS = 2**64 - 1


class SeededRows(list[int]):
    """Numbers of the rows of a micro-batch, which carry its seed to wherever the rows are read."""

    def __init__(self, rows: Iterable[int] = (), seed: int = 0) -> None:
        super().__init__(rows)
        self.seed = seed


class Rows(Dataset[Any]):
    """A data set whose `__getitems__` gives a whole micro-batch, collated, drawn from the seed that its rows carry.

    Callbacks see it as the data set of the loader: it has the attributes of the one within.

    Args:
        dataset: a length and rows by number.
        collate: rows to a micro-batch.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self.collate = collate
        self._apart = IsolatedRNG()

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: Any) -> Any:
        return self.dataset[row]

    def __getitems__(self, rows: SeededRows) -> Any:
        numbers = list(rows)
        several = getattr(self.dataset, "__getitems__", None)
        with self._apart.seeded(rows.seed):
            return self.collate(several(numbers) if several else [self.dataset[number] for number in numbers])

    def __getattr__(self, name: str) -> Any:
        return _of_the_inner(self, name)


def as_it_is(batch: Any) -> Any:
    """Returns a micro-batch that was collated where its rows were read."""
    return batch


class Stream(IterableDataset[Any]):
    """A data set without positions, read from the begin of an epoch in random numbers of its own.

    Args:
        dataset: gives rows in its own order.
        collate: rows to a micro-batch; `self.collated` is what a loader is given.
        batch_rows: rows of a micro-batch.
        replica: which one this is; collators of two replicas draw different numbers, their data sets the same.
        in_workers: whether other processes read it.
        note: gives on the rows of an iteration, in this process or in the first worker, and looks at them.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        *,
        batch_rows: int,
        replica: int,
        in_workers: bool,
        note: Callable[[Iterable[Any]], Iterable[Any]],
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.batch_rows = batch_rows
        self.replica = replica
        self._note = note
        self._place = torch.zeros(3, dtype=torch.int64)
        if in_workers:  # those that live on hear of the next epoch in it
            self._place.share_memory_()  # type: ignore[no-untyped-call]
        self._apart = IsolatedRNG()
        self._of_collator = IsolatedRNG()
        self._seed = self._row = 0

    def place(self, *, seed: int, epoch: int, skip: int = 0) -> None:
        """Says where the next iteration begins, here or in workers.

        Args:
            seed: of the run.
            epoch: given to the data set's `set_epoch`, where it has one.
            skip: rows that are read past, and not collated.
        """
        self._place.copy_(torch.tensor([seed, epoch, skip]))

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, skip = self._place.tolist()
        worker = get_worker_info()
        self._seed, self._row = seed_of(seed, epoch, 0 if worker is None else worker.id), skip
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        if worker is not None:
            _seed_sources(self._seed)
        rows = self._note(self.dataset) if worker is None or worker.id == 0 else self.dataset
        yield from itertools.islice(rows, skip, None)

    def collated(self, rows: list[Any]) -> Any:
        """Returns a micro-batch; the numbers that the data set draws do not hear of those that its collator draws."""
        with self._of_collator.seeded(seed_of(self._seed, self._row, self.replica)):
            self._row += self.batch_rows
            return self.collate(rows)

    def drawn_apart(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields micro-batches that are made in this process; what the data set draws is not drawn from the run's."""
        seed, epoch, _ = self._place.tolist()
        drawing = self._apart.seeded(seed_of(seed, epoch, 0))
        while True:
            with drawing:
                batch = next(batches, self)
            if batch is self:
                return
            yield batch
            drawing = self._apart.going_on()

    def __getattr__(self, name: str) -> Any:
        return _of_the_inner(self, name)


def _of_the_inner(outer: Any, name: str) -> Any:
    # A copy in a worker has no attribute yet when it is asked for those of pickling.
    if name.startswith("__") or "dataset" not in vars(outer):
        raise AttributeError(name)
    return getattr(outer.dataset, name)


_log = get_logger(__name__)

_OF_ALL = "of_ranks"


def seed_process(seed: int, topology: Topology, *, step: int = 0) -> None:
    """Seeds everything random of this process.

    Args:
        seed: of the run.
        topology: which replica this is.
        step: where a run goes on whose states cannot be had; numbers of its beginning are not drawn again.
    """
    if topology.dp_rank or step:
        digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=4).digest()
        # Generators of the CPU look at 32 bits: within a run no two replicas have the same.
        seed = (int.from_bytes(digest, "big") + topology.dp_rank) % 2**32
    seed_everything(seed)


def rng_of_all() -> dict[str, Any]:
    """Returns the random states of this process, or those of all where there are several."""
    own = capture_rng()
    return {_OF_ALL: collectives.gathered(own)} if collectives.several() else own


def own_rng(saved: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """Returns the saved state of this process; None where as many processes as now did not save theirs."""
    states = saved.get(_OF_ALL, [saved])
    if len(states) == topology.world_size:
        found: dict[str, Any] = states[topology.rank]
        return found
    _log.warning(
        "random states of %d processes were saved, and there are %d: what is drawn (dropout) differs from here on",
        len(states),
        topology.world_size,
    )
    return None
