"""Which norm of gradients is a spike.

Takes the norms of good steps, one by one; gives the largest norm that is no spike. Keeps true: the judgment depends on
the last norms and on nothing else, so a run that goes on from a checkpoint judges as one that was never stopped.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class NormWindow:
    """The norms of the last good steps.

    Source: the skip-step optimizers of OLMo-core: mean and sample standard deviation of a rolling window, and no
        judgment before half of it is there. Differences: norms of bad steps do not enter the window, and losses are not
        looked at.

    Args:
        size: how many norms are kept.
        threshold: standard deviations above their mean from which on a norm is a spike.

    Example:
        >>> window = NormWindow(size=4, threshold=6.0)
        >>> window.limit is None
        True
        >>> for norm in (1.0, 3.0):
        ...     window.add(norm)
        >>> round(window.limit, 3)
        10.485
    """

    def __init__(self, *, size: int, threshold: float) -> None:
        self.threshold = threshold
        self.least = max(2, size // 2)
        self._norms: deque[float] = deque(maxlen=size)

    def add(self, norm: float) -> None:
        """Remembers the norm of a good step."""
        self._norms.append(norm)

    @property
    def limit(self) -> float | None:
        """The largest norm that is no spike; None while there are too few norms to tell."""
        if len(self._norms) < self.least:
            return None
        mean, deviation = self._moments()
        return mean + self.threshold * deviation

    def _moments(self) -> tuple[float, float]:
        mean = math.fsum(self._norms) / len(self._norms)
        variance = math.fsum((norm - mean) ** 2 for norm in self._norms) / (len(self._norms) - 1)
        return mean, math.sqrt(variance)

    def described(self) -> str:
        """Returns mean and standard deviation, for people."""
        mean, deviation = self._moments()
        return f"the last {len(self._norms)} had a mean of {mean:.4g} and a standard deviation of {deviation:.3g}"

    def state_dict(self) -> dict[str, Any]:
        """Returns the norms, as plain numbers."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on with the norms of a checkpoint; a window that is smaller now keeps the last of them."""
        self._norms.clear()
        self._norms.extend(state["norms"])
