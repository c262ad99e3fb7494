"""Monitors that a training loop or a config uses: metrics with callbacks, the machine's resources, memory alerts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forgather.errors import TrainingError
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.base import TrainerCallback
from forgather.ml.callbacks.output_target import report_only
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.memory import memory_facts
from forgather.ml.metrics import LineWriter, as_json
from forgather.ml.number_format import format_bytes
from forgather.ml.system_stats import SystemStats, memory_share

_log = get_logger(__name__)

MONITOR_FILE = "monitor.jsonl"
_LEAST_DIFFERENCE = 1 << 29


class MonitorError(TrainingError, ValueError):
    """An error about a metric that is not a number, or a callback that is not callable."""

    code = "FG522"


class TrainingMonitor(TrainerCallback):
    """Tracks metrics, calls functions with them, and reads the use of the machine's resources.

    It is used from a training loop, or as a callback of a trainer; a trainer's log lines are then tracked.

    Args:
        log_interval: a line with the metrics and the resources is written for each step that is a multiple of it.
        save_logs: whether these lines are written, into `monitor.jsonl` in `log_dir`.
        log_dir: the folder of the file.
        track_gpu_memory: whether the memory of GPUs is read.
        track_cpu_memory: whether the memory and the CPU time are read.
        track_network: whether the network traffic of the machine is read.

    Raises:
        ArgumentValueError: FG813 if a value is not allowed.

    Example:
        >>> monitor = TrainingMonitor(save_logs=False)
        >>> monitor.add_callback("high", lambda metrics: print("high") if metrics["loss"] > 2 else None)
        >>> monitor.track_metric("loss", 3.0, 10)
        high
    """

    def __init__(
        self,
        log_interval: int = 10,
        save_logs: bool = True,
        log_dir: str | os.PathLike[str] = "logs",
        track_gpu_memory: bool = True,
        track_cpu_memory: bool = True,
        track_network: bool = True,
    ) -> None:
        refuse_wrong_values("callbacks:TrainingMonitor", locals())
        self.log_interval = log_interval
        self.save_logs = save_logs
        self.log_dir = log_dir
        self._stats = SystemStats(gpu_memory=track_gpu_memory, cpu_memory=track_cpu_memory, network=track_network)
        self._metrics: dict[str, float] = {}
        self._functions: dict[str, Callable[[dict[str, float]], Any]] = {}
        self._failed: set[str] = set()
        self._step: int | None = None
        self._line: dict[str, float] = {}
        self._writer = LineWriter(Path(log_dir) / MONITOR_FILE) if save_logs else None

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric."""
        return dict(self._metrics)

    def track_metric(self, name: str, value: Any, step: int) -> None:
        """Notes the value of a metric at a step, and calls the functions that were added.

        Args:
            name: the name of the metric.
            value: a number, or a tensor of one number, which is read from its device.
            step: the number of the step.

        Raises:
            MonitorError: FG522 if the value is not a number.
        """
        number = as_json(value)
        if isinstance(value, bool) or not isinstance(number, int | float | str):
            raise MonitorError(f"metric {name!r} is {value!r}, and must be a number").about("value")
        try:
            # `as_json` gives numbers that are not finite as texts.
            number = float(number)
        except ValueError:
            raise MonitorError(f"metric {name!r} is {value!r}, and must be a number").about("value") from None
        if step != self._step:
            self.flush()
            self._step = step
        self._metrics[name] = self._line[name] = number
        for called, function in self._functions.items():
            self._call(called, function)

    def add_callback(self, name: str, fn: Callable[[dict[str, float]], Any]) -> None:
        """Adds a function that is called with the last value of each metric, whenever a metric is tracked.

        An exception in it is logged once, and ends nothing.

        Args:
            name: the name of the function in messages. A function that was added under this name is replaced.
            fn: the function.

        Raises:
            MonitorError: FG522 if `fn` is not callable.
        """
        if not callable(fn):
            raise MonitorError(f"the callback {name!r} is {fn!r}, and must be a function").about("fn")
        self._functions[name] = fn

    def _call(self, name: str, function: Callable[[dict[str, float]], Any]) -> None:
        try:
            function(self.metrics)
        except Exception as error:  # noqa: BLE001  border: a report must not end a run
            if name not in self._failed:
                self._failed.add(name)
                _log.warning("the monitor's callback %r failed: %s: %s", name, type(error).__name__, error)

    def get_system_stats(self) -> dict[str, Any]:
        """Returns the use of `gpu_memory`, `cpu_memory`, `cpu`, `network` and `disk`; see `SystemStats.read`."""
        return self._stats.read()

    def flush(self) -> None:
        """Writes the line of the current step, if one is due."""
        if self._writer is not None and self._line and self._step is not None and not self._step % self.log_interval:
            stats = {name: facts for name, facts in self.get_system_stats().items() if facts}
            self._writer.write({"step": self._step, "time": round(time.time(), 3), **self._line, "system": stats})
        self._line = {}

    def close(self) -> None:
        """Writes the last line, and closes the file."""
        self.flush()
        if self._writer is not None:
            self._writer.close()

    @report_only
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Tracks each number of a trainer's log line."""
        if state.is_world_process_zero:
            for name, value in (logs or {}).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    self.track_metric(name, value, state.global_step)

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes the last line, and closes the file."""
        self.close()


def _memory_here(model: Any) -> tuple[float | None, float] | None:
    """Returns the share of the GPU's memory that is in use, and the memory of this rank; None without an answer.

    An error is an answer, too: the other ranks wait for one.

    Units:
        bytes, of the memory of this rank.
    """
    try:
        facts = memory_facts(next(model.parameters()).device)
        return memory_share(), facts.get("memory_peak_bytes", facts["memory_bytes"])
    except Exception:  # noqa: BLE001  border: a report must not end a run
        return None


class ResourceMonitorCallback(TrainerCallback):
    """A callback that warns if the memory of a GPU is nearly full, or if ranks use very different amounts of memory.

    The ranks exchange their numbers once for each log line. Without a GPU, the memory of the processes is compared, and
    the threshold has no effect, which is said once. A warning is given once, and again after it was over.

    Args:
        gpu_memory_threshold: the share of the memory of a GPU, by all processes, above which there is a warning.
        alert_on_imbalance: whether to warn if ranks use different amounts of memory.
        imbalance_ratio: the largest amount in relation to the smallest one, above which there is a warning.

    Raises:
        ArgumentValueError: FG813 if a value is not allowed.
    """

    def __init__(
        self, gpu_memory_threshold: float = 0.9, alert_on_imbalance: bool = True, imbalance_ratio: float = 1.25
    ) -> None:
        refuse_wrong_values("callbacks:ResourceMonitorCallback", locals())
        self.gpu_memory_threshold = gpu_memory_threshold
        self.alert_on_imbalance = alert_on_imbalance
        self.imbalance_ratio = imbalance_ratio
        self._report: Callable[[Mapping[str, Any]], None] | None = None
        self._told: set[str] = set()

    @report_only
    def on_step_record(self, args: Any, state: Any, control: Any, report: Any = None, **kwargs: Any) -> None:
        """Keeps the function that reports events."""
        self._report = report

    @report_only
    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, model: Any = None, **kwargs: Any
    ) -> None:
        """Compares the memory of all ranks. Collective: every rank logs at the same steps."""
        if not logs or "loss" not in logs:
            return
        ranks = collectives.all_gather(_memory_here(model))
        if not state.is_world_process_zero:
            return
        known = [one for one in ranks if one is not None]
        if len(known) == len(ranks):
            self._look(state.global_step, [share for share, _ in known], [used for _, used in known])
        else:
            _log.warning_once("the memory of rank %d cannot be measured, so that none is compared", ranks.index(None))

    def _look(self, step: int, shares: list[float | None], used: list[float]) -> None:
        full = {rank: share for rank, share in enumerate(shares) if share is not None}
        if not full:
            _log.warning_once(
                "gpu_memory_threshold has no effect: there is no GPU; the memory of processes is compared"
            )
        rank = max(full, key=full.__getitem__, default=0)
        self._tell(
            "gpu memory",
            step,
            f"{full.get(rank, 0):.0%} of the memory of the GPU of rank {rank} is in use",
            holds=bool(full) and full[rank] > self.gpu_memory_threshold,
        )
        low, high = min(used), max(used)
        unequal = high > self.imbalance_ratio * low and high - low > _LEAST_DIFFERENCE
        self._tell(
            "memory imbalance",
            step,
            f"rank {used.index(high)} uses {format_bytes(high)}, and rank {used.index(low)} {format_bytes(low)}",
            holds=self.alert_on_imbalance and unequal,
        )

    def _tell(self, kind: str, step: int, message: str, *, holds: bool) -> None:
        if not holds:
            self._told.discard(kind)
        elif kind not in self._told:
            self._told.add(kind)
            _log.warning("step %d: %s", step, message)
            if self._report is not None:
                self._report({"event": "resources", "step": step, "kind": kind, "message": message})
