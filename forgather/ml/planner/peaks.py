"""The peaks of a recording: for each region of the run, such as the backward pass of the third block, the largest sum.

A `Timeline` has the births and deaths of allocations in their order. It gives the `Peak` of each region, divided into
categories, for the sizes that were recorded and for any others: a step with other rows has the same births and deaths.

Units:
    bytes, without the rounding of a device's allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np

from forgather.ml.planner.allocations import HOST, Allocation, Region

_BEFORE = -1


class Moment(NamedTuple):
    """The sum of bytes when something was allocated.

    Args:
        maker: what was allocated.
        num_bytes: the sum in bytes.
        categories: its parts by category, in bytes.
    """

    maker: Allocation
    num_bytes: int
    categories: dict[str, int]


@dataclass(slots=True)
class Peak:
    """The largest sum of bytes within one region.

    Args:
        num_bytes: the sum in bytes.
        categories: its parts by category, in bytes.
        made_by: the allocation that made the sum so large, such as "aten.mm: 2 x 1024 x 50257 float32".
        course: all sums of the region, in their order; empty if only the largest is known.
    """

    num_bytes: int
    categories: dict[str, int] = field(default_factory=dict)
    made_by: str = ""
    course: Sequence[Moment] = field(default=(), compare=False, repr=False)


class Timeline:
    """The births and deaths of allocations.

    Args:
        allocations: the allocations of a recording.
        category_of: a function that returns the category of an allocation.

    Attributes:
        sizes: the bytes of each allocation.
    """

    def __init__(self, allocations: Iterable[Allocation], category_of: Callable[[Allocation], str]) -> None:
        self._known = [*allocations]
        self.sizes = np.array([one.num_bytes for one in self._known], dtype=np.int64)
        places = range(len(self._known))
        on_host = [place for place in places if self._known[place].on_host]
        # What is made on the host still ends a region of the device, in which nothing else may be made.
        device = [*(place for place in places if not self._known[place].on_host), *on_host]
        categories = [category_of(one) for one in self._known]
        self._device = _Events(self._known, categories, device, lambda one: one.region)
        self._host = _Events(self._known, categories, on_host, lambda one: Region(HOST, _BEFORE)) if on_host else None
        self._is_on_host = np.array([one.on_host for one in self._known], dtype=bool)

    def peaks(
        self, sizes: np.ndarray | None = None, sized: Callable[[int], Allocation] | None = None
    ) -> dict[Region, Peak]:
        """Returns the peak of each region in which memory was allocated, and that of the memory of the host, if any.

        Args:
            sizes: the bytes of each allocation; None for those that were recorded.
            sized: a function that returns an allocation with such a size, by its place; None as it was recorded.
        """
        given = self.sizes if sizes is None else sizes
        sized = sized or self._known.__getitem__
        if self._host is None:
            return self._device.peaks(given, sized)
        on_device = np.where(self._is_on_host, 0, given)
        return {**self._device.peaks(on_device, sized), **self._host.peaks(given, sized)}


class _Events:
    """The births and deaths of some allocations, in their order."""

    def __init__(
        self,
        known: Sequence[Allocation],
        categories: Sequence[str],
        places: Sequence[int],
        region_of: Callable[[Allocation], Region],
    ) -> None:
        events: list[tuple[int, int, int]] = []
        for place in places:
            one = known[place]
            events.append((one.born, 1, place))
            if one.died is not None:
                events.append((one.died, -1, place))
        events.sort(key=lambda event: event[0])
        self.places = np.array([place for _, _, place in events], dtype=np.int64)
        self._signs = np.array([sign for _, sign, _ in events], dtype=np.int64)
        used = [categories[place] for _, _, place in events]
        self.categories = [*dict.fromkeys(used)]
        numbers = {name: number for number, name in enumerate(self.categories)}
        codes = np.array([numbers[name] for name in used], dtype=np.int64)
        self._is_of = codes == np.arange(len(numbers))[:, None]
        births: dict[Region, list[int]] = {}
        for number, (_, sign, place) in enumerate(events):
            if sign > 0:
                births.setdefault(region_of(known[place]), []).append(number)
        self._births = {region: np.array(numbers) for region, numbers in births.items()}

    def peaks(self, sizes: np.ndarray, sized: Callable[[int], Allocation]) -> dict[Region, Peak]:
        """Returns the first of the largest sums of each region, see `Timeline.peaks`."""
        changes = sizes[self.places] * self._signs
        totals = np.cumsum(changes)
        sums = _Sums(self, np.where(self._is_of, changes, 0), totals, sized)
        found: dict[Region, Peak] = {}
        for region, births in self._births.items():
            maker, num_bytes, categories = sums.moment(births[np.argmax(totals[births])])
            found[region] = Peak(num_bytes, categories, str(maker), _Course(sums, births))
        return found


class _Sums:
    """The sums of bytes after each event."""

    def __init__(
        self, events: _Events, changes: np.ndarray, totals: np.ndarray, sized: Callable[[int], Allocation]
    ) -> None:
        self._events = events
        self._changes = changes
        self._totals = totals
        self._sized = sized

    @cached_property
    def _by_category(self) -> np.ndarray:
        return np.cumsum(self._changes, axis=1)

    def moment(self, event: int) -> Moment:
        """Returns the sum after a birth."""
        sizes = zip(self._events.categories, self._by_category[:, event], strict=True)
        return Moment(
            self._sized(int(self._events.places[event])),
            int(self._totals[event]),
            {name: int(size) for name, size in sizes if size},
        )


class _Course(Sequence[Moment]):
    """The sums of a region, each of which is computed where it is asked for: few are."""

    def __init__(self, sums: _Sums, births: np.ndarray) -> None:
        self._sums = sums
        self._births = births

    def __len__(self) -> int:
        return len(self._births)

    @overload
    def __getitem__(self, number: int) -> Moment: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Moment]: ...
    def __getitem__(self, number: Any) -> Any:
        births = self._births[number]
        return _Course(self._sums, births) if isinstance(number, slice) else self._sums.moment(births)

    def __iter__(self) -> Iterator[Moment]:
        return map(self._sums.moment, self._births)


def peaks(allocations: Iterable[Allocation], category_of: Callable[[Allocation], str]) -> Mapping[Region, Peak]:
    """Returns the peaks of the sizes that were recorded, see `Timeline.peaks`.

    Args:
        allocations: the allocations of a recording.
        category_of: a function that returns the category of an allocation.
    """
    return Timeline(allocations, category_of).peaks()
