"""Evaluates a past run: rebuilds its trainer from the record, loads saved weights, and evaluates without training.

Takes the weights that `saved_weights` has found and the data to evaluate; gives an `Evaluation` with the metrics, the
metrics that the run itself logged at the same step, and the facts that are stored with the run. The run's folders are
not written to: the rebuilt graph names a temporary output folder, and its training data are left out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.cache_file import Digests
from forgather.config.graph import Call, Scalar
from forgather.config.load import COMMAND_LINE
from forgather.errors import BuildNote, ForgatherError, ProjectError, nearest
from forgather.launch.in_process import MAIN, construct_main, plan_run
from forgather.launch.recorded_graph import building, recorded_project, unused_output_dir
from forgather.launch.saved_weights import SavedWeights
from forgather.project.eval_data import is_file_name, named_sets, rows_of_file
from forgather.project.project import Project
from forgather.project.trainer_arguments import keyword
from forgather.project.versions import installed_versions
from forgather.redaction import hidden
from forgather.source import Span

_TRAINERS = ("Trainer", "AccelTrainer", "PipelineTrainer")
_EVALUATE = "forgather.ml.trainer.saved_evaluation"
_MOST_FILES = 1000


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """An evaluation that has not been started yet.

    Args:
        weights: the weights to evaluate.
        project: the config that builds the trainer.
        data: the value of `--data`: the name of an evaluation set, or a file; None for all sets of the run.
        only: the name of the only set that is evaluated; None for all sets.
        output_dir: the output folder of the rebuilt trainer, which does not exist yet.
    """

    weights: SavedWeights
    project: Project
    data: str | None
    only: str | None
    output_dir: str

    @property
    def is_file(self) -> bool:
        """Whether the rows of a file are evaluated."""
        return self.data is not None and is_file_name(self.data)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The result of an evaluation.

    Args:
        metrics: the metrics, by their names with the prefix `eval_`.
        sets: the names of the evaluation sets; "" for a set without a name.
        has_perplexity: whether the exponential of the losses is a perplexity.
        predictions: the number of rows whose predictions were written.
        logged: the metrics that the run logged at the step of the checkpoint; empty if there are none.
    """

    metrics: Mapping[str, Any]
    sets: Sequence[str]
    has_perplexity: bool
    predictions: int
    logged: Mapping[str, Any]

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """The logged value and the value of now, for each metric that differs. Times are not compared."""
        now = import_module("forgather.ml.metrics").as_json(self.metrics)
        return {name: (value, now[name]) for name, value in self.logged.items() if now.get(name, value) != value}


def plan_evaluation(
    weights: SavedWeights,
    data: str | None,
    columns: Mapping[str, str] | None = None,
    generation: Mapping[str, int] | None = None,
) -> EvaluationPlan:
    """Returns the plan of an evaluation. Constructs nothing and writes nothing.

    Args:
        weights: the weights to evaluate.
        data: the name of an evaluation set, or a JSON lines or CSV file; None for all sets of the run.
        columns: the names of columns in the file, by what they hold; None for the names of the run's own file.
        generation: the settings of generation, by their names in the training arguments, with which answers are
            generated; None to generate them if the run did.

    Raises:
        ProjectError: FG486 if the run has no such set; FG487 if columns are named without a file, or if the file cannot
            be evaluated; FG488 if the run's `main` is not a trainer of Forgather.
        ForgatherError: if the recorded graph has an error.
    """
    run = weights.run
    graph = run.built
    main = graph.targets.get(MAIN)
    _refuse_other_main(main.value if main else None, run.folder)
    changes: list[tuple[str, str]] = []
    if main is not None and keyword(main.value, "train_dataset") is not None:
        # It is not needed, and may be large.
        changes.append((f"{MAIN}.train_dataset", "~"))
    if generation is not None:
        changes += _generating(main.value if main else None, generation)
    only: str | None = None
    if data is not None and is_file_name(data):
        rows = rows_of_file(graph, data, _label_names(weights.folder), columns)
        changes += rows.overrides
        only = rows.like
    elif columns:
        raise ProjectError(
            "columns are named, and no file", code="FG487", hint="--columns belongs to the file of --data FILE"
        )
    elif data is not None:
        only = _known_set(data, named_sets(graph))
    project = recorded_project(run, changes)
    return EvaluationPlan(weights=weights, project=project, data=data, only=only, output_dir=unused_output_dir())


def _generating(main: object, settings: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the overrides with which the trainer of a run generates answers."""
    args = keyword(main, "args") if isinstance(main, Call) else None
    given = {"predict_with_generate": "true", **{name: str(value) for name, value in settings.items()}}
    found: list[tuple[str, str]] = []
    for name, text in given.items():
        # A plus sign adds a setting that the run did not have.
        is_new = not isinstance(args, Call) or keyword(args, name) is None
        found.append((f"{'+' if is_new else ''}{MAIN}.args.{name}", text))
    generated = keyword(args, "predict_with_generate") if isinstance(args, Call) else None
    if isinstance(main, Call) and (not isinstance(generated, Scalar) or generated.value is not True):
        # The run's metrics are computed from the outputs of the model.
        names = ("compute_metrics", "preprocess_logits_for_metrics")
        found += [(f"{MAIN}.{name}", "~") for name in names if keyword(main, name) is not None]
    return found


def _refuse_other_main(main: object, folder: str) -> None:
    made = main.constructor if isinstance(main, Call) else "data"
    module, _, name = made.partition(":")
    # A class of the user may be a subclass of a trainer; what it is shows when it is built.
    if isinstance(main, Call) and (not module.startswith("forgather.") or name in _TRAINERS):
        return
    raise ProjectError(
        f"'main' of the run {os.path.basename(folder)!r} is {made}, which 'fgcli eval' cannot evaluate",
        code="FG488",
        span=getattr(main, "span", None),
        hint=f"it evaluates {', '.join(_TRAINERS)} of forgather.ml; evaluate the saved model in Python",
    )


def _known_set(name: str, names: Sequence[str]) -> str:
    if name in names:
        return name
    known = nearest(name, names) or f"one of: {', '.join(names)}"
    raise ProjectError(
        f"the run has no evaluation set {name!r}",
        code="FG486",
        hint=known if names else "its one set has no name: leave --data out, or give it a .jsonl or .csv file",
    )


def _label_names(folder: str) -> list[str] | None:
    """Returns the names of the classes in the configuration of a saved model; None if it has none."""
    try:
        with open(os.path.join(folder, "config.json"), encoding="utf-8") as stream:
            table = json.load(stream).get("id2label")
        return [str(table[number]) for number in sorted(table, key=int)] if table else None
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def evaluate(plan: EvaluationPlan, *, out: str | None = None, built: Any = None) -> Evaluation:
    """Builds the trainer, loads the weights, and evaluates. Collective: every process of the evaluation must call it.

    Args:
        plan: the plan.
        out: the file for the predictions of each row; None if they are not wanted.
        built: a function without arguments that is called when the trainer is built, or None.

    Raises:
        Exception: if the construction or the evaluation fails; the exception is raised unchanged.
    """
    run = plan.weights.run
    module = import_module(_EVALUATE)
    with _of_the_file(plan), building(run, plan.project):
        trainer = construct_main(plan_run(plan.project), plan.output_dir)
        if built is not None:
            built()
        found = module.evaluate_saved(
            trainer,
            plan.weights.folder,
            is_checkpoint=plan.weights.is_checkpoint,
            only=plan.only,
            is_renamed=plan.is_file,
            out=out,
        )
    logged = {} if plan.is_file else _logged(run.folder, plan.weights.step, found["metrics"])
    return Evaluation(**found, logged=logged)


@contextmanager
def _of_the_file(plan: EvaluationPlan) -> Iterator[None]:
    """Context manager in which an error about the rows of a file names `--data`, and not an override of our own."""
    try:
        yield
    except ForgatherError as error:
        notes = [note for note in getattr(error, "__notes__", ()) if isinstance(note, BuildNote)]
        place = error.span or (notes[0].span if notes else None)
        if plan.is_file and place is not None and place.file == COMMAND_LINE:
            error.span = Span("<option --data>", 1)
            if error.code == "FG831" and str(error.argument).endswith("_column"):
                name = str(error.argument).removesuffix("_column")
                error.hint = f"--columns {name}=COLUMN names the column; there are: {', '.join(error.expected)}"
        raise


def _logged(folder: str, step: int | None, names: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metrics that a run logged at a step, of those that can be repeated."""
    metrics = import_module("forgather.ml.metrics")
    file = Path(folder, metrics.METRICS_FILE)
    try:
        records = metrics.read_records(file, strict=False) if step is not None and file.is_file() else []
    except OSError:
        return {}
    own = [record for record in records if record.get("step") == step and any(name in record for name in names)]
    found = metrics.as_json(metrics.repeatable_metrics(own[-1])) if own else {}
    return {name: value for name, value in found.items() if name in names}


def store(plan: EvaluationPlan, found: Evaluation, *, command: Sequence[str], processes: int, now: datetime) -> str:
    """Writes the result into the folder of the run, as `eval-<time>.json`; returns the path of the file.

    Args:
        plan: the plan.
        found: the result.
        command: the words of the command line.
        processes: the number of processes.
        now: the time of the evaluation, in UTC.

    Raises:
        ProjectError: FG418 if the file cannot be written.
    """
    facts = {
        "data": {"sets": list(found.sets), **_file_facts(plan)},
        "processes": processes,
        "metrics": import_module("forgather.ml.metrics").as_json(found.metrics),
        "logged": dict(found.logged),
        "differs": sorted(found.differences),
    }
    return store_facts(plan.weights, facts, command=command, now=now)


def store_facts(weights: SavedWeights, facts: Mapping[str, Any], *, command: Sequence[str], now: datetime) -> str:
    """Writes the facts of an evaluation into the folder of the run, as `eval-<time>.json`; returns the file's path.

    Args:
        weights: the evaluated weights.
        facts: what was found.
        command: the words of the command line.
        now: the time of the evaluation, in UTC.

    Raises:
        ProjectError: FG418 if the file cannot be written.
    """
    checkpoint = {"folder": weights.folder, "step": weights.step, "is_model": not weights.is_checkpoint}
    whole = {
        "time": now.isoformat(timespec="seconds"),
        "command": list(command),
        "checkpoint": {**checkpoint, "xxh3": weights.digest},
        **facts,
        "versions": installed_versions(),
    }
    text = json.dumps(hidden(whole), indent=2, ensure_ascii=False) + "\n"
    stem = os.path.join(weights.run.folder, f"eval-{now:%Y%m%dT%H%M%SZ}")
    for number in range(_MOST_FILES):
        file = f"{stem}{f'-{number}' if number else ''}.json"
        try:
            with open(file, "x", encoding="utf-8") as stream:
                stream.write(text)
        except FileExistsError:
            continue
        except OSError as error:
            raise ProjectError(
                f"the result cannot be written to {file!r}: {error.strerror or error}",
                code="FG418",
                hint="make room there, or copy the run's folder to a place that can be written",
            ) from None
        return file
    raise ProjectError(f"{stem!r} has {_MOST_FILES} results already", code="FG418", hint="remove some of them")


def _file_facts(plan: EvaluationPlan) -> dict[str, Any]:
    if not plan.is_file:
        return {}
    return {"file": os.path.abspath(str(plan.data)), "digest": Digests()(str(plan.data))}
