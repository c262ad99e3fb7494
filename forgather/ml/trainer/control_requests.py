"""Does what a user asks of a run while it goes on: at a step boundary, on all processes at the same step.

The input is the requests that the main process has received; the output is what the run does, an answer to each
request, an event for the callbacks, and a record of each change. New settings are made before the log line, the
evaluation and the checkpoint of the step, so that a checkpoint of the step has them; everything else is done after
these. Without a request, nothing is sent between processes.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from forgather.control_listener import Arrival, ControlListener
from forgather.errors import CheckpointError, ControlError, ForgatherError
from forgather.interventions import Intervention, from_dict, read_interventions, record, repeated_run
from forgather.ml.distributed import collectives, phase
from forgather.ml.log import get_logger
from forgather.ml.number_format import format_duration
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.rate_scale import ScaledSchedule
from forgather.ml.trainer.synchronization import RunSync
from forgather.run_control import SETTABLE, Action, Answer, Request, note_pause, refusal

_log = get_logger(__name__)

_PERIOD_SECONDS = 0.25
"""Units: seconds. The time between two exchanges of a paused run: far below every timeout of collectives."""


class Boundary(Protocol):
    """What a request needs of the run, which is at a step boundary."""

    meter: Any
    saver: Any

    def save(self) -> Path:
        """Writes a checkpoint of the current step. Collective."""

    def stop_if_asked(self, *, now: bool = False) -> None:
        """Ends the run on all processes if one process was asked to stop. Collective."""


@dataclass(frozen=True)
class _Order:
    """A request that all processes do.

    Args:
        number: the number under which the main process keeps the arrival; None if the order repeats an earlier run.
        request: the request.
        changes: the changes that the request makes to the training.
    """

    number: int | None
    request: Request
    changes: Sequence[Intervention] = ()


class ControlRequests:
    """The control requests of a run.

    Args:
        session: the session, with arguments, trainer state and callbacks.
        sync: the object that tells all processes that there are requests.
        schedule: the learning rate schedule.
        is_main: whether this process takes the requests.
    """

    def __init__(self, session: Session, sync: RunSync, schedule: ScaledSchedule, *, is_main: bool) -> None:
        self._session = session
        self._sync = sync
        self._schedule = schedule
        self._is_main = is_main
        self._run_dir = str(session.args.logging_dir)
        self._listener: ControlListener | None = None
        self._numbers = itertools.count()
        self._arrivals: dict[int, Arrival] = {}
        self._stops: list[Arrival] = []
        self._orders: list[_Order] = []
        self._changes: list[Intervention] = []
        self._repeats: list[Intervention] = []
        self._paused_since: float | None = None

    @property
    def _step(self) -> int:
        return self._session.state.global_step

    def listen(self) -> None:
        """Starts to take requests, and reads the interventions of the run that this one repeats.

        Collective: every process must call it. A run without a run folder takes no requests.

        Raises:
            ControlError: FG518 if the interventions of the earlier run are damaged.
        """
        earlier = repeated_run()
        if earlier is not None:
            found = collectives.run_on_main(lambda: read_interventions(earlier))
            # The checkpoint from which the run resumes has the earlier ones.
            self._repeats = [one for one in found if one.step > self._step]
        if not self._is_main or self._session.args.control == "off" or not os.path.isdir(self._run_dir):
            return
        try:
            self._listener = ControlListener(self._run_dir)
        except OSError as error:
            _log.warning("the run takes no control requests: %s", error)
            return
        self._sync.has_requests = lambda: self._listener is not None and self._listener.waiting

    def receive(self, run: Boundary) -> None:
        """Takes the requests that have arrived, and makes the changes of settings among them.

        Collective, if there is a request.

        Args:
            run: the run, at a step boundary.
        """
        orders = self._repeated_orders() if self._repeats else []
        if self._sync.take_requests():
            orders += collectives.run_on_main(self._take)
        for order in orders:
            if order.request.action is Action.SET:
                self._set(order, run)
            else:
                self._orders.append(order)

    def act(self, run: Boundary) -> None:
        """Does the requests that `receive` has taken; returns when the run goes on. Collective, if there is a request.

        Args:
            run: the run, at a step boundary.

        Raises:
            KeyboardInterrupt: on every process, if the run is to stop.
        """
        self._do_orders(run)
        if self._paused_since is None:
            return
        try:
            while self._paused_since is not None:
                phase.set_phase("paused by the user", self._step)
                with run.meter.idle():
                    # The other processes wait in the exchange that follows.
                    if self._listener is not None:
                        self._listener.wait(_PERIOD_SECONDS)
                    run.stop_if_asked(now=True)
                self.receive(run)
                self._do_orders(run)
        finally:
            if self._paused_since is not None:
                self._end_pause("the pause ended, because the run ends", {})

    def close(self, error: BaseException | None) -> None:
        """Answers all requests that are left, and takes no more.

        Args:
            error: the exception that ended the run, or None.
        """
        if self._listener is None:
            return
        listener, self._listener = self._listener, None
        self._sync.has_requests = bool
        notes = [str(note) for note in getattr(error, "__notes__", ())]
        for arrival in self._stops:
            arrival.answer(Answer(step=self._step, done="; ".join(["stopped", *notes])))
        how = "has finished" if error is None else "was interrupted" if _is_stop(error) else "has failed"
        late = ControlError(f"the run {how} at step {self._step} before it did this", code="FG515")
        for arrival in [*self._arrivals.values(), *listener.take()]:
            arrival.answer(refusal(late, self._step))
        listener.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the settings that were changed, for a checkpoint."""
        changes = [asdict(one) for one in self._changes]
        return {"step": self._step, "changes": changes, "schedule": self._schedule.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the changes of settings that a checkpoint has, after optimizer and schedule have been restored.

        Changes that were made since the checkpoint, when a run goes back to it, are made again at once.

        Args:
            state: what `state_dict` returned; empty for a checkpoint of an earlier release.
        """
        later = [one for one in self._changes if one.step > state.get("step", -1)]
        self._changes = [from_dict(one) for one in state.get("changes", ())]
        self._schedule.load_state_dict(state.get("schedule", {}))
        for one in self._changes:
            if one.name != "learning_rate":
                setattr(self._session.state, one.name, int(one.value or 0))
        for one in later:
            self._change(one)

    def _take(self) -> list[_Order]:
        """Returns the orders of all requests that have arrived and can be done; the others get their answers."""
        assert self._listener is not None, "it has a request"  # noqa: S101
        orders = []
        for arrival in self._listener.take():
            try:
                changes = self._changes_of(arrival.request)
            except ControlError as error:
                arrival.answer(refusal(error, self._step))
                continue
            number = next(self._numbers)
            self._arrivals[number] = arrival
            orders.append(_Order(number, arrival.request, changes))
        return orders

    def _changes_of(self, request: Request) -> list[Intervention]:
        """Returns the changes that a request makes, after they have been recorded.

        Raises:
            ControlError: FG516 if a change cannot be made now, or cannot be recorded.
        """
        if request.action is Action.STOP:
            changes = [Intervention(step=self._step, action=Action.STOP)]
        else:
            self._refuse_steps({name: value for name, value in request.settings.items() if name != "learning_rate"})
            changes = [self._change_of(name, value) for name, value in request.settings.items()]
        when = round(time.time(), 3)
        changes = [replace(one, who=request.who, host=request.host, when=when) for one in changes]
        if changes:
            try:
                record(self._run_dir, changes)
            except OSError as error:
                reason = error.strerror or str(error)
                raise _not_now(f"the change cannot be recorded in {self._run_dir!r}: {reason}") from None
        return changes

    def _change_of(self, name: str, value: float) -> Intervention:
        """Returns the change of a setting, with its value until now and the factor of the schedule."""
        if name != "learning_rate":
            before = getattr(self._session.state, name)
            return Intervention(step=self._step, action=Action.SET, name=name, value=value, before=before)
        rate = self._schedule.rate
        factor = value / rate if rate else math.nan
        if rate is None or not (math.isfinite(factor) and factor > 0):
            kind = type(self._schedule.schedule).__name__
            raise _not_now(
                f"learning_rate cannot be set now: {kind} gives {rate}, and no factor makes it {value:g}",
                "set it after the warm-up, or before the end of the schedule",
            )
        before = rate * self._schedule.factor
        return Intervention(step=self._step, action=Action.SET, name=name, value=value, before=before, factor=factor)

    def _refuse_steps(self, steps: Mapping[str, float]) -> None:
        """Raises FG516 if an interval in steps would have no effect, or contradicts other settings."""
        args, state = self._session.args, self._session.state
        for name in steps:
            strategy = SETTABLE[name].strategy
            if strategy is not None and getattr(args, strategy) != "steps":
                raise _not_now(f"{name} has no effect: {strategy} is {getattr(args, strategy)!r}")
        if steps:
            in_force = {one: getattr(state, one) for one in ("logging_steps", "eval_steps", "save_steps")}
            known = {one: value for one, value in in_force.items() if one in args.explicit}
            try:
                args.replace(**{**known, **{name: int(value) for name, value in steps.items()}})
            except ForgatherError as error:
                raise _not_now(error.message, error.hint) from None

    def _repeated_orders(self) -> list[_Order]:
        """Returns the orders that the repeated run had at this step, after recording them for this run."""
        due = [one for one in self._repeats if one.step <= self._step]
        self._repeats = self._repeats[len(due) :]
        if due and self._is_main and os.path.isdir(self._run_dir):
            try:
                record(self._run_dir, due)
            except OSError as error:
                _log.warning("interventions cannot be recorded in %s: %s", self._run_dir, error)
        return [_Order(None, Request(action=one.action, who=one.who, host=one.host), [one]) for one in due]

    def _set(self, order: _Order, run: Boundary) -> None:
        for change in order.changes:
            self._change(change)
        problem = None
        if run.saver.written_step == self._step:
            # The checkpoint of this step lacks the change: a resumed run would go on without it.
            run.saver.written_step = -1
            _, problem = self._saved(run)
        done = ", ".join(map(_described, order.changes))
        if problem is not None:
            done += f"; the checkpoint of step {self._step} could not be written again: {problem.message}"
        for change in order.changes:
            facts = {"name": change.name, "value": change.value, "before": change.before, "factor": change.factor}
            self._tell(order, _described(change), {name: value for name, value in facts.items() if value is not None})
        self._answer(order, done, {"settings": {change.name: change.value for change in order.changes}})

    def _change(self, change: Intervention) -> None:
        if change.factor is not None:
            self._schedule.set_factor(change.factor)
        else:
            setattr(self._session.state, change.name, int(change.value or 0))
        self._changes.append(change)

    def _do_orders(self, run: Boundary) -> None:
        orders, self._orders = self._orders, []
        for order in orders:
            acts = {
                Action.PAUSE: self._pause,
                Action.RESUME: self._resume,
                Action.SAVE: self._save,
                Action.STOP: self._stop,
            }
            acts[order.request.action](order, run)

    def _pause(self, order: _Order, run: Boundary) -> None:
        if self._paused_since is not None:
            self._answer(order, "paused already", {})
            return
        self._paused_since = time.monotonic()
        if self._listener is not None:
            note_pause(self._run_dir, is_paused=True)
        self._tell(order, "paused", {})
        self._answer(order, "paused", {})

    def _resume(self, order: _Order, run: Boundary) -> None:
        if self._paused_since is None:
            self._refuse(order, _not_now("the run is not paused"))
            return
        seconds = time.monotonic() - self._paused_since
        done = f"resumed after a pause of {format_duration(seconds)}"
        self._end_pause(done, {"who": order.request.who, "host": order.request.host})
        self._answer(order, done, {"paused_seconds": round(seconds, 3)})

    def _end_pause(self, done: str, who: Mapping[str, str]) -> None:
        assert self._paused_since is not None, "the run is paused"  # noqa: S101
        seconds, self._paused_since = time.monotonic() - self._paused_since, None
        if self._listener is not None:
            note_pause(self._run_dir, is_paused=False)
        facts = {"action": Action.RESUME, "paused_seconds": round(seconds, 3), **who}
        self._session.send("on_control", facts=facts, done=done)

    def _save(self, order: _Order, run: Boundary) -> None:
        folder, problem = self._saved(run)
        if problem is not None:
            self._refuse(order, problem)
            return
        self._tell(order, f"saved {folder}", {"checkpoint": str(folder)})
        self._answer(order, f"saved {folder}", {"checkpoint": str(folder)})

    def _saved(self, run: Boundary) -> tuple[Path | None, CheckpointError | None]:
        """Writes a checkpoint, and returns its folder or the reason why there is none: the run goes on without it."""
        try:
            folder = run.save()
            run.saver.report_finished(wait=True)
        except CheckpointError as error:
            _log.error("step %d: %s", self._step, error)
            return None, error
        return folder, None

    def _stop(self, order: _Order, run: Boundary) -> None:
        self._tell(order, "stopped", {})
        # It is answered when the state is saved.
        if order.number in self._arrivals:
            self._stops.append(self._arrivals.pop(order.number))
        self._sync.stop_all()
        run.stop_if_asked()

    def _tell(self, order: _Order, done: str, facts: Mapping[str, Any]) -> None:
        """Sends what was done to the callbacks, with the user who asked for it."""
        request = order.request
        everything = {"action": request.action, **facts, "who": request.who, "host": request.host}
        if order.number is None:
            everything["repeated"] = True
        self._session.send("on_control", facts=everything, done=done)
        _log.info("step %d: %s (asked by %s)", self._step, done, request.who)

    def _answer(self, order: _Order, done: str, facts: Mapping[str, Any]) -> None:
        if order.number in self._arrivals:
            self._arrivals.pop(order.number).answer(Answer(step=self._step, done=done, facts=facts))

    def _refuse(self, order: _Order, error: ForgatherError) -> None:
        if order.number in self._arrivals:
            self._arrivals.pop(order.number).answer(refusal(error, self._step))


def _is_stop(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _not_now(message: str, hint: str | None = None) -> ControlError:
    return ControlError(message, code="FG516", hint=hint)


def _described(change: Intervention) -> str:
    until = "" if change.before is None else f"{change.before:g} -> "
    scaled = "" if change.factor is None else f" (the rest of the schedule times {change.factor:g})"
    return f"{change.name} {until}{change.value:g}{scaled}"
