"""Evaluates a trainer with weights that a past run has saved.

Takes a trainer that was built anew and the folder of a checkpoint or of a saved model; gives the metrics of the
evaluation sets and, if asked for, a JSON lines file with the predictions of each row. The trainer's callbacks are
removed first, so nothing is written into the folders of the past run.

Shapes:
    N rows, T positions, C classes or V words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from forgather.errors import CheckpointError, TrainingError, nearest
from forgather.ml.adapter_base import adapter_files, base_of, read_saved_adapter, refuse_checkpoint_of_another_base
from forgather.ml.checkpoint.averaged_weights import warn_of_average
from forgather.ml.checkpoint.files import REFERENCE_MODEL
from forgather.ml.checkpoint.manifest import MANIFEST, read_small_file
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.checkpoint.saved_model import read_saved_model
from forgather.ml.distributed import collectives
from forgather.ml.losses import is_causal_lm
from forgather.ml.metrics import as_json
from forgather.ml.trainer.checkpoint_parts import restoring
from forgather.ml.trainer.data_fingerprint import row_digest
from forgather.ml.trainer.metric_functions import MetricFunctions
from forgather.ml.trainer.predictions import PADDING
from forgather.ml.trainer.resume_checks import Meanings
from forgather.ml.trainer.snapshot import described_files
from forgather.ml.trainer.trainer import Trainer


def evaluate_saved(
    trainer: Any,
    folder: str,
    *,
    is_checkpoint: bool,
    only: str | None = None,
    is_renamed: bool = False,
    out: str | None = None,
) -> dict[str, Any]:
    """Returns the metrics of a trainer's evaluation sets with the weights of a folder.

    Collective: every process must call it.

    Args:
        trainer: the trainer.
        folder: the folder of a verified checkpoint, or of a saved model.
        is_checkpoint: whether the folder is that of a checkpoint.
        only: the name of the evaluation set; None for all sets.
        is_renamed: whether the set `only` has the rows of another file, so that its metrics do not get its name.
        out: the file for the predictions; None if they are not wanted.

    Returns:
        `metrics` as `Trainer.evaluate` returns them, the names of the `sets` ("" for a set without a name),
        `has_perplexity`, and the number of `predictions` that were written.

    Raises:
        TrainingError: FG488 if the object is not one of Forgather's trainers; FG486 if there is no such set; FG824 if
            there is no evaluation data; other errors of an evaluation.
        CheckpointError: FG605 if the weights do not fit the model; FG613 if the tokenizer or the model's settings are
            other ones; FG906 if the base model of an adapter is another one; FG950 if the loss compares the model with
            another reference than the run did.
    """
    if not isinstance(trainer, Trainer):
        raise not_evaluable(type(trainer).__name__)
    for callback in trainer.callbacks:
        trainer.remove_callback(callback)
    sets = _sets(trainer.eval_dataset, only)
    sets = {"": next(iter(sets.values()))} if is_renamed else sets
    described = collectives.run_collectively(
        lambda: described_files(trainer.model, trainer.processing_class) | adapter_files(trainer.model)
    )
    collectives.run_on_main(lambda: Meanings(described).refuse_other_model(Path(folder)))
    reference = trainer.score_with_reference(sets)
    collectives.run_on_main(lambda: _refuse_another_reference(Path(folder), reference, is_checkpoint=is_checkpoint))
    if is_checkpoint:
        collectives.run_on_main(lambda: warn_of_average(Path(folder)))
        collectives.run_collectively(lambda: refuse_checkpoint_of_another_base(Path(folder), trainer.strategy.model))
        with collectives.run_collectively(lambda: CheckpointReader(Path(folder), sections=_WEIGHTS)) as saved:
            trainer.strategy.restore(saved)
    else:
        read = read_saved_model if base_of(trainer.model) is None else read_saved_adapter
        with collectives.run_collectively(lambda: read(Path(folder), trainer.model)) as held:
            trainer.strategy.restore(held)
    generator = trainer.answer_generator
    if generator is not None and out is not None:
        generator.kept = []  # the answers from which the metrics are computed are those that are written
    metrics = trainer.evaluate(sets if set(sets) != {""} else sets[""])
    has_perplexity = bool(getattr(trainer.strategy.rule, "is_token_entropy", False))
    count = 0 if out is None else _write_predictions(trainer, sets, Path(out))
    return {"metrics": metrics, "sets": list(sets), "has_perplexity": has_perplexity, "predictions": count}


def _refuse_another_reference(folder: Path, reference: str | None, *, is_checkpoint: bool) -> None:
    """Raises an error if weights were trained with another reference than the rows of the evaluation have.

    Args:
        folder: the folder of a verified checkpoint, or of a saved model.
        reference: the digest of the reference; None if the loss has none, or the rows have log-probabilities already.
        is_checkpoint: whether the folder is that of a checkpoint.

    Raises:
        CheckpointError: FG950.
    """
    if reference is None:
        return
    file = folder / (MANIFEST if is_checkpoint else REFERENCE_MODEL)
    if not file.is_file():  # the rows of the run had their log-probabilities already
        return
    with restoring("reference", folder):
        facts = json.loads(read_small_file(file))
        found = facts["data"].get("reference") if is_checkpoint else row_digest(str(facts["digest"]))
    if found is not None and found != row_digest(reference):
        raise CheckpointError(
            "the run compared its model with another reference than this evaluation does: the model or the adapter "
            "from which the run began has changed",
            code="FG950",
            hint="bring back the folder that the config names as the beginning of the run",
        )


_WEIGHTS = ("model", "model_extra_state")


def not_evaluable(what: str) -> TrainingError:
    """Returns the FG488 error for an object that cannot be evaluated with the weights of a checkpoint.

    Args:
        what: the name of its class.
    """
    return TrainingError(
        f"'main' of the run is of type {what}, which 'fgcli eval' cannot evaluate",
        code="FG488",
        hint="it evaluates Trainer, AccelTrainer and PipelineTrainer of forgather.ml; for another one, evaluate the "
        "saved model in Python",
    )


def _sets(datasets: Any, only: str | None) -> dict[str, Any]:
    if datasets is None:
        raise TrainingError("the run has no eval_dataset", code="FG824", hint="give --data a file with rows")
    named = dict(datasets) if isinstance(datasets, Mapping) else {"": datasets}
    if only is None:
        return named
    if only not in named or not only:
        names = [name for name in named if name]
        raise TrainingError(
            f"the run has no evaluation set {only!r}",
            code="FG486",
            hint=(nearest(only, names) or f"one of: {', '.join(names)}")
            if names
            else "it has one set, which has no name: leave --data out, or give it a file",
        )
    return {only: named[only]}


def _write_predictions(trainer: Trainer, sets: Mapping[str, Any], out: Path) -> int:
    """Writes one line for each row of each set; returns the number of lines. Collective."""
    lines: list[dict[str, Any]] = []
    if trainer.answer_generator is not None:
        for name, answered in zip(sets, trainer.answer_generator.kept or (), strict=True):
            facts = {"set": name} if name else {}
            lines += [{**facts, **line} for line in answered.lines(trainer.processing_class)]
        return _written(lines, out)
    # Tokens instead of logits: the logits of a language model would not fit into memory.
    trainer.metric_functions = MetricFunctions(preprocess=_without_vocabulary)
    is_shifted = is_causal_lm(trainer.strategy.view)
    for name, rows in sets.items():
        found = trainer.predict(rows)
        facts = {"set": name} if name else {}
        of_rows = _of_tokens(found, trainer.strategy.view, shifted=is_shifted) or _of_rows(found, trainer.strategy.view)
        lines += [{**facts, "row": number, **line} for number, line in enumerate(of_rows)]
    return _written(lines, out)


def _written(lines: list[dict[str, Any]], out: Path) -> int:
    text = "".join(json.dumps(as_json(line), ensure_ascii=False) + "\n" for line in lines)
    collectives.run_on_main(lambda: out.write_text(text, encoding="utf-8"))
    return len(lines)


def _without_vocabulary(outputs: Any, labels: Any) -> Tensor:
    """Returns the logits of rows, or the most likely classes of positions.

    Shapes:
        outputs: (N, C), (N,) or (N, T, V), or a tuple with such logits first. Returns (N, C), (N,) or (N, T).
    """
    logits: Tensor = outputs[0] if isinstance(outputs, tuple | list) else outputs
    return logits.argmax(-1) if logits.ndim > 2 else logits


def _of_tokens(found: Any, model: Any, *, shifted: bool) -> list[dict[str, Any]]:
    """Returns the tokens or classes of each row at the positions that have labels; [] if rows have one prediction each.

    Args:
        found: the predictions of a set, as `Trainer.predict` returns them.
        model: the model; the classes of a model for token classification are written by their names.
        shifted: whether a position predicts the label of the next one.
    """
    predictions, labels = found.predictions, found.label_ids
    if predictions.dtype.kind not in "iu" or predictions.ndim != 2:
        return []
    config = getattr(model, "config", None)
    # The configuration of a language model has names too, which transformers invents.
    is_tags = str(getattr(model, "loss_type", "")).endswith("ForTokenClassification")
    names: Mapping[int, str] = (getattr(config, "id2label", None) or {}) if is_tags else {}

    def named(row: Any) -> list[Any]:
        return [_name(names, one) for one in row]

    if labels is None:
        return [{"predictions": named(row[row != PADDING])} for row in predictions]
    if shifted:
        predictions, labels = predictions[:, :-1], labels[:, 1:]
    return [
        {"labels": named(label[label != PADDING]), "predictions": named(row[label != PADDING])}
        for row, label in zip(predictions, labels, strict=True)
    ]


def _of_rows(found: Any, model: Any) -> list[dict[str, Any]]:
    """Returns the prediction, the scores and the label of each row.

    Args:
        found: the predictions of a set, as `Trainer.predict` returns them.
        model: the model, whose configuration has the names of the classes.
    """
    config = getattr(model, "config", None)
    names: Mapping[int, str] = getattr(config, "id2label", None) or {}
    scores, labels = np.asarray(found.predictions), found.label_ids
    labels = None if labels is None else np.asarray(labels)
    is_class = labels is not None and labels.ndim == 1 and labels.dtype.kind in "iu"
    kind = getattr(config, "problem_type", None) or ("single_label_classification" if is_class else None)
    lines = []
    for number, row in enumerate(scores):
        label = None if labels is None else labels[number]
        if kind == "single_label_classification" and row.ndim:
            line = {"prediction": _name(names, row.argmax()), "scores": row.tolist()}
            label = None if label is None else _name(names, label)
        elif kind == "multi_label_classification":
            line = {"prediction": [_name(names, one) for one in np.flatnonzero(row > 0)], "scores": row.tolist()}
            label = None if label is None else [_name(names, one) for one in np.flatnonzero(label)]
        else:
            line = {"prediction": row.item() if row.size == 1 else row.tolist()}
            label = None if label is None else label.item() if label.size == 1 else label.tolist()
        lines.append({**({} if label is None else {"label": label}), **line})
    return lines


def _name(names: Mapping[int, str], number: Any) -> Any:
    return names.get(int(number), int(number))
