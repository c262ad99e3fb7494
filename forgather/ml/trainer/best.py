"""Which of the evaluated models is the best.

Takes the metrics of evaluations; gives how they rank. Keeps true: the ranking is that of the history that a checkpoint
holds, so a resumed run ranks as one that was never stopped; what is not a number is never the best.
"""

from __future__ import annotations

import math

from forgather.errors import TrainingError, nearest
from forgather.ml.trainer.session import Session


class BestMetric:
    """The metric that models are compared by.

    Args:
        session: names the metric, and holds the history.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def is_followed(self) -> bool:
        """True where models are compared at all."""
        return self._session.args.metric_for_best_model is not None

    @property
    def name(self) -> str:
        """The metric's name in a line of the history."""
        name = str(self._session.args.metric_for_best_model)
        return name if name.startswith("eval_") else f"eval_{name}"

    def of(self, metrics: dict[str, float]) -> float:
        """Returns the metric out of those of an evaluation.

        Raises:
            TrainingError: FG821 where it is not among them.
        """
        if self.name not in metrics:
            raise TrainingError(
                f"metric_for_best_model is {self._session.args.metric_for_best_model!r}, and the evaluation gave no "
                f"{self.name!r}",
                code="FG821",
                hint=nearest(self.name, sorted(metrics)),
            )
        return metrics[self.name]

    def remember(self, value: float) -> bool:
        """Tells whether the model of the present step is the best so far, and remembers it if so."""
        state = self._session.state
        if self.is_better(value, state.best_metric):
            state.best_metric, state.best_global_step = value, state.global_step
            return True
        return False

    def is_better(self, value: float, than: float | None) -> bool:
        """Tells whether one value is better than another; any number is better than none."""
        if math.isnan(value):
            return False
        return than is None or (value > than if self._session.args.greater_is_better else value < than)

    @property
    def ranking(self) -> list[int]:
        """Steps that were evaluated, the best first; of equal ones the earlier."""
        if not self.is_followed:
            return []
        lines = self._session.state.log_history
        found = {int(line["step"]): line[self.name] for line in lines if not math.isnan(line.get(self.name, math.nan))}
        return sorted(found, key=lambda step: -found[step] if self._session.args.greater_is_better else found[step])

    def is_among_best(self) -> bool:
        """Tells whether the model of the present step is one of the best so far, of which `save_top_k` stay."""
        return self._session.state.global_step in self.ranking[: self._session.args.save_top_k or 1]

    def at(self, step: int) -> float | None:
        """Returns the value that was last measured at a step; None for none."""
        lines = reversed(self._session.state.log_history)
        return next((line[self.name] for line in lines if line["step"] == step and self.name in line), None)
