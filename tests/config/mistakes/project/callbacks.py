"""Callbacks of this project."""

from __future__ import annotations

from collections.abc import Callable

from transformers import TrainerCallback

WATCHED = "eval_loss"


def plain_line(values: dict[str, float], digits: int = 3) -> str:
    """Returns metrics as one line."""
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in values.items() if isinstance(value, float))


class StopOnPlateau(TrainerCallback):
    """Ends the training when a metric no longer falls."""

    def __init__(self, patience: int, *, threshold: float = 0.0, metric: str = WATCHED) -> None:
        self.patience = patience
        self.threshold = threshold
        self.metric = metric
        self.best = float("inf")
        self.waited = 0

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Counts the evaluations without progress."""
        value = (metrics or {}).get(self.metric, self.best)
        self.waited = 0 if value < self.best - self.threshold else self.waited + 1
        self.best = min(self.best, value)
        control.should_training_stop = control.should_training_stop or self.waited > self.patience
        return control


class GuardedStop(StopOnPlateau):
    """Ends the training at once when the metric passes a limit."""

    def __init__(self, limit: float, **options) -> None:
        super().__init__(**options)
        self.limit = limit

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Looks at the limit first."""
        if (metrics or {}).get(self.metric, 0.0) > self.limit:
            control.should_training_stop = True
        return super().on_evaluate(args, state, control, metrics, **kwargs)


class Report(TrainerCallback):
    """Keeps the lines of the evaluations."""

    def __init__(
        self, title: str, formatter: Callable[[dict[str, float]], str], columns: list[str] | None = None
    ) -> None:
        self.lines = [title]
        self.formatter = formatter
        self.columns = columns

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        """Keeps a line."""
        wanted = {name: value for name, value in (metrics or {}).items() if not self.columns or name in self.columns}
        self.lines.append(self.formatter(wanted))
