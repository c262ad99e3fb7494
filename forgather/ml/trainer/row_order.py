"""The order of a shuffled epoch, computed for the rows that are asked for and never listed.

Takes the number of rows and a seed; gives the row at each position of the epoch. A list of 10 million rows needs 400 MB
and 6 seconds on every rank before the first row; a computed order needs neither, whatever the number of rows.

The order is a permutation of a rectangle of a x b cells, a little larger than the number of rows: rounds of a Feistel
network add a number that depends on the one coordinate, a key and nothing else to the other coordinate, which can be
undone, so that no two cells become one. A cell outside the rows is permuted again until it is a row (cycle walking).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from forgather.ml.trainer.data_rng import seed_of

AUTO, LISTED, COMPUTED = "auto", "listed", "computed"
LARGE = 2**20
"""The number of rows above which the order is computed by default; below, it is that of earlier releases."""

COMPUTED_RULE = "computed 1"
"""The rule as a checkpoint records it. Another network, or other keys, would be `computed 2`."""

_ROUNDS = 10  # each coordinate is changed five times; `test_row_order` measures what fewer would leave
_SMALLEST_SIDE = 8  # a few rows need more cells than rows, as few functions lead from three numbers to three
_BLOCK = 4096  # rows that are computed at once: numpy's calls would otherwise cost more than the numbers

Numbers = np.ndarray[Any, np.dtype[np.uint64]]


def order_rule(setting: str, num_rows: int) -> str:
    """Returns the rule of the order of a shuffled epoch, as a checkpoint records it.

    Args:
        setting: the setting `shuffle_order`.
        num_rows: the number of rows of the epoch.

    Example:
        >>> order_rule("auto", 2**20), order_rule("auto", 2**20 + 1), order_rule("listed", 10**9)
        ('listed', 'computed 1', 'listed')
    """
    is_computed = num_rows > LARGE if setting == AUTO else setting == COMPUTED
    return COMPUTED_RULE if is_computed else LISTED


class ComputedOrder:
    """A pseudorandom permutation of row numbers, computed by position.

    Args:
        num_rows: the number of rows.
        seed: the seed of the permutation, a 64-bit number.

    Example:
        >>> sorted(ComputedOrder(7, seed=3)[0:7]), len(ComputedOrder(10**9, seed=3)[999_999_990:])
        ([0, 1, 2, 3, 4, 5, 6], 10)

    Source:
        Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002), section 5, with more rounds and with the
        output function of SplitMix64 in place of a cipher: the order must look random, and keep no secret.
    """

    def __init__(self, num_rows: int, seed: int) -> None:
        self.num_rows = num_rows
        # Always larger than the rows: without cells to walk over, networks give even permutations only.
        self._width = max(math.isqrt(num_rows) + 1, _SMALLEST_SIDE)
        self._height = max(num_rows // self._width + 2, _SMALLEST_SIDE)
        self._keys = [seed_of(seed, round_) for round_ in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, positions: slice) -> list[int]:
        """Returns the rows at a range of positions."""
        found: list[int] = self.rows(np.arange(*positions.indices(self.num_rows), dtype=np.uint64)).tolist()
        return found

    def rows(self, positions: Numbers) -> Numbers:
        """Returns the rows at positions of the epoch.

        Args:
            positions: numbers from 0 to below `num_rows`.

        Shapes:
            positions: (N,). Returns (N,).
        """
        found = self._permuted(positions)
        while len(outside := np.flatnonzero(found >= self.num_rows)):
            found[outside] = self._permuted(found[outside])
        return found

    def micro_batches(self, first: int, *, step: int, size: int, number: int) -> Iterator[list[int]]:
        """Yields the rows of micro-batches that are `step` positions apart.

        Args:
            first: the position of the first row of the first micro-batch.
            step: the number of positions from one micro-batch to the next.
            size: the number of rows of a micro-batch. Positions after the last one are left out.
            number: the number of micro-batches.
        """
        at_once = max(1, _BLOCK // size)
        # Doubled from one micro-batch on: the first one must not wait for rows of later steps.
        done, block = 0, 1
        while done < number:
            block = min(block * 2, at_once, number - done)
            starts = first + step * np.arange(done, done + block, dtype=np.int64)
            places = (starts[:, None] + np.arange(size)).reshape(-1)
            rows = self.rows(np.minimum(places, self.num_rows - 1).astype(np.uint64)).tolist()
            for place, start in enumerate(starts.tolist()):
                yield rows[place * size : place * size + min(size, max(0, self.num_rows - start))]
            done += block

    def _permuted(self, cells: Numbers) -> Numbers:
        width, height = np.uint64(self._width), np.uint64(self._height)
        row, column = np.divmod(cells, width)
        for round_, key in enumerate(self._keys):
            if round_ % 2:
                row = (row + _mixed(column, key) % height) % height
            else:
                column = (column + _mixed(row, key) % width) % width
        return row * width + column


def _mixed(values: Numbers, key: int) -> Numbers:
    """Returns 64 pseudorandom bits for each value, by the output function of SplitMix64."""
    mixed = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
