"""What each rank does: the parts of its steps, its communication and memory, and which rank is slow, and in what."""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.callbacks.output_target import report_only, run_folder
from forgather.ml.distributed import collectives
from forgather.ml.distributed.communication import CommunicationStats, recorded_communication
from forgather.ml.log import get_logger
from forgather.ml.memory import memory_facts
from forgather.ml.metrics import LineWriter
from forgather.ml.system_stats import SystemStats
from forgather.ml.types import StepRecord

_log = get_logger(__name__)

RANKS_FILE = "ranks.jsonl"
_MOST_RECORDS = 1000
"""The number of steps whose median is taken."""
PARTS = {
    "data_seconds": "waiting for data",
    "forward_backward_seconds": "forward and backward",
    "update_seconds": "the update",
}
"""The parts of a step in which a rank can be slow by itself; in the others it waits for the others."""


class DistributedMonitorCallback(TrainerCallback):
    """A callback that writes what each rank does, at each log line, into `ranks.jsonl`, and reports the slow rank.

    An entry of a rank has the median seconds of its steps by part (data, forward and backward, sums over ranks,
    update), its communication (calls, bytes and seconds by process group and operation), memory, CPU, disk and network.
    The ranks exchange these numbers once for each log line; steps in between send nothing. A rank is slow if one of its
    parts takes longer than that of the other ranks by more than `slow_share` of a step, because the others wait for it
    in the next collective.

    Counting costs about 0.1 ms of host time for each collective.

    Args:
        slow_share: the share of a step by which a rank must be slower than the median of the others.
        communication: whether communication is counted.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.

    Raises:
        ArgumentValueError: FG813 if a value is not allowed.
    """

    def __init__(
        self,
        slow_share: float = 0.1,
        *,
        communication: bool = True,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_wrong_values("callbacks:DistributedMonitorCallback", locals())
        self.slow_share = slow_share
        self.communication = communication
        self.run_dir = run_dir
        self._open = ExitStack()
        self._stats: CommunicationStats | None = None
        self._seconds_before = 0.0
        # Bounded, for a run that logs rarely or never.
        self._records: deque[StepRecord] = deque(maxlen=_MOST_RECORDS)
        self._num_steps = 0
        self._system: SystemStats | None = None
        self._writer: LineWriter | None = None
        self._report: Callable[[Mapping[str, Any]], None] | None = None
        self._slow: tuple[int, str] | None = None

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to count."""
        folder = run_folder(args, self.run_dir)
        self._open.close()
        self._records.clear()
        self._num_steps, self._slow, self._seconds_before = 0, None, 0.0
        if self.communication and collectives.is_multi_process():
            self._stats = self._open.enter_context(recorded_communication())
        existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        self._system = SystemStats(gpu_memory=False, folder=str(existing))
        if state.is_world_process_zero:
            self._writer = LineWriter(folder / RANKS_FILE)

    @report_only
    def on_step_record(
        self,
        args: Any,
        state: Any,
        control: Any,
        record: StepRecord,
        report: Callable[[Mapping[str, Any]], None],
        **kwargs: Any,
    ) -> None:
        """Keeps the record of a step until the next log line."""
        self._records.append(record)
        self._num_steps += 1
        self._report = report

    @report_only
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **kwargs: Any
    ) -> None:
        """Exchanges the numbers of all ranks. Collective: every rank logs at the same steps."""
        if not logs or "loss" not in logs:
            return
        ranks = collectives.all_gather(self._figures(args, model))
        if self._writer is not None:
            self._writer.write({"step": state.global_step, "time": round(time.time(), 3), "ranks": ranks})
            self._tell_slow(state.global_step, ranks)

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the counting, and closes the file."""
        self._open.close()
        self._stats = None
        if self._writer is not None:
            self._writer.close()

    def _figures(self, args: Any, model: Any) -> dict[str, Any]:
        """Returns the numbers of this rank; an error is a part of them, so that no other rank waits for them."""
        num_steps, self._num_steps = self._num_steps, 0
        facts: dict[str, Any] = {"rank": int(args.process_index), "host": platform.node(), "steps": num_steps}
        try:
            names = [*PARTS, "sync_seconds"] if self._records else []
            facts |= {name: median(getattr(record, name) for record in self._records) for name in names}
            self._records.clear()
            if self._stats is not None:
                facts |= self._communication(num_steps)
            facts |= memory_facts(next(model.parameters()).device)
            read = self._system.read() if self._system is not None else {}
            facts |= {name: value for name, value in read.items() if value is not None}
        except Exception as error:  # noqa: BLE001  border: a report must not end a run
            facts["problem"] = f"{type(error).__name__}: {error}"
        return facts

    def _communication(self, num_steps: int) -> dict[str, Any]:
        assert self._stats is not None, "the caller looked"  # noqa: S101
        seconds = self._stats.seconds
        spent, self._seconds_before = seconds - self._seconds_before, seconds
        table = {
            group: {
                operation: {
                    "count": found.count,
                    "bytes": found.num_bytes,
                    "seconds": found.seconds if found.timed else None,
                    "timed": found.timed,
                }
                for operation, found in operations.items()
            }
            for group, operations in self._stats.table().items()
        }
        return {"communication": table, "communication_seconds": spent / num_steps if num_steps else 0.0}

    def _tell_slow(self, step: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        found = slow_rank(ranks, self.slow_share)
        known, self._slow = self._slow, found and (found[0], found[1])
        # Reported once, and again after it was another rank or none.
        if found is None or known == self._slow:
            return
        rank, part, seconds = found
        message = f"rank {rank} is slow in {PARTS[part]}: {seconds:.3g} s more in each step than the other ranks"
        _log.warning("step %d: %s", step, message)
        if self._report is not None:
            facts = {"rank": rank, "part": part, "value": seconds}
            self._report({"event": "straggler", "step": step, "message": message, **facts})


def slow_rank(ranks: Sequence[Mapping[str, Any]], share: float) -> tuple[int, str, float] | None:
    """Returns the slow rank, the part in which it is slow, and by how many seconds a step; None if there is none.

    Args:
        ranks: the numbers of each rank.
        share: the share of a step by which it must be slower than the median of the others.
    """
    if len(ranks) < 2 or not all("data_seconds" in rank for rank in ranks):
        return None
    step = max(sum(rank[name] for name in (*PARTS, "sync_seconds")) for rank in ranks)
    found: tuple[int, str, float] | None = None
    for part in PARTS:
        own = [_own_seconds(rank, part) for rank in ranks]
        for position, seconds in enumerate(own):
            more = seconds - median(own[:position] + own[position + 1 :])
            if more > max(share * step, 1e-3) and (found is None or more > found[2]):
                found = (ranks[position]["rank"], part, more)
    return found


def _own_seconds(rank: Mapping[str, Any], part: str) -> float:
    """Returns the time of a part of the step in which a rank did not wait for others."""
    seconds = float(rank[part])
    if part == "forward_backward_seconds":
        # Sums of losses and counts are communication outside of this part.
        inside = rank.get("communication_seconds", 0.0) - rank["sync_seconds"]
        return max(0.0, seconds - max(0.0, float(inside)))
    return seconds
