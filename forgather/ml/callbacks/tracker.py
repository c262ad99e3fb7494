"""The guard between a run and the library of a tracker, such as W&B or MLflow.

The callbacks that speak to these libraries are those of transformers. `TrackerCallback` is mixed in before one of them.
It keeps true what holds for every other callback that only reports: the losses of the run are the same with and without
it. The random numbers and the signal handlers of the process are put back after each call, and an exception of the
library is logged as a warning. The library gets numbers, and redacted views of the settings. The id of its run is part
of the checkpoints, so that a resumed run continues it.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from forgather.ml.callbacks.base import EVENTS, ExportableState, TrainerCallback
from forgather.ml.callbacks.effective_settings import effective_settings
from forgather.ml.callbacks.output_target import run_folder
from forgather.ml.callbacks.run_record import RunRecord, read_record
from forgather.ml.callbacks.summary import model_facts
from forgather.ml.callbacks.text_sample import unwrap_model
from forgather.ml.log import get_logger
from forgather.ml.metrics import as_json
from forgather.ml.random_state import kept_random
from forgather.ml.tracking import Logged
from forgather.redaction import hidden, hide

_log = get_logger(__name__)

# A library that fails again and again would slow each log line down by its own time limit.
_MOST_FAILURES = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))
_GUARDED = (*EVENTS, "on_logged", "on_predict")


class ShownArguments:
    """The training arguments as a tracker sees them: without secrets, and only those that have an effect.

    Args:
        args: the training arguments.
        scene: the keyword arguments of the event, with the optimizer and its schedule.
    """

    def __init__(self, args: Any, scene: Mapping[str, Any]) -> None:
        self._args = args
        self._scene = scene
        # Of two runs without a name, a tracker would show one that it made up.
        self.run_name = hide(str(args.run_name or run_folder(args).name))

    def __getattr__(self, name: str) -> Any:
        # The callbacks of transformers also read settings that Forgather does not have.
        return getattr(self._args, name, None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings of the arguments, and those of the optimizer and its schedule in a mapping each."""
        found = effective_settings(self._args, self._scene.get("optimizer"), self._scene.get("lr_scheduler"))
        plain: dict[str, Any] = hidden(as_json({**found.pop("arguments"), **found}))
        return plain

    to_sanitized_dict = to_dict

    def to_json_string(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps(self.to_dict(), indent=2)


class ShownModel:
    """The model as a tracker sees it: its configuration without secrets, and its size.

    Args:
        model: the model, or None.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @cached_property
    def _facts(self) -> dict[str, Any]:
        # Computed when it is asked for: each log line has a model, and parameters take long to count.
        return model_facts(unwrap_model(self._model))

    @property
    def config(self) -> ShownConfig | None:
        """The configuration of the whole model; None if it has none."""
        settings = self._facts.get("config")
        return ShownConfig(settings) if settings else None

    def num_parameters(self) -> int | None:
        """Returns the number of parameters of the whole model."""
        return self._facts.get("num_parameters")


class ShownConfig:
    """The configuration of a model without secrets.

    Args:
        settings: the settings of the configuration.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        # As attributes, which is where Aim looks for them.
        vars(self).update(hidden(as_json(settings)))

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings."""
        return dict(vars(self))

    def to_json_string(self) -> str:
        """Returns the settings as JSON."""
        return json.dumps(self.to_dict(), indent=2)


class TrackerCallback(ExportableState):
    """Mixed in before a callback of transformers that reports to a tracker; see `guarded`.

    A subclass for one tracker overrides the methods down to `end`. They are called within `receive`, which catches
    their exceptions as those of the callback itself.

    Attributes:
        tracker: the name of the tracker.
        ignored: the events that the callback does not get.
        tracked: the id of the tracker's run and the output folder that it belongs to; None before it is known.
    """

    tracker = ""
    ignored: tuple[str, ...] = ()
    tracked: dict[str, str] | None = None
    _initialized: bool
    _resumes = False
    _failures = 0
    _is_off = False
    _last_steps: dict[str, int]

    # What a tracker overrides.

    def open(self, args: Any, state: Any) -> None:
        """Starts the tracker's run, or continues the one whose id is `self.tracked["id"]`."""

    def run_id(self) -> str | None:
        """Returns the id with which a resumed run can continue the tracker's run; None if there is none."""
        return None

    def send_record(self, record: RunRecord) -> None:
        """Sends what is known about the config of the run."""

    def last_step(self, name: str) -> int:
        """Returns the last step of which the tracker has a metric, -1 if it has none."""
        return -1

    def send(self, logged: Logged) -> None:
        """Sends a text, an image or a table of the user."""

    def flush(self) -> None:
        """Waits for the metrics that were sent: what a checkpoint contains is not reported again."""

    def end(self, error: BaseException | None) -> None:
        """Ends the tracker's run. A later log opens it again."""

    # What every tracker has in common.

    def setup(self, args: Any, state: Any, model: Any = None, **kwargs: Any) -> None:
        """Opens the tracker's run and sends the settings; transformers' callbacks call it at their first event."""
        self.open(args, state)
        self.send_settings(args, state, model, **kwargs)
        if (found := self.run_id()) is not None:
            self.tracked = {"id": found, "output_dir": os.path.realpath(args.output_dir)}
        self.send_record(read_record(run_folder(args)))

    def send_settings(self, args: Any, state: Any, model: Any, **kwargs: Any) -> None:
        """Sends the arguments and the model's configuration, as the callback of transformers does."""
        super().setup(args, state, model, **kwargs)  # type: ignore[misc]

    def state(self) -> dict[str, Any]:
        """Returns the callback's state for a checkpoint: the id of the tracker's run."""
        return {"args": {}, "attributes": {"tracked": self.tracked}}

    def receive(self, event: str, args: Any, state: Any, details: dict[str, Any]) -> None:
        """Handles an event, and logs an exception of the tracker's library as a warning."""
        if self._is_off or not state.is_world_process_zero:
            return
        try:
            with _undisturbed():
                self._handle(event, args, state, details)
            self._failures = 0
        except Exception as error:  # noqa: BLE001  border: a report must not end a run
            self._note_failure(error, opens=self.tracked is None or event == "on_train_begin")

    def _handle(self, event: str, args: Any, state: Any, details: dict[str, Any]) -> None:
        shown = ShownArguments(args, details)
        if event == "on_train_begin":
            self._begin(args, state)
        elif event == "on_log":
            details = {**details, "logs": self._unreported(details.get("logs") or {}, state.global_step)}
            if not details["logs"]:
                return
        elif event == "on_logged":
            self._send_logged(details["logged"], shown, state, details)
            return
        if "model" in details:
            details = {**details, "model": ShownModel(details["model"])}
        if event == "on_train_end":
            # Before the callback of transformers, which would end a run that failed as one that did not.
            self.end(details.get("error"))
        elif event == "on_save":
            self.flush()
        handler: Callable[..., Any] = getattr(super(), event)
        handler(shown, state, None, **details)

    def _begin(self, args: Any, state: Any) -> None:
        self._last_steps = {}
        # `transformers.Trainer` leaves the states of callbacks in the state of the trainer, and at a save expects to
        # find each of them there, also that of a tracker that was added at the resume.
        saved = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if self.tracked is None:
            self.tracked = saved["attributes"]["tracked"]
        if not state.global_step:
            self.tracked = None
        elif self.tracked is not None and self.tracked["output_dir"] != os.path.realpath(args.output_dir):
            # Two runs that begin at one checkpoint would write into one run of the tracker.
            _log.warning("%s starts a new run: the checkpoint is from %s", self.tracker, self.tracked["output_dir"])
            self.tracked = None
        self._resumes = self.tracked is not None

    def _unreported(self, logs: Mapping[str, Any], step: int) -> dict[str, float]:
        """Returns the numbers of a log line that the tracker does not have yet.

        A run that was killed has reported steps after its last checkpoint; the resumed run trains them again.
        """
        numbers = {name: number for name, value in logs.items() if (number := _number(value)) is not None}
        if not self._resumes:
            return numbers
        for name in numbers:
            if name not in self._last_steps:
                self._last_steps[name] = self.last_step(name)
        return {name: number for name, number in numbers.items() if self._last_steps[name] < step}

    def _send_logged(self, logged: Logged, args: Any, state: Any, details: dict[str, Any]) -> None:
        if not getattr(self, "_initialized", True):
            self.setup(args, state, ShownModel(details.get("model")))
        if logged.kind != "numbers":
            self.send(logged)
        elif numbers := self._unreported(logged.content, logged.step):
            super().on_log(args, state, None, logs=numbers)  # type: ignore[misc]

    def _note_failure(self, error: Exception, *, opens: bool) -> None:
        self._failures += 1
        # Without a run of the tracker, there is nothing to which a later event could be added.
        self._is_off = opens or self._failures == _MOST_FAILURES
        reason = hide(str(error).strip().split("\n")[0] or "no reason given")
        if self._failures == 1:
            what = "nothing is reported to it" if self._is_off else "the run goes on"
            _log.warning("%s failed, and %s: %s: %s", self.tracker, what, type(error).__name__, reason)
        elif self._is_off:
            _log.warning("%s failed %d times in a row: nothing more is reported to it", self.tracker, self._failures)


def guarded(tracker: type[TrackerCallback], callback: type[Any]) -> type[Any]:
    """Returns a class of callbacks that pass the events to a callback of transformers, with the guard of a tracker.

    Args:
        tracker: the class of the tracker.
        callback: the class of transformers, or of the tracker's library.
    """
    heard = [event for event in _GUARDED if event == "on_logged" or _overrides(callback, event)]
    methods = {event: _receiver(event) for event in heard}
    methods |= {event: getattr(TrainerCallback, event) for event in tracker.ignored}
    return type(tracker.__name__, (tracker, callback), methods)


def _overrides(callback: type[Any], event: str) -> bool:
    return getattr(callback, event, None) is not getattr(TrainerCallback, event, None)


def _receiver(event: str) -> Callable[..., None]:
    def receive(self: TrackerCallback, args: Any, state: Any, control: Any, **details: Any) -> None:
        self.receive(event, args, state, details)

    receive.__name__ = event
    return receive


def _number(value: Any) -> float | None:
    """Returns a number, or the number in a tensor or NumPy scalar; None for everything else."""
    if callable(getattr(value, "item", None)):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # of more than one element
            return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Context manager that puts back random states and signal handlers which a library changes."""
    # Only the main thread may set handlers; the events of a background save come from another one.
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS} if is_main else {}
    try:
        with kept_random():
            yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler and handler is not None:
                signal.signal(number, handler)
