"""The user's functions that compute metrics from predictions, and the rules about what they take and return.

`MetricFunctions` is made from the arguments of a trainer. The evaluation loop passes it the gathered rows of an
evaluation set; it calls the user's `compute_metrics`, checks the returned metrics and adds the prefix to their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.trainer_utils import denumpify_detensorize

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.number_format import format_bytes
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.predictions import Rows

LIMIT = 10**9
"""The size of predictions, in bytes, above which `eval_full_logits` must be set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFunctions:
    """The user's functions that compute metrics, and the settings that determine what they get.

    Args:
        compute: the user's `compute_metrics`, a function from a `transformers.EvalPrediction` to a mapping from names
            to numbers; None if only the loss is reported.
        preprocess: the user's `preprocess_logits_for_metrics`, a function of (logits, labels), or None.
        include: the values of `include_for_metrics`.
        per_batch: whether `compute` is called after each batch, with `compute_result=True` after the last one.
        full_logits: whether predictions of more than 1 GB are gathered.

    Raises:
        TrainingError: FG873 if `compute` is called after each batch and has no parameter `compute_result`.
    """

    compute: Callable[..., Any] | None = None
    preprocess: Callable[..., Any] | None = None
    include: Sequence[str] = ()
    per_batch: bool = False
    full_logits: bool = False

    @classmethod
    def from_arguments(
        cls, args: TrainingArguments, compute: Callable[..., Any] | None, preprocess: Callable[..., Any] | None
    ) -> MetricFunctions:
        """Returns the functions of a trainer with the settings in its training arguments.

        Args:
            args: the training arguments.
            compute: the trainer's `compute_metrics`, or None.
            preprocess: the trainer's `preprocess_logits_for_metrics`. If it is None and `compute` has a method of this
                name, as `LabelMetrics` has, that method is used.

        Raises:
            TrainingError: FG873 if `compute` is called after each batch and has no parameter `compute_result`.
        """
        return cls(
            compute=compute,
            preprocess=preprocess or getattr(compute, "preprocess_logits_for_metrics", None),
            include=args.include_for_metrics or (),
            per_batch=args.batch_eval_metrics,
            # The tokens of answers are few, and need no limit.
            full_logits=args.eval_full_logits or args.predict_with_generate,
        )

    def __post_init__(self) -> None:
        if self.per_batch and self.compute is not None and not _takes(self.compute, "compute_result"):
            raise TrainingError(
                "batch_eval_metrics is true, and compute_metrics has no parameter compute_result",
                code="FG873",
                hint="write compute_metrics(prediction, compute_result): it is called after each batch, and returns "
                "the metrics if compute_result is true",
            ).about("compute_metrics")

    @property
    def is_limited(self) -> bool:
        """True if the model's whole output is kept for each row, and must not be larger than 1 GB."""
        return self.compute is not None and self.preprocess is None and not self.per_batch and not self.full_logits

    def refuse_large(self, num_bytes: float) -> None:
        """Raises an error if predictions are larger than 1 GB and `eval_full_logits` is not set.

        Args:
            num_bytes: the size of the predictions of an evaluation set.

        Raises:
            TrainingError: FG870.
        """
        if self.is_limited and num_bytes > LIMIT:
            raise TrainingError(
                f"compute_metrics would get {format_bytes(num_bytes)} of predictions for this evaluation set, in the "
                "host memory of each process",
                code="FG870",
                hint="give preprocess_logits_for_metrics, which reduces them, as logits.argmax(-1) does; or set "
                "batch_eval_metrics: true; or allow this size with eval_full_logits: true",
            ).about("compute_metrics")

    def computed_from(self, rows: Rows, **details: Any) -> Any:
        """Returns what `compute` returns for some rows. Collective: every rank must call it, with the same rows.

        Args:
            rows: the rows of all ranks.
            **details: the further keyword arguments of `compute`.
        """
        assert self.compute is not None, "the caller has checked it"  # noqa: S101
        compute = self.compute
        # transformers passes tensors after each batch, and arrays at the end.
        given = rows.as_tensors() if self.per_batch else rows.as_arrays()
        # A function of the user that fails on one rank must end all of them.
        return collectives.run_collectively(lambda: compute(given, **details))

    def named(self, found: Any, prefix: str, taken: Collection[str] = ()) -> dict[str, float]:
        """Returns what `compute` returned, with the prefix of the evaluation before each name.

        Args:
            found: what `compute` returned.
            prefix: the prefix.
            taken: the names of further metrics of this evaluation, with the prefix.

        Raises:
            TrainingError: FG871 if it is not a mapping from names to numbers, or if a name is taken.
        """
        if not isinstance(found, Mapping):
            raise _bad_metrics(f"compute_metrics returned a {type(found).__name__}, not a mapping of names to numbers")
        metrics: dict[str, float] = {}
        plain = denumpify_detensorize(dict(found))  # type: ignore[no-untyped-call]
        for name, value in plain.items():
            if not isinstance(name, str):
                raise _bad_metrics(f"compute_metrics returned the name {name!r}, which is not text")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise _bad_metrics(f"compute_metrics returned a {type(value).__name__} for {name!r}, not a number")
            whole = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
            if whole in metrics or whole in taken or whole.removeprefix(f"{prefix}_") in _TAKEN:
                raise _bad_metrics(f"compute_metrics returned {name!r}, and the evaluation has another {whole!r}")
            metrics[whole] = value
        return metrics


_TAKEN = ("loss", "runtime", "samples_per_second", "steps_per_second")


def _bad_metrics(message: str) -> TrainingError:
    return TrainingError(
        message, code="FG871", hint="return a mapping such as {'accuracy': 0.9}, with a name of its own for each number"
    ).about("compute_metrics")


def _takes(function: Callable[..., Any], name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # A callable of a C extension shows no parameters; the call itself will tell.
        return True
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)
