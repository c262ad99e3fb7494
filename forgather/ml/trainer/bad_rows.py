"""What happens to rows that cannot be read, prepared or collated: stop, leave them out, or leave out a number of them.

Takes the training argument `bad_rows`; gives the guard that virtual streams ask. Whether a row is bad depends on the
row alone, so the same rows are left out on every layout and after a resume. Failed reads are repeated here, too.
"""

from __future__ import annotations

from forgather.errors import ForgatherError, TrainingError, first_line
from forgather.ml.data.row_guard import Outcome, RowGuard
from forgather.ml.log import get_logger
from forgather.ml.trainer.read_retries import Retries, is_passing

_log = get_logger(__name__)

STOP, SKIP = "stop", "skip"
_SHOWN = 5


class BadRows(RowGuard):
    """Counts the rows that are left out, and says which. A worker process counts those that it left out itself.

    Args:
        policy: "stop", "skip", or the largest number of rows that may be left out in an epoch.
        retries: how often a read that failed for a passing reason may be repeated.
    """

    def __init__(self, policy: str | int, retries: Retries) -> None:
        self._policy, self.retries = policy, retries
        self.skips = policy != STOP
        self.counts_reads = True
        """Whether this process counts the rows that could not be read: one of those that read a stream does."""
        self.num_read = 0
        """The number of rows of the streams of this process that could not be read or prepared in this epoch. Rows
        that workers have read ahead are not among them: their number depends on the number of workers."""
        self.num_collated = 0
        """The number of rows that could not be collated in this epoch."""
        self._shown = 0

    @property
    def limit(self) -> int | None:
        """The largest number of rows that may be left out in an epoch; None for any."""
        return self._policy if isinstance(self._policy, int) else None

    @property
    def count(self) -> int:
        """The number of rows left out in this epoch that this process counts; a sum over replicas has each once."""
        return self.num_read * self.counts_reads + self.num_collated

    def begin(self, num_read: int, num_collated: int) -> None:
        """Sets the numbers of rows that were left out before the position from which an epoch is read.

        Args:
            num_read: the number of those that could not be read or prepared.
            num_collated: the number of those that could not be collated.
        """
        self.num_read, self.num_collated = num_read, num_collated

    def reading(self, error: Exception, shard: str, failed: int, *, can_skip: bool) -> Outcome:
        """Returns what happens after a shard could not be read on, see `RowGuard`."""
        if is_passing(error) and not isinstance(error, ForgatherError):
            if failed >= self.retries.limit:
                return Outcome.RAISE
            self.retries.pause(error, failed, shard)
            return Outcome.AGAIN
        if self.skips and not can_skip:
            error.add_note(f"bad_rows: {shard} cannot be read on after this row, so the row is not left out")
        return self._not_read(error, shard) if self.skips and can_skip else Outcome.RAISE

    def preparing(self, error: Exception, shard: str) -> Outcome:
        """Returns what happens after a row could not be prepared, see `RowGuard`."""
        return self._not_read(error, shard) if self.skips else Outcome.RAISE

    def uncounted(self) -> BadRows:
        """Returns a guard that leaves out the same rows, without counting and reporting them, see `RowGuard`."""
        other = BadRows(SKIP if self.skips else STOP, self.retries)
        other._shown = _SHOWN
        return other

    def collating(self, error: Exception) -> None:
        """Counts a row that could not be collated."""
        self.num_collated += 1
        self._left_out(error, "a row that cannot be collated")

    def _not_read(self, error: Exception, shard: str) -> Outcome:
        self.num_read += 1
        self._left_out(error, shard)
        return Outcome.SKIP

    def _left_out(self, error: Exception, place: str) -> None:
        # All streams that this process reads are other rows: the sum over all processes is not less.
        self.refuse_more(self.num_read + self.num_collated, f"{place}: {_reason(error)}")
        if self._shown < _SHOWN:
            self._shown += 1
            more = "; further ones are only counted" if self._shown == _SHOWN else ""
            _log.warning("a bad row is left out (%s: %s)%s", place, _reason(error), more)

    def refuse_more(self, count: int, last: str = "") -> None:
        """Raises FG958 if more rows were left out than may be.

        Args:
            count: the number of rows that were left out, of this process or of all.
            last: the last of them.
        """
        if self.limit is not None and count > self.limit:
            found = f"{count} bad rows were left out, and bad_rows is {self.limit}" + (
                f"; the last: {last}" if last else ""
            )
            raise TrainingError(
                found,
                code="FG958",
                hint="correct the rows that the warnings name, or set bad_rows to a larger number or skip",
            ).about("args.bad_rows")


def _reason(error: Exception) -> str:
    text = error.message if isinstance(error, ForgatherError) else f"{type(error).__name__}: {first_line(error)}"
    return text[:200]
