"""Anomalies of a run: found in the records of steps; reported once, on the console, in the metrics and as alerts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from forgather.ml.alert_command import AlertCommand
from forgather.ml.anomalies import Anomaly, AnomalyDetector, anomaly_settings
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.callbacks.base import ExportableState, TrainerCallback
from forgather.ml.callbacks.output_target import report_only, run_folder
from forgather.ml.log import get_logger
from forgather.ml.types import StepRecord

_log = get_logger(__name__)


class AnomalyCallback(TrainerCallback, ExportableState):
    """A callback that reports anomalies: spikes, explosions, NaN, lost throughput, plateaus and divergence.

    Each one is a warning on the console and a line of `metrics.jsonl` with `event: anomaly`, which the report shows.
    The weights do not depend on this callback. A resumed run goes on with what was known at the checkpoint.

    Under `transformers.Trainer`, which sends no records of steps, the loss and the norm of each log line are looked at,
    windows are then numbers of log lines, and anomalies are not in `metrics.jsonl`.

    Args:
        settings: the settings that differ from `forgather.ml.anomalies.DEFAULTS`, by kind of anomaly, such as
            `{spike: {ratio: 2}, plateau: false}`; false turns a kind off.
        on_alert: the words of a command that is run for each anomaly, see `forgather.ml.alert_command:AlertCommand`.
        alert_timeout: the time after which the command is ended.
        run_dir: the folder of the run, or None for the training arguments' `logging_dir`.

    Units:
        alert_timeout: seconds.

    Raises:
        ArgumentValueError: FG813 if the timeout is not a positive number.
        AnomalyError: FG520 if a setting is not allowed.
        AlertError: FG521 if `on_alert` is not a list of words.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        on_alert: Sequence[str] | None = None,
        alert_timeout: float = 10.0,
        run_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        refuse_wrong_values("callbacks:AnomalyCallback", locals())
        self.settings = anomaly_settings(settings)
        self.run_dir = run_dir
        self._command = None if on_alert is None else AlertCommand(on_alert, alert_timeout)
        self._detector: AnomalyDetector | None = None
        self._known: dict[str, Any] = {}
        self._has_records = False

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to look, with what a checkpoint knows if the run resumes."""
        if not state.is_world_process_zero:
            return
        self._detector = AnomalyDetector(self.settings, state.max_steps)
        if state.global_step and self._known:
            self._detector.load_state_dict(self._known)

    def on_rewind(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forgets what was known of the steps after the checkpoint to which the run was rewound."""
        # Not decorated itself, since `on_train_begin` is.
        self.on_train_begin(args, state, control, **kwargs)

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
        """Looks at the record of a step."""
        self._has_records = True
        if self._detector is not None:
            for found in self._detector.observe(record):
                # The record comes first, whatever happens to the alert.
                report(found.event())
                self._tell(found, args)

    @report_only
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Looks at a log line of a trainer that sends no records of steps."""
        if self._has_records or self._detector is None or not logs or "loss" not in logs:
            return
        norm = logs.get("grad_norm")
        record = StepRecord(
            step=state.global_step, loss=float(logs["loss"]), grad_norm=None if norm is None else float(norm)
        )
        for found in self._detector.observe(record):
            self._tell(found, args)

    def _tell(self, found: Anomaly, args: Any) -> None:
        _log.warning("anomaly at step %d (%s): %s", found.step, found.kind, found.message)
        if self._command is not None:
            self._command.run(found.event(), str(run_folder(args, self.run_dir)))

    def state(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint: what later findings depend on."""
        known = self._known if self._detector is None else self._detector.state_dict()
        return {"args": {}, "attributes": {"_known": known}}
