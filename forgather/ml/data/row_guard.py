"""What happens to rows that cannot be read or prepared: a stream asks a guard, which the trainer gives it."""

from __future__ import annotations

import enum


class Outcome(enum.Enum):
    """What happens after an error of a row."""

    RAISE = "raise"
    AGAIN = "again"
    SKIP = "skip"


class RowGuard:
    """Decides what happens after an error of a row. This one raises every error."""

    skips = False
    """Whether a row that cannot be prepared may be left out."""

    def reading(self, error: Exception, shard: str, failed: int, *, can_skip: bool) -> Outcome:
        """Returns what happens after a shard could not be read on.

        Args:
            error: the error.
            shard: the name of the shard.
            failed: the number of reads that were repeated since the last row.
            can_skip: whether the reader has moved past the row, so that it can go on with the next one.
        """
        return Outcome.RAISE

    def preparing(self, error: Exception, shard: str) -> Outcome:
        """Returns what happens after a row could not be prepared, `RAISE` or `SKIP`.

        Args:
            error: the error.
            shard: the name of the shard.
        """
        return Outcome.RAISE

    def uncounted(self) -> RowGuard:
        """Returns a guard that decides in the same way about rows that were counted before."""
        return self
