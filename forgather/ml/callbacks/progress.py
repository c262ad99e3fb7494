"""Training progress: live bars on a terminal; plain lines on any other output.

There is one line per log. A long evaluation prints lines at the pace of the last log lines, at most one in ten seconds.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from transformers import TrainerCallback
from transformers.trainer_utils import has_length

from forgather.ml.callbacks.output_target import report_only, shared_console
from forgather.ml.number_format import evaluation_titles, format_count, format_duration, format_number

_REFRESH_SECONDS = 0.1
_LEAST_SECONDS = 10.0
"""Units: seconds. The least time between two lines of an evaluation: most evaluations take less, and print none."""
# (minimum width of the terminal, width of the bar); below the last one there is neither a bar nor the elapsed time.
_BARS = ((120, 24), (70, 8))
# (metric, label, format) in the order of a line; of several metrics with one label, the first that is logged is shown.
# Other metrics are in the metrics file only.
_SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", "{:.4f}".format),
    ("train_loss", "mean loss", "{:.4f}".format),
    ("learning_rate", "lr", "{:.2e}".format),
    ("grad_norm", "grad norm", format_number),
    ("tokens_per_second", "tok/s", format_count),
    ("train_tokens_per_second", "tok/s", format_count),
    ("samples_per_second", "samples/s", format_count),
    ("train_samples_per_second", "samples/s", format_count),
    ("mfu", "MFU", "{:.1%}".format),
)
# Labels that are dropped on a narrow terminal, the first one first.
_DROPPABLE = ("grad norm", "MFU", "tok/s", "samples/s", "lr")


class ProgressCallback(TrainerCallback):
    """A callback that shows steps, loss, learning rate, tokens per second and the remaining time.

    An evaluation has a separate bar or lines. A run that compiles its model says so before its first step, which then
    takes long. Only the main process shows anything.

    Args:
        console: the console that is written to, or None for standard output.
        live: True to show bars, False to print plain lines, None to show bars only on a terminal.
    """

    def __init__(self, console: Console | None = None, live: bool | None = None) -> None:
        self.console = console
        self.live = live
        self._bars: Progress | None = None
        self._train: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._shown_at = 0.0
        self._begin = (0.0, 0)
        self._pace = EvaluationPace()

    @report_only
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Shows the training bar, which starts at the step from which a resumed run continues."""
        self._begin = (time.monotonic(), state.global_step)
        self._pace = EvaluationPace()
        if state.is_world_process_zero:
            if getattr(args, "torch_compile", False):
                self._say("compiling the model (torch_compile): the first step takes longer")
            self._start_bars()
            if self._bars is not None:
                done = min(state.global_step, state.max_steps)  # max_steps may have been lowered
                self._train = self._bars.add_task("training", total=state.max_steps, completed=done, facts="")

    @report_only
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Updates the training bar, at most ten times a second."""
        if self._bars is None or self._train is None:
            return
        now = time.monotonic()
        # Fast steps would otherwise spend a noticeable share of their time on drawing.
        if now - self._shown_at >= _REFRESH_SECONDS or state.global_step >= state.max_steps:
            self._shown_at = now
            self._bars.update(self._train, completed=state.global_step)

    @report_only
    def on_control(
        self, args: Any, state: Any, control: Any, facts: Mapping[str, Any], done: str, **kwargs: Any
    ) -> None:
        """Prints what was done on request of the user, and excludes the time of a pause from the estimate."""
        begin, first_step = self._begin
        self._begin = (begin + facts.get("paused_seconds", 0.0), first_step)
        if state.is_world_process_zero:
            who = f" (asked by {facts['who']} on {facts['host']})" if facts.get("who") else ""
            self._say(f"step {state.global_step}: {done}{who}")

    @report_only
    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Shows the metrics of a log next to the training bar, or prints them as a line."""
        if not logs or not state.is_world_process_zero:
            return
        facts = format_logs(logs)
        if not facts:
            return
        if self._bars is not None and self._train is not None and "loss" in logs:
            # The bar and the facts share one line, which rich would cut at the width of the terminal.
            facts = format_logs(logs, room=_room_next_to_bar((self.console or shared_console()).width, state.max_steps))
            self._bars.update(self._train, facts=facts, completed=state.global_step)
        else:
            self._say(f"{_step_label(state)}  {facts}{self._time_left(state, logs)}")
            if "loss" in logs:
                self._pace.log()

    @report_only
    def on_prediction_step(
        self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advances the evaluation bar by one batch, or prints a line if none was printed for long."""
        if not state.is_world_process_zero:
            return
        self._start_bars()
        if self._bars is None:
            if (progress := self._pace.add_batch(eval_dataloader)) is not None:
                self._say(f"{_step_label(state)}  {progress}")
            return
        if self._evaluation is None:
            # A stream has no length; the bar then counts without an end.
            total = len(eval_dataloader) if has_length(eval_dataloader) else None
            self._evaluation = self._bars.add_task("evaluating", total=total, facts="")
        self._bars.advance(self._evaluation)

    @report_only
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Removes the evaluation bar."""
        self._end_evaluation()

    @report_only
    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Removes the prediction bar."""
        self._end_evaluation()

    @report_only
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stops the bars and leaves their last state on the terminal."""
        if self._bars is None:
            return
        if self._train is not None:
            self._bars.update(self._train, completed=min(state.global_step, state.max_steps))
            self._train = None
        self._stop_bars()

    def _start_bars(self) -> None:
        console = self.console or shared_console()
        if self._bars is not None or not (console.is_terminal if self.live is None else self.live):
            return
        bar_width = _bar_width(console.width)
        bar = (BarColumn(bar_width=bar_width),) if bar_width else ()
        columns = (
            TextColumn("{task.description}"),
            *bar,
            MofNCompleteColumn(),
            *((TimeElapsedColumn(),) if bar else ()),
            TextColumn("left"),
            Remaining(),
            TextColumn("{task.fields[facts]}", style="cyan"),
        )
        self._bars = Progress(*columns, console=console, refresh_per_second=8)
        self._bars.start()
        atexit.register(self._stop_bars)  # rich hides the cursor; an error must not leave it hidden

    def _stop_bars(self) -> None:
        if self._bars is not None:
            self._bars.stop()
            self._bars = None
            atexit.unregister(self._stop_bars)

    def _end_evaluation(self) -> None:
        self._pace.end_evaluation()
        if self._bars is not None and self._evaluation is not None:
            self._bars.remove_task(self._evaluation)
            self._evaluation = None
        # An evaluation outside of training has no training bar that keeps the display alive.
        if self._train is None:
            self._stop_bars()

    def _time_left(self, state: Any, logs: dict[str, Any]) -> str:
        begin, first_step = self._begin
        done, left = state.global_step - first_step, state.max_steps - state.global_step
        if "loss" not in logs or done <= 0 or left <= 0:
            return ""
        return f"  left {format_duration((time.monotonic() - begin) / done * left)}"

    def _say(self, line: str) -> None:
        (self.console or shared_console()).print(line, markup=False, highlight=False, soft_wrap=True)


class EvaluationPace:
    """Decides when an evaluation prints a line: at the pace of the last log lines of the training.

    Args:
        clock: a function that returns the time.

    Units:
        seconds.

    Example:
        >>> times = iter([0.0, 30.0, 40.0, 60.0, 80.0])
        >>> pace, loader = EvaluationPace(clock=lambda: next(times)), range(4)
        >>> pace.log(), pace.log()
        (None, None)
        >>> [pace.add_batch(loader) for _ in range(3)]
        [None, None, 'evaluating batch 3/4  left 20.0 s']
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = _LEAST_SECONDS
        self._logged_at: float | None = None
        self._loader: Any = None
        self._batches = 0
        self._began = self._shown_at = 0.0

    def log(self) -> None:
        """Takes note that the training has printed a line."""
        now = self._clock()
        if self._logged_at is not None:
            self._seconds = max(now - self._logged_at, _LEAST_SECONDS)
        self._logged_at = now

    def add_batch(self, loader: Any) -> str | None:
        """Counts a batch of an evaluation, and returns the text of a line if one is due.

        Args:
            loader: the loader of the evaluation set, which may have a length.
        """
        now = self._clock()
        if not self._batches or loader is not self._loader:
            # Another evaluation set: its batches are counted from the first one.
            self._shown_at = self._shown_at if self._batches else now
            self._loader, self._batches, self._began = loader, 0, now
        self._batches += 1
        if now - self._shown_at < self._seconds:
            return None
        self._shown_at = now
        # A stream has no length, and answers may be generated after the batches.
        total = len(loader) if has_length(loader) else 0
        if self._batches > total:
            return f"evaluating batch {self._batches}"
        left = (now - self._began) / max(self._batches - 1, 1) * (total - self._batches)
        return f"evaluating batch {self._batches}/{total}" + (f"  left {format_duration(left)}" if left else "")

    def end_evaluation(self) -> None:
        """Takes note that the evaluation has ended. Its time does not count between two log lines."""
        self._batches, self._loader = 0, None
        if self._logged_at is not None:
            self._logged_at = self._clock()


def format_logs(logs: Mapping[str, Any], room: int | None = None) -> str:
    """Returns the main metrics of a log as one line of text, or "" if the log has none of them.

    Args:
        logs: the logged numbers, by metric.
        room: the maximum width in characters, for which less important metrics are dropped, or None for no limit.
    """
    parts: dict[str, str] = {}
    evaluated = [(name, label, "{:.4f}".format) for name, label in evaluation_titles(logs).items()]
    for name, label, text in (*_SHOWN[:1], *evaluated, *_SHOWN[1:]):
        value = logs.get(name)
        if isinstance(value, int | float) and label not in parts:
            parts[label] = f"{label} {text(value)}"
    # Both measure the same speed, and tokens are the finer unit.
    if "tok/s" in parts:
        parts.pop("samples/s", None)
    for label in _DROPPABLE:
        if room is not None and len("  ".join(parts.values())) > room:
            parts.pop(label, None)
    return "  ".join(parts.values())


def _step_label(state: Any) -> str:
    """Returns "step N/MAX", or another text if the step is past `max_steps`."""
    # A resume may have lowered `max_steps`.
    if state.global_step > state.max_steps:
        return f"step {state.global_step} (past max_steps {state.max_steps})"
    return f"step {state.global_step:>{len(str(state.max_steps))}}/{state.max_steps}"


def _bar_width(terminal_width: int) -> int:
    return next((width for least, width in _BARS if terminal_width >= least), 0)


def _room_next_to_bar(terminal_width: int, max_steps: int) -> int:
    """Returns the number of characters of a terminal line that the bar leaves for the metrics."""
    bar_width = _bar_width(terminal_width)
    steps = 2 * len(str(max_steps)) + 1
    taken = [len("evaluating"), steps, len("left"), len("0:00:00")]
    if bar_width:
        taken += [bar_width, len("0:00:00")]
    return terminal_width - sum(taken) - len(taken)
