"""Random numbers of data: seeds for data sets and collators.

Takes a data set and its collator; gives both in the form that a `DataLoader` reads. The numbers drawn for a micro-batch
of a map-style data set depend on seed, epoch, first row and data-parallel rank alone: neither the number of workers nor
a resume changes them. A stream draws, over an epoch, from one seed that is the same on every process, independently of
its collator. The global random state, which belongs to the model, is not changed.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

Collate = Callable[[list[Any]], Any]

# Documented, and missing in the stubs. Copying NumPy's state is slow; replacing its bit generator is fast.
_bit_generator: Callable[[], Any] = np.random.get_bit_generator  # type: ignore[attr-defined]
_set_bit_generator: Callable[[Any], None] = np.random.set_bit_generator  # type: ignore[attr-defined]


class _States(NamedTuple):
    torch: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any


def _current_states() -> _States:
    return _States(torch.default_generator.get_state(), random.getstate(), _bit_generator())


def _restore_states(states: _States) -> None:
    torch.default_generator.set_state(states.torch)
    random.setstate(states.python)
    _set_bit_generator(states.numpy)


class IsolatedRNG:
    """Random states of torch, Python and NumPy that replace the global ones within a `with` body.

    Example:
        >>> torch.manual_seed(1).initial_seed(), random.seed(1)
        (1, None)
        >>> isolated, drawn = IsolatedRNG(), []
        >>> for _ in range(2):
        ...     with isolated.seeded(5):
        ...         drawn.append(random.random())
        >>> drawn[0] == drawn[1], random.random() == random.Random(1).random()
        (True, True)
    """

    def __init__(self) -> None:
        self._numpy = np.random.MT19937(0)
        self._kept: _States | None = None

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Runs its body with generators seeded from 64 bits."""
        outside = _current_states()
        _set_bit_generator(self._numpy)
        _seed_sources(seed)
        try:
            yield
        finally:
            self._kept = _current_states()
            _restore_states(outside)

    @contextlib.contextmanager
    def continued(self) -> Iterator[None]:
        """Runs its body with the generators in the state that the previous body left."""
        assert self._kept is not None, "there was a body before"  # noqa: S101
        outside = _current_states()
        _restore_states(self._kept)
        try:
            yield
        finally:
            self._kept = _current_states()
            _restore_states(outside)


def _seed_sources(seed: int) -> None:
    # torch and NumPy both use MT19937 and read 32 bits of the seed: equal bits would give equal numbers.
    torch.default_generator.manual_seed(seed & 0xFFFFFFFF)
    np.random.seed(seed >> 32)
    random.seed(seed)


def seed_of(*facts: int) -> int:
    """Returns a 64-bit seed mixed from integers; different integers give different seeds, up to collisions of 64 bits.

    Example:
        >>> seed_of(1, 0) == seed_of(1, 0), len({seed_of(one, two) for one in range(99) for two in range(99)})
        (True, 9801)

    Source:
        The output function of SplitMix64 (Steele, Lea, Flood, 2014), applied once per integer.
    """
    mixed = 0
    for fact in facts:  # a tenth of the time of a cryptographic digest, which matters once per micro-batch
        mixed = (mixed + fact + 0x9E3779B97F4A7C15) & _BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _BITS
        mixed ^= mixed >> 31
    return mixed


_BITS = 2**64 - 1


class SeededRows(list[int]):
    """Row numbers of a micro-batch, together with the seed of its random numbers.

    A list subclass, because a `DataLoader` sends it to the worker that reads the rows.
    """

    def __init__(self, rows: Iterable[int] = (), seed: int = 0) -> None:
        super().__init__(rows)
        self.seed = seed


class SeededDataset(Dataset[Any]):
    """A map-style data set whose `__getitems__` returns a collated micro-batch, drawn from the seed of its rows.

    It forwards attributes to the inner data set, because callbacks see it as the loader's data set.

    Args:
        dataset: has a length, and rows by number.
        collate: makes a micro-batch of rows.
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
            # Collated within the seeded body: a collator that masks or pads at random must draw from the same seed.
            return self.collate(several(numbers) if several else [self.dataset[number] for number in numbers])

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)


def already_collated(batch: Any) -> Any:
    """Returns a micro-batch unchanged: the collator of a loader whose data set collates."""
    return batch


class SeededStream(IterableDataset[Any]):
    """An iterable data set that reads from the start of an epoch, with random numbers of its own.

    Args:
        dataset: gives rows in its own order.
        collate: makes a micro-batch of rows; a loader gets `self.collated`.
        batch_rows: rows of a micro-batch.
        replica: data-parallel rank; collators of two ranks draw different numbers, their data sets the same.
        in_workers: whether worker processes read it.
        note: passes on the rows of an iteration, in this process or in the first worker, and records them.
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
        if in_workers:  # persistent workers keep a copy of this object: shared memory tells them the next epoch
            self._place.share_memory_()  # type: ignore[no-untyped-call]
        self._apart = IsolatedRNG()
        self._of_collator = IsolatedRNG()
        self._seed = self._row = 0

    def set_position(self, *, seed: int, epoch: int, skip: int = 0) -> None:
        """Sets where the next iteration begins, in this process or in workers.

        Args:
            seed: of the run.
            epoch: given to the data set's `set_epoch`, if it has one.
            skip: rows that are read and dropped without collating.
        """
        self._place.copy_(torch.tensor([seed, epoch, skip]))

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, skip = self._place.tolist()
        worker = get_worker_info()
        self._seed, self._row = seed_of(seed, epoch, 0 if worker is None else worker.id), skip
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        # Nothing else draws in a worker process: it can seed the global generators.
        if worker is not None:
            _seed_sources(self._seed)
        rows = self._note(self.dataset) if worker is None or worker.id == 0 else self.dataset
        yield from itertools.islice(rows, skip, None)

    def collated(self, rows: list[Any]) -> Any:
        """Returns a micro-batch; its collator draws from another generator than the data set does."""
        with self._of_collator.seeded(seed_of(self._seed, self._row, self.replica)):
            self._row += self.batch_rows
            return self.collate(rows)

    def read_isolated(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields micro-batches read in this process, without drawing from the run's global random state."""
        seed, epoch, _ = self._place.tolist()
        drawing = self._apart.seeded(seed_of(seed, epoch, 0))
        while True:
            # Only the reading is isolated: between two batches the training step draws from the global state.
            with drawing:
                batch = next(batches, self)
            if batch is self:
                return
            yield batch
            drawing = self._apart.continued()

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)


def _inner_attribute(outer: Any, name: str) -> Any:
    # Pickling looks up special methods on a copy that has no attributes yet: looking for `dataset` would recurse for
    # ever.
    if name.startswith("__") or "dataset" not in vars(outer):
        raise AttributeError(name)
    return getattr(outer.dataset, name)
