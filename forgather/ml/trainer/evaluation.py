"""The evaluation loop: the loss and the metrics of one or several evaluation sets, and predictions for rows.

`evaluate` returns metrics under `eval_` names and sends them to the callbacks. The evaluation loss is the sum over all
valid targets of the set, divided by their number, so it does not depend on the batch size or on the number of
processes. `predict` returns predictions, for rows with or without labels.

An evaluation changes neither the random states nor the training modes of modules, and every process gets the same
metrics.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from forgather.errors import TrainingError
from forgather.ml.distributed import collectives
from forgather.ml.strategy.base import Strategy
from forgather.ml.task import task_of
from forgather.ml.train_mode import restored_train_modes
from forgather.ml.trainer.answers import AnsweredSet, AnswerGenerator
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.batch_sampler import PreparedBatch, RankShare
from forgather.ml.trainer.control import Session
from forgather.ml.trainer.data_loader import RankBatches
from forgather.ml.trainer.divergence import batches_with_divergence
from forgather.ml.trainer.loader_options import loader_options
from forgather.ml.trainer.metric_functions import MetricFunctions
from forgather.ml.trainer.predictions import PredictionCollector, Rows
from forgather.ml.trainer.stream_choice import is_iterable
from forgather.ml.types import Evaluated, Topology

T = TypeVar("T")

NUM_SHOWN = 8
"""The number of rows of each evaluation set whose generated answers callbacks get."""


def eval_batches(
    dataset: Any, args: TrainingArguments, collate: Callable[[list[Any]], Any], topology: Topology
) -> RankBatches:
    """Returns the rank-local batches of an evaluation set, in the order of the rows in the set.

    Args:
        dataset: the evaluation set, map-style or iterable.
        args: the training arguments, whose batch size and loader options are read.
        collate: the collator, a function from a list of rows to a batch.
        topology: the topology of this process, from which the data-parallel rank is read.

    Raises:
        TrainingError: FG803 if there are no rows; FG853 if the data is already split among processes.
    """
    if not is_iterable(dataset) and len(dataset) == 0:
        raise _no_rows()
    # Not of a fixed size, as the micro-batches of a pipeline are: a forward pass alone takes any number of rows.
    share = RankShare(args.per_device_eval_batch_size, topology.dp_rank, topology.dp_size)
    return RankBatches(dataset, share, collate, loader_options(args, topology))


def _no_rows() -> TrainingError:
    """Returns the FG803 error for evaluation data without rows."""
    return TrainingError(
        "the evaluation data has no rows", code="FG803", hint="check how the data is filtered and split"
    )


def evaluate(
    session: Session,
    strategy: Strategy,
    sets: Mapping[str, RankBatches],
    *,
    functions: MetricFunctions,
    generator: AnswerGenerator | None = None,
    prefix: str = "eval",
    wants_end: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Evaluates the model on one or several data sets; returns the metrics and sends them to the callbacks.

    Collective: every process must call it.

    Args:
        session: the session, whose callbacks get the metrics.
        strategy: the strategy, which computes the losses.
        sets: the batches of each evaluation set, by name; a single set has the name "".
        functions: the user's functions that compute metrics. They are called on every process, with the same rows, and
            the main process's metrics are returned on all of them.
        generator: the generator of answers to the prompts of each set, from which the user's metrics are then computed;
            None to compute them from the outputs of the model.
        prefix: the prefix of the names of all metrics.
        wants_end: a function that is called before each batch and returns whether to interrupt the evaluation. It must
            return the same answer on all processes.

    Returns:
        `<prefix>_loss` (nats per target for a cross-entropy), the user's metrics, `<prefix>_runtime` (seconds), and
        samples and batches per second; None if the evaluation was interrupted.

    Raises:
        TrainingError: FG803 if a set contains no rows; FG870 to FG872 if metrics cannot be computed.
    """
    metrics: dict[str, float] = {}
    shown: list[dict[str, Any]] = []
    with restored_train_modes(strategy.model):
        for name, batches in sets.items():
            session.dispatcher.scene["eval_dataloader"] = batches.loader
            under = f"{prefix}_{name}" if name else prefix
            of_outputs = functions if generator is None else MetricFunctions()
            found = _evaluate_one(session, strategy, batches, of_outputs, under, wants_end)
            if found is None:
                return None
            metrics |= found
            if generator is None:
                continue
            answered = generator.answer(
                batches.dataset, after_batch=lambda: session.send("on_prediction_step"), wants_end=wants_end
            )
            if answered is None:
                return None
            metrics |= metrics_of_answers(answered, functions, under)
            of_set = {"set": name} if name else {}
            shown += [{**of_set, **line} for line in answered.lines(generator.tokenizer, NUM_SHOWN)]
    # Runtimes differ between processes: a decision by any metric must be the same on all of them.
    metrics = collectives.run_on_main(lambda: metrics)
    session.log(metrics)
    session.control.should_evaluate = False
    session.send("on_evaluate", metrics={**metrics, "epoch": session.state.epoch}, answers=shown)
    return metrics


def metrics_of_answers(answered: AnsweredSet, functions: MetricFunctions, prefix: str) -> dict[str, float]:
    """Returns the metrics of generated answers. Collective: every rank must call it, with the same answers.

    Args:
        answered: the answers.
        functions: the user's functions, which are called if there are expected answers.
        prefix: the prefix of the names of all metrics.

    Raises:
        TrainingError: FG871 if a function returns no metrics; FG965 if the functions of texts cannot compute them.
    """
    found = answered.figures(prefix)
    if functions.compute is not None and answered.has_references:
        found |= functions.named(functions.computed_from(answered.as_rows()), prefix, found)
    return found


def _evaluate_one(
    session: Session,
    strategy: Strategy,
    own: RankBatches,
    functions: MetricFunctions,
    prefix: str,
    wants_end: Callable[[], bool] | None,
) -> dict[str, float] | None:
    sums = _Sums(strategy)
    metrics = _SetMetrics(functions, strategy, own.num_rows) if functions.compute is not None else None
    path = getattr(strategy.rule, "path", None) if metrics is None else None
    compute = strategy.evaluate_loss if metrics is None else strategy.evaluate
    for ready, is_last in with_last(_in_step(own, strategy)):
        if wants_end is not None and wants_end():
            return None
        with contextlib.nullcontext() if path is None else path.dropping_logits():
            found = compute(ready.batch)
        sums.add(found.loss, found.num_valid, ready.num_rows)
        if metrics is not None:
            metrics.add(ready, found, is_last=is_last)
        # Logits are the largest tensors: they must not be alive while the next batch is computed.
        del found
        session.send("on_prediction_step")
    figures = sums.figures(prefix)
    return figures if metrics is None else figures | functions.named(metrics.result(), prefix)


def predict(
    session: Session,
    strategy: Strategy,
    own: RankBatches,
    *,
    functions: MetricFunctions,
    prefix: str,
    ignore_keys: Sequence[str] | None = None,
) -> tuple[Rows, dict[str, float]]:
    """Returns the predictions for the rows of a data set, and metrics; the rows need no labels.

    Collective: every process must call it, and gets the predictions of all rows.

    Args:
        session: the session, whose callbacks get the event `on_predict` with the metrics.
        strategy: the strategy, which computes the outputs.
        own: the batches of the data set.
        functions: the user's functions that compute metrics, if the rows have labels.
        prefix: the prefix of the names of all metrics.
        ignore_keys: the entries of the model's output to leave out; by default those that its configuration names.

    Raises:
        TrainingError: FG803 if there are no rows; FG871 or FG872 if metrics cannot be computed.
    """
    sums = _Sums(strategy)
    predictions = PredictionCollector(
        strategy, preprocess=functions.preprocess, include=functions.include, ignore_keys=ignore_keys
    )
    has_labels = True
    with restored_train_modes(strategy.model):
        for ready in _in_step(own, strategy):
            has_labels = predictions.has_labels(ready)
            if has_labels:
                found = strategy.evaluate(ready.batch)
            else:
                found = Evaluated(torch.zeros(()), 0, strategy.predict(ready.batch))
            sums.add(found.loss, found.num_valid, ready.num_rows)
            predictions.add(predictions.read(ready, found))
            del found
            session.send("on_prediction_step")
    metrics = sums.figures(prefix)
    rows = predictions.gather()
    if not has_labels:
        # There is nothing to compare the outputs with.
        del metrics[f"{prefix}_loss"]
    elif functions.compute is not None:
        metrics |= functions.named(functions.computed_from(rows), prefix)
    metrics = collectives.run_on_main(lambda: metrics)
    session.send("on_predict", metrics=metrics)
    return rows, metrics


def refuse_large_logits(strategy: Strategy, sets: Iterable[RankBatches], functions: MetricFunctions) -> None:
    """Raises an error if the logits of an evaluation set would be refused, before a training that ends with it.

    The size is estimated from the first batch of each set. Only the logits of causal language models are estimated.
    Collective: every process must call it.

    Args:
        strategy: the strategy, which has the model.
        sets: the batches of the evaluation sets.
        functions: the user's functions that compute metrics.

    Raises:
        TrainingError: FG870 if the logits of a set are larger than 1 GB.
    """
    if not functions.is_limited:
        return
    config: Any = getattr(strategy.view, "config", None)
    words = getattr(config.get_text_config() if hasattr(config, "get_text_config") else config, "vocab_size", 0)
    # Another model returns fewer numbers for a row than a language model, and how many is known only when it is called.
    if not isinstance(words, int) or not task_of(strategy.model, strategy.rule).counts_tokens:
        return
    for own in sets:
        if own.num_rows is None:
            continue
        first = next(own.read(strategy.rule), None)
        per_row = 4 * words * first.num_tokens / first.num_rows if first is not None and first.num_rows else 0.0
        functions.refuse_large(collectives.all_max(per_row) * own.num_rows)


class _Sums:
    """The sums of the losses, targets and rows of an evaluation set, and the time since the evaluation began."""

    def __init__(self, strategy: Strategy) -> None:
        self._began = time.perf_counter()
        self._strategy = strategy
        device = strategy.topology.device
        # Sums of many batches lose digits in float32, and then depend on how rows were batched.
        kind = torch.float64 if device.type != "mps" else torch.float32
        self._sums = torch.zeros(3, dtype=kind, device=device)
        self._rows = self._batches = 0

    def add(self, loss: Tensor, num_valid: float | Tensor, rows: int) -> None:
        """Adds the sum of the losses of a batch, its divisor, and its number of rows."""
        self._sums[0] += loss
        self._sums[1] += num_valid
        self._rows += rows
        self._batches += 1

    def figures(self, prefix: str) -> dict[str, float]:
        """Returns the mean loss and the speed over all ranks, by names with a prefix. Collective."""
        if self._batches == 0:
            raise _no_rows()
        self._sums[2] = self._rows
        # This synchronizes with the device, which is part of the time.
        loss, num_valid, rows = self._strategy.reduce(self._sums).tolist()
        seconds = max(time.perf_counter() - self._began, 1e-9)
        return {
            f"{prefix}_loss": loss / num_valid if num_valid else float("nan"),
            f"{prefix}_runtime": seconds,
            f"{prefix}_samples_per_second": rows / seconds,
            f"{prefix}_steps_per_second": self._batches / seconds,
        }


class _SetMetrics:
    """The metrics that the user's function computes from the predictions of one evaluation set."""

    def __init__(self, functions: MetricFunctions, strategy: Strategy, num_rows: int | None) -> None:
        self._functions = functions
        self._predictions = PredictionCollector(strategy, preprocess=functions.preprocess, include=functions.include)
        self._num_rows = num_rows
        self._found: Any = {}
        self._bytes = 0.0
        self._is_first = True

    def add(self, ready: PreparedBatch, found: Evaluated, *, is_last: bool) -> None:
        """Adds the predictions of a batch, or computes its metrics with `batch_eval_metrics`. Collective."""
        rows = self._predictions.read(ready, found)
        if self._functions.per_batch:
            batch = self._predictions.gather_batch(rows)
            self._found = self._functions.computed_from(batch, compute_result=is_last)
            return
        self._predictions.add(rows)
        if self._functions.is_limited:
            self._refuse_large(rows)
        self._is_first = False

    def result(self) -> Any:
        """Returns what the user's function returned for the whole set. Collective: every rank must call it."""
        return self._found if self._functions.per_batch else self._functions.computed_from(self._predictions.gather())

    def _refuse_large(self, rows: Rows | None) -> None:
        if self._num_rows is None:
            # A stream: only the size so far is known.
            self._bytes += collectives.all_sum(rows.num_bytes if rows is not None else 0)
            self._functions.refuse_large(self._bytes)
        elif self._is_first:
            per_row = rows.num_bytes / len(rows) if rows is not None else 0.0
            self._functions.refuse_large(collectives.all_max(per_row) * self._num_rows)


def _in_step(own: RankBatches, strategy: Strategy) -> Iterator[PreparedBatch]:
    def read() -> Iterator[PreparedBatch]:
        batches = own.read(strategy.rule)
        # The end of a stream is not known in advance: `iterate_in_step` checks that all processes still have a batch.
        return batches if own.num_rows is not None else collectives.iterate_in_step(batches)

    return batches_with_divergence(strategy, read)


def with_last(items: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Yields each item with whether it is the last one. One item is read in advance.

    Example:
        >>> list(with_last(iter("ab")))
        [('a', False), ('b', True)]
    """
    nothing: Any = object()
    item = next(items, nothing)
    while item is not nothing:
        following = next(items, nothing)
        yield item, following is nothing
        item = following
