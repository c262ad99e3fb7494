"""The callbacks of the training argument `report_to`: one for each tracker that it names.

The input is names; the output is `TBLogger` for TensorBoard, and for the others the callback of transformers (of the
library itself for Aim), guarded by `TrackerCallback`. A library is imported when its callback is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any

from forgather.errors import TrainingError
from forgather.ml.callbacks.tensorboard import TBLogger
from forgather.ml.callbacks.tracker import TrackerCallback, guarded
from forgather.ml.callbacks.tracker_libraries import KINDS
from forgather.ml.distributed.env import process_facts
from forgather.ml.log import get_logger
from forgather.trackers import named_trackers, tracker_faults

_log = get_logger(__name__)


def tracker_callbacks(report_to: str | Iterable[str] | None, present: Sequence[Any] = ()) -> list[Any]:
    """Returns the callbacks of trackers: on the main process one for each name, and none on the others.

    Args:
        report_to: the names of the trackers.
        present: the other callbacks of the run. A tracker to which one of them reports already is left out.

    Raises:
        TrainingError: FG583, FG584 or FG881 if the run cannot report to a tracker; FG585 if its library cannot be
            imported.
    """
    for fault in tracker_faults(report_to, os.environ):
        raise TrainingError(fault.message, code=fault.code, hint=fault.hint).about("args.report_to")
    # A tracker's run that two processes write is damaged, so the others have no callback that could.
    if process_facts().rank != 0:
        return []
    return [made for name in named_trackers(report_to) if (made := _callback(name, present)) is not None]


def _callback(name: str, present: Sequence[Any]) -> Any:
    try:
        kind = TBLogger if name == "tensorboard" else _library_callback(name)
        others = [one if isinstance(one, type) else type(one) for one in present]
        if any(issubclass(other, kind) for other in others):
            if name != "tensorboard":  # the templates have a callback for it in any case
                _log.warning("report_to: %s is left out, since there is a %s already", name, kind.__name__)
            return None
        if name == "tensorboard":
            return TBLogger(run_dir=os.environ.get("TENSORBOARD_LOGGING_DIR"))
        return guarded(KINDS.get(name) or _plain(name), kind)()
    except Exception as error:  # noqa: BLE001  border: the code of a library that is being imported
        raise TrainingError(
            f"report_to: {name} cannot be used: {type(error).__name__}: {error}",
            code="FG585",
            hint=f"repair its installation, or leave {name!r} out",
        ).about("args.report_to") from error


def _library_callback(name: str) -> type[Any]:
    if name == "aim":
        found: type[Any] = import_module("aim.hugging_face").AimCallback
        return found
    # The module imports every tracker that is installed.
    (found,) = import_module("transformers.integrations").get_reporting_integration_callbacks([name])
    return found


def _plain(name: str) -> type[TrackerCallback]:
    return type(f"{name.title().replace('_', '')}Tracker", (TrackerCallback,), {"tracker": name})
