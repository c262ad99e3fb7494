"""`TextMetrics`: a `compute_metrics` for generated answers, made from functions of texts.

Takes the token ids of answers and of expected answers, as an evaluation with `predict_with_generate` gives them; gives
the numbers that functions of two lists of texts return: `exact_match`, `rouge` (or `rouge_if_installed`), and the
user's own.

Shapes:
    N rows, T tokens of the longest answer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from forgather.errors import TrainingError
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.token_text import decoded
from forgather.ml.log import get_logger

_log = get_logger(__name__)

TextFunction = Callable[..., Mapping[str, float]]
_ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
_NAMES = {"predictions", "references"}


def exact_match(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Returns the share of answers that are the expected text, letter by letter, as `exact_match`.

    Args:
        predictions: the generated answers.
        references: the expected answers.

    Example:
        >>> exact_match(["4", " 5"], ["4", "5"])
        {'exact_match': 0.5}
    """
    hits = sum(found == wanted for found, wanted in zip(predictions, references, strict=True))
    return {"exact_match": hits / len(references)}


def rouge(predictions: Sequence[str], references: Sequence[str], *, use_stemmer: bool = False) -> dict[str, float]:
    """Returns the mean F1 of ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum, computed by the package `rouge-score`.

    Its words are runs of the letters a to z and of digits: for other alphabets, write a function of your own.

    Args:
        predictions: the generated answers.
        references: the expected answers.
        use_stemmer: whether words are reduced to their stems before they are compared, as in English.

    Raises:
        TrainingError: FG965 if `rouge-score` is not installed.
    """
    refuse_wrong_values("text_metrics:rouge", locals())
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise TrainingError(
            "ROUGE needs the package rouge-score, which is not installed",
            code="FG965",
            hint="pip install 'forgather[finetune]'",
        ).about("compute_metrics.functions") from None
    scorer = RougeScorer(list(_ROUGE), use_stemmer=use_stemmer)
    scores = [scorer.score(wanted, found) for found, wanted in zip(predictions, references, strict=True)]
    return {name: float(np.mean([score[name].fmeasure for score in scores])) for name in _ROUGE}


def rouge_if_installed(predictions: Sequence[str], references: Sequence[str], **options: Any) -> dict[str, float]:
    """Returns what `rouge` returns; without the package `rouge-score`, nothing, which is logged once.

    Args:
        predictions: the generated answers.
        references: the expected answers.
        **options: further arguments of `rouge`.
    """
    if find_spec("rouge_score") is not None:
        return rouge(predictions, references, **options)
    _note_missing()
    return {}


@functools.cache
def _note_missing() -> None:
    _log.info("ROUGE is not computed: pip install 'forgather[finetune]' installs rouge-score")


class TextMetrics:
    """Computes metrics from generated answers and expected answers, as texts.

    Args:
        tokenizer: the tokenizer, which makes texts of token ids; special tokens are left out.
        functions: functions that are called with `predictions` and `references`, two lists of texts, and return a
            mapping from names to numbers.

    Raises:
        TrainingError: FG965 if these are no list of functions, or if one lacks `predictions` or `references`.

    Example:
        >>> class Letters:
        ...     def decode(self, ids, **options):
        ...         return "".join(map(chr, ids))
        >>> from transformers import EvalPrediction
        >>> ids = np.array([[97, 98], [97, -100]])
        >>> TextMetrics(Letters(), [exact_match])(EvalPrediction(ids, np.array([[97, 98], [98, -100]])))
        {'exact_match': 0.5}
    """

    def __init__(self, tokenizer: Any, functions: Sequence[TextFunction] = (exact_match,)) -> None:
        self.tokenizer = tokenizer
        if isinstance(functions, str) or not isinstance(functions, Sequence):
            hint = "give a list, as [!partial:forgather.ml.text_metrics:exact_match []]"
            raise _bad(f"functions is a {type(functions).__name__}", hint)
        self.functions = list(functions)
        for function in self.functions:
            if not callable(function):
                hint = "a function, as in !partial:metrics.py:overlap []"
                raise _bad(f"one of the functions is {function!r:.60}, which cannot be called", hint)
            _refuse_other_parameters(function)

    def __call__(self, prediction: Any) -> dict[str, float]:
        """Returns the metrics of an evaluation set by name.

        Args:
            prediction: a `transformers.EvalPrediction` with the token ids of answers and of expected answers.

        Shapes:
            predictions, label_ids: (N, T) of integers, padded with -100.

        Raises:
            TrainingError: FG965 if these are no token ids, or if a function returns no mapping, or a name twice.
        """
        given = {"predictions": self._texts(prediction.predictions), "references": self._texts(prediction.label_ids)}
        metrics: dict[str, float] = {}
        for function in self.functions:
            found = function(**given)
            name = _name(function)
            if not isinstance(found, Mapping):
                raise _bad(f"{name} returned a {type(found).__name__}", "return a mapping such as {'overlap': 0.5}")
            if again := sorted(metrics.keys() & found.keys()):
                raise _bad(f"{name} returned {again[0]!r}, and another function has it already", "use another name")
            metrics |= found
        return metrics

    def _texts(self, ids: Any) -> list[str]:
        rows = np.asarray(ids)
        if rows.ndim != 2 or rows.dtype.kind not in "iu":
            raise _bad(
                f"the predictions have the shape {rows.shape} of {rows.dtype}, which are no token ids",
                "set predict_with_generate: true",
            )
        return [decoded(self.tokenizer, row[row != -100].tolist()) for row in rows]


def _refuse_other_parameters(function: TextFunction) -> None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return  # of a C extension: the call will tell
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    if missing := sorted(_NAMES - {one.name for one in parameters}):
        raise _bad(
            f"{_name(function)} has no parameter {missing[0]!r}",
            "write it as f(predictions, references), two lists of texts",
        )


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _bad(message: str, hint: str) -> TrainingError:
    return TrainingError(message, code="FG965", hint=hint).about("compute_metrics.functions")
