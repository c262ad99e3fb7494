"""Finds a trained model and loads it for generation: `fgcli generate`, `chat` and `serve`.

Takes the folder of a run, of a checkpoint or of a saved model, and the word that names a checkpoint; gives the folder
that is loaded, with the run that wrote it if there is a record. The model is built from the files in the folder. Only
if these do not say enough (a class of the user, a base model without a name) is the model of the record built, which
runs the code that the config names: the caller is asked to allow that first.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.config.graph import Call, Graph, is_null
from forgather.config.traverse import roots, walk
from forgather.errors import ForgatherError, ProjectError
from forgather.launch.recorded_graph import USUAL_SEED, building, recorded_project
from forgather.launch.saved_weights import MODEL, find_weights
from forgather.project.data_targets import with_targets
from forgather.project.literal import plain_value
from forgather.project.path_display import near_path
from forgather.project.project import Project
from forgather.project.run_facts import is_run_folder
from forgather.project.run_reader import PastRun, recorded_runs
from forgather.project.trainer_arguments import keyword, model_of_main, trainer_arguments

_LOADING = "forgather.ml.generation.loading"
_MODEL_FILES = ("config.json", "adapter_config.json")
_QUANTIZES = ("quantization_config", "load_in_4bit", "load_in_8bit")
Allow = Callable[[Project, str], None]
"""A function that gets a project and a target, and raises an error if the code that the target needs may not run."""


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A folder with a model.

    Args:
        folder: the absolute folder of a verified checkpoint, or of a saved model.
        step: the step of a checkpoint; None for a saved model.
        run: the run that wrote it; None if there is no record.
        notes: what a user should know about the choice.
    """

    folder: str
    step: int | None = None
    run: PastRun | None = None
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A short name: that of the output folder, which is the same for all checkpoints."""
        return os.path.basename(self.folder if self.step is None else os.path.dirname(self.folder))

    def described(self) -> list[str]:
        """Returns the lines that say which model is loaded."""
        what = f"step {self.step}, intact" if self.step is not None else "a saved model"
        lines = [f"run         {shlex.quote(near_path(self.run.folder))}"] if self.run is not None else []
        return [*lines, f"model       {shlex.quote(near_path(self.folder))}  ({what})", *self.notes]


def find_model(folder: str, word: str | None) -> TrainedModel:
    """Returns the model that a command line names.

    Args:
        folder: the folder of a run, of a checkpoint or of a saved model, or an output folder with runs.
        word: the step of a checkpoint, "best", "last" (or "latest") or "model". None for the checkpoint itself, the
            newest intact checkpoint of a run, or the saved model if there is no checkpoint.

    Raises:
        ProjectError: FG437 or FG438 if there is neither a model nor a run that can be read; FG485 if there are no such
            weights.
        CheckpointError: FG601 to FG604 or FG607 if no checkpoint that fits is intact.
    """
    path = os.path.realpath(folder)
    is_checkpoint = _step_in(path) is not None
    if is_run_folder(path) or recorded_runs(os.path.dirname(path) if is_checkpoint else path):
        found = find_weights(folder, word)
        skipped = tuple(f"skipped a checkpoint: {message}" for message in found.skipped)
        return TrainedModel(folder=found.folder, step=found.step, run=found.run, notes=skipped)
    if not any(os.path.isfile(os.path.join(path, name)) for name in _MODEL_FILES):
        find_weights(folder, word)  # the error for a folder without a run
    if word is not None and (word != MODEL or is_checkpoint):
        raise ProjectError(
            f"{folder!r} is a model without the record of a run, so it has no checkpoint {word!r}",
            code="FG485",
            hint="leave out --checkpoint, or name the folder of the checkpoint itself",
        )
    if is_checkpoint:
        import_module("forgather.ml.checkpoint.manifest").verify(Path(path))
    return TrainedModel(folder=path, step=_step_in(path))


def _step_in(path: str) -> int | None:
    step = os.path.basename(path).removeprefix("checkpoint-")
    return int(step) if step != os.path.basename(path) and step.isdecimal() else None


def load_model(trained: TrainedModel, *, merged: bool, allow: Allow) -> Any:
    """Returns the loaded model, see `forgather.ml.generation.loading`.

    Args:
        trained: the model that was found.
        merged: whether an adapter is merged into its base model.
        allow: a function that raises an error if the code of the project may not run.

    Raises:
        ForgatherError: if the model cannot be loaded, or if code that it needs may not run.
    """
    loading = import_module(_LOADING)
    run = trained.run
    source = {
        "folder": Path(trained.folder),
        "is_checkpoint": trained.step is not None,
        "merged": merged,
        "near": () if run is None else (Path(run.project_dir),),
    }
    if run is None:
        return loading.load_for_generation(loading.Source(**source))
    if not _is_quantized(run.built) or not loading.Source(**source).has_adapter:
        try:
            return loading.load_for_generation(loading.Source(**source))
        except loading.RecordNeeded as error:
            if model_of_main(run.built) is None:
                raise error from None
    # An adapter of a quantized model has another effect on weights that are not quantized.
    return loading.load_for_generation(loading.Source(**source, build=lambda: _built(run, allow)))


def _built(run: PastRun, allow: Allow) -> Any:
    """Returns the model as the run built it, without the trainer's adapter and without trained weights."""
    project = recorded_project(run)
    found = model_of_main(project.graph)
    assert found is not None  # noqa: S101 - the recorded graph has one
    argument, node = found
    arguments = trainer_arguments(project.graph)
    seed = arguments.plain("seed") if arguments else None
    project.graph, names = with_targets(project.graph, {"the model": node})
    target = names["the model"]
    allow(project, target)
    make = import_module("forgather.ml.trainer.model_setup").make_model
    with building(run, project):
        built = project(target)
        given = (built, None) if argument == "model" else (None, built)
        return make(*given, seed if isinstance(seed, int) else USUAL_SEED)


def _is_quantized(graph: Graph) -> bool:
    found = model_of_main(graph)
    below = walk([((), found[1])]) if found else ()
    return any(
        (value := keyword(node, name)) is not None and not is_null(value) for _, node in below for name in _QUANTIZES
    )


@dataclass(frozen=True, kw_only=True)
class TrainedConversations:
    """What a run put into each conversation or source that it trained on, besides the rows.

    Args:
        system: the system message of conversations that had none; None for no such message.
        options: further variables of the chat template.
        source_prefix: the text before each source of a model with an encoder.
        max_source_length: the number of tokens to which sources were cut; None if it is not known.
    """

    system: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    source_prefix: str = ""
    max_source_length: int | None = None


def trained_conversations(run: PastRun | None) -> TrainedConversations:
    """Returns what a run put into each conversation or source, as far as its record says it in plain data.

    Args:
        run: the run; None for a model without a record.
    """
    if run is None:
        return TrainedConversations()
    system = _setting(run.built, (":chats", ":as_chats"), "system")
    options = _setting(run.built, (":tokenize_chats",), "template_options")
    prefix = _setting(run.built, (":tokenize_seq2seq",), "source_prefix")
    longest = _setting(run.built, (":tokenize_seq2seq",), "max_source_length")
    return TrainedConversations(
        system=system if isinstance(system, str) and system else None,
        options={str(name): value for name, value in options.items()} if isinstance(options, dict) else {},
        source_prefix=prefix if isinstance(prefix, str) else "",
        max_source_length=longest if isinstance(longest, int) else None,
    )


def _setting(graph: Graph, constructors: tuple[str, ...], name: str) -> object:
    for _, node in walk(roots(graph)):
        if isinstance(node, Call) and node.constructor.endswith(constructors):
            value = keyword(node, name)
            try:
                found = None if value is None else plain_value(value, name)
            except ForgatherError:
                continue
            if found is not None:
                return found
    return None
