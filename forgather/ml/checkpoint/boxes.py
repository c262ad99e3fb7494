"""Whether the pieces of a tensor make the whole of it.

Takes the shape of a tensor and the boxes that its pieces fill; gives what is wrong, or nothing. Keeps true: pieces that
overlap, leave a gap or lie outside are found in one pass over them, however many there are and however they are cut.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any, NamedTuple

_PRIME = 2**61 - 1
_MOST = 2**63


class Box(NamedTuple):
    """Where a piece lies in its tensor: `offsets` and `sizes`, a number for each dim."""

    offsets: Any
    sizes: Any


def fault_of(shape: Any, boxes: Sequence[Box]) -> str | None:
    """Returns, in words, what is wrong with the pieces of a tensor; None where they fill each place of it once.

    Args:
        shape: of the tensor, as a file says.
        boxes: of its pieces, as a file says.

    Example:
        >>> fault_of([4], [Box([0], [2]), Box([2], [2])]) is None
        True
        >>> fault_of([4], [Box([0], [2]), Box([1], [2])])
        'its pieces overlap, or leave a gap'
    """
    if not _are_sizes(shape) or math.prod(shape) >= _MOST:
        return f"its shape is {shape!r:.60}"
    for box in boxes:
        if not (_are_sizes(box.offsets) and _are_sizes(box.sizes) and len(box.offsets) == len(box.sizes) == len(shape)):
            return f"a piece of it lies at {box.offsets!r:.60} and has the shape {box.sizes!r:.60}"
        if any(begin + size > whole for begin, size, whole in zip(box.offsets, box.sizes, shape, strict=True)):
            return f"a piece at {box.offsets!r:.60} of the shape {box.sizes!r:.60} lies outside of {shape!r:.60}"
    return None if _fill_once(shape, boxes) else "its pieces overlap, or leave a gap"


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list | tuple) and all(type(one) is int and 0 <= one < _MOST for one in found)


def _fill_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Tells whether boxes within a shape fill each place of it once.

    Each interval of a dim weighs the difference of two random numbers, one for each of its ends; a box weighs the
    product. Weights add up, so boxes that fill the whole once weigh as much as it. Others do by chance alone, once in
    2**58 (the two sums are different polynomials in the numbers).
    """
    weights: list[dict[int, int]] = [{} for _ in shape]

    def weight(offsets: Sequence[int], sizes: Sequence[int]) -> int:
        product = 1
        for known, begin, size in zip(weights, offsets, sizes, strict=True):
            ends = [known.setdefault(end, secrets.randbelow(_PRIME)) for end in (begin, begin + size)]
            product = product * (ends[1] - ends[0]) % _PRIME
        return product

    return (sum(weight(*box) for box in boxes) - weight([0] * len(shape), shape)) % _PRIME == 0
