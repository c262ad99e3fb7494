"""Seeds for the random numbers that data sets and collators draw, separate from the model's random numbers.

`SeededDataset` and `SeededStream` wrap a data set and its collator for a `DataLoader`. The random numbers for a
micro-batch of a map-style data set depend on the seed, the epoch, the first row and the data-parallel rank alone;
neither the number of worker processes nor a resume changes these numbers. An iterable data set draws from one seed per
epoch, which is the same on every process, and its collator draws from another seed. The global random state, from which
the model draws, is not changed.
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

from forgather.ml.data.row_epoch import reading_epoch, stay_in_epoch

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
    """Random states of torch, Python and NumPy that replace the global random states within a `with` body.

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
        """Context manager that runs its body with generators that are seeded with a 64-bit seed."""
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
        """Context manager that runs its body with the generators in the state at the end of the previous body."""
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
    """Returns a 64-bit seed that is computed from integers.

    Different integers give different seeds, except for random collisions of 64-bit numbers.

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
    """The row numbers of a micro-batch, with the seed of its random numbers and the number of the epoch.

    The class is a list, so that a `DataLoader` sends all of them to the worker that reads the rows.
    """

    def __init__(self, rows: Iterable[int] = (), seed: int = 0, epoch: int = 0) -> None:
        super().__init__(rows)
        self.seed = seed
        self.epoch = epoch


class SeededDataset(Dataset[Any]):
    """A map-style data set whose `__getitems__` reads and collates a micro-batch with seeded random numbers.

    Seed and epoch are those of the `SeededRows` that are requested. A data set with a method `set_epoch` gets the
    number of the epoch before its rows are read, also in a worker process. Attributes of the inner data set can be read
    from the wrapper, because callbacks get the wrapper as the loader's data set.

    Args:
        dataset: the inner data set, which has a length and returns rows by number.
        collate: the collator, a function from a list of rows to a micro-batch.
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
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(rows.epoch)
        with reading_epoch(rows.epoch), self._apart.seeded(rows.seed):
            # Collated within the seeded body: a collator that masks or pads at random must draw from the same seed.
            return self.collate(several(numbers) if several else [self.dataset[number] for number in numbers])

    def __getattr__(self, name: str) -> Any:
        return _inner_attribute(self, name)


def already_collated(batch: Any) -> Any:
    """Returns a micro-batch unchanged. This is the collator of a `DataLoader` whose data set collates rows itself."""
    return batch


class SeededStream(IterableDataset[Any]):
    """An iterable data set that reads the rows of an epoch from the beginning, with separately seeded random numbers.

    Args:
        dataset: the inner data set, whose rows can only be iterated over.
        collate: the collator, a function from a list of rows to a micro-batch. A `DataLoader` must use `collated`
            instead.
        batch_rows: the number of rows of a global micro-batch.
        replica: the data-parallel rank. The data set draws the same random numbers on all ranks, and the collator
            draws different ones.
        in_workers: whether worker processes read the data set.
        read: a function that yields the rows of the data set.
        note: a function that yields the rows that it gets and records them. It is used in the first worker process, or
            in the training process if there are no worker processes.
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
        read: Callable[[Any], Iterable[Any]] = iter,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.batch_rows = batch_rows
        self.replica = replica
        self._note = note
        self._read = read
        self._place = torch.zeros(3, dtype=torch.int64)
        if in_workers:  # persistent workers keep a copy of this object: shared memory tells them the next epoch
            self._place.share_memory_()  # type: ignore[no-untyped-call]
        self._apart = IsolatedRNG()
        self._of_collator = IsolatedRNG()
        self._seed = self._row = 0

    def set_position(self, *, seed: int, epoch: int, skip: int = 0) -> None:
        """Sets the position at which the next iteration begins, also for iterations in worker processes.

        Args:
            seed: the base seed of the random numbers.
            epoch: the number of the epoch, which is passed to the data set's `set_epoch` if that method exists.
            skip: the number of rows to read and drop without collating them.
        """
        self._place.copy_(torch.tensor([seed, epoch, skip]))

    def __iter__(self) -> Iterator[Any]:
        seed, epoch, skip = self._place.tolist()
        worker = get_worker_info()
        self._seed, self._row = seed_of(seed, epoch, 0 if worker is None else worker.id), skip
        if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
            set_epoch(epoch)
        # Nothing else draws or reads in a worker process: it can seed the global generators, and stay in the epoch.
        if worker is not None:
            _seed_sources(self._seed)
            stay_in_epoch(epoch)
        rows = self._read(self.dataset)
        rows = self._note(rows) if worker is None or worker.id == 0 else rows
        yield from itertools.islice(rows, skip, None)

    def collated(self, rows: list[Any]) -> Any:
        """Returns the micro-batch of the rows; the collator draws from another seed than the data set."""
        with self._of_collator.seeded(seed_of(self._seed, self._row, self.replica)):
            self._row += self.batch_rows
            return self.collate(rows)

    def read_isolated(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields all micro-batches; reading them in this process does not draw from the run's global random state."""
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
