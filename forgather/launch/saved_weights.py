"""Finds the weights that a past run has saved: one of its checkpoints, or the model that it saved at its end.

Takes a folder (of a run, of a checkpoint, or an output folder) and the word that names a checkpoint. Gives the run and
the folder of the weights. A checkpoint is verified as for resuming: every byte is compared with the manifest. Several
runs may share an output folder, so only checkpoints that the run has written are considered.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather.bounded import read_bytes
from forgather.errors import CheckpointError, ProjectError
from forgather.project.run_reader import PastRun, open_run, recorded_runs

_ML = "forgather.ml.checkpoint"
_MAX_BYTES = 64 << 20
_LISTED = 8
MODEL = "model"
"""The word for the model that a run saves at its end."""


@dataclass(frozen=True, kw_only=True)
class SavedWeights:
    """The weights that a run has saved.

    Args:
        run: the run.
        folder: the absolute path of the checkpoint, or of the output folder that contains the model.
        step: the number of optimizer steps of a checkpoint; None for the model.
        skipped: the messages about newer checkpoints that are not intact.
    """

    run: PastRun
    folder: str
    step: int | None
    skipped: tuple[str, ...] = ()

    @property
    def is_checkpoint(self) -> bool:
        """Whether the weights are those of a checkpoint."""
        return self.step is not None

    @property
    def digest(self) -> str:
        """The digest of the checkpoint's manifest, which has the digests of all files, or of the model's weight file.

        The weights of a model in several files have the digest of the index file, followed by those of the files.
        """
        digest_of_file = _ml("manifest").digest_of_file
        if self.is_checkpoint:
            return str(digest_of_file(Path(self.folder, _ml("manifest").MANIFEST)))
        return "+".join(digest_of_file(file) for file in _weight_files(self.folder))


def _ml(module: str) -> Any:
    return import_module(f"{_ML}.{module}")


def find_weights(folder: str, word: str | None) -> SavedWeights:
    """Returns the weights that a command line names.

    Args:
        folder: the folder of a run, the folder of a checkpoint, or an output folder with runs.
        word: the step of a checkpoint, "best", "last" or "model". None for the newest intact checkpoint, or for the
            model if the run has saved no checkpoint.

    Raises:
        ProjectError: FG437 or FG438 if there is no run that can be read; FG485 if there are no such weights.
        CheckpointError: FG601 to FG604 or FG607 if no checkpoint that fits is intact.
    """
    path = os.path.realpath(folder)
    word = "last" if word == "latest" else word
    if _is_checkpoint(path):
        if word is not None:
            raise ProjectError(
                f"two checkpoints are named: {folder!r}, and --checkpoint {word}",
                code="FG485",
                hint="leave one of them out",
            )
        output_dir = os.path.dirname(path)
        run = _writer(Path(path), _runs(output_dir, folder))
        _ml("manifest").verify(Path(path))
        return SavedWeights(run=run, folder=path, step=_ml("checkpoint_dir").step_of(Path(path)))
    opened = [] if os.path.isfile(os.path.join(path, "run.json")) else _opened(recorded_runs(path))
    if opened:
        # The run that wrote the checkpoint that was written last.
        written = [_writer(found.folder, opened) for found in _checkpoints(path)]
        return _chosen(written[-1] if written else opened[-1], opened, word)
    run = open_run(folder)
    return _chosen(run, _opened(recorded_runs(run.output_dir)) or [run], word)


def _is_checkpoint(path: str) -> bool:
    name = os.path.basename(path)
    return os.path.isdir(path) and name.startswith("checkpoint-") and name.removeprefix("checkpoint-").isdecimal()


def _runs(output_dir: str, named: str) -> list[PastRun]:
    runs = _opened(recorded_runs(output_dir))
    if not runs:
        raise ProjectError(
            f"no run is recorded next to the checkpoint {named!r}, so its model and data are not known",
            code="FG437",
            hint="'fgcli train' records each run in the folder 'runs' of its output folder",
        )
    return runs


def _opened(folders: Sequence[str]) -> list[PastRun]:
    """Returns the runs in some folders, without those whose record is damaged."""
    runs = []
    for folder in folders:
        with suppress(ProjectError):
            runs.append(open_run(folder))
    return runs


def _checkpoints(output_dir: str) -> Sequence[Any]:
    """Returns the summaries of the checkpoints in an output folder, oldest first."""
    return tuple(_ml("inspect").summarize_folder(Path(output_dir)).checkpoints)


def _writer(checkpoint: Path, runs: Sequence[PastRun]) -> PastRun:
    """Returns the run that wrote a checkpoint.

    Args:
        checkpoint: the folder of the checkpoint.
        runs: the recorded runs of the output folder, oldest first.
    """
    name = os.path.basename(os.path.normpath(str(_json(checkpoint, "training_args.json").get("logging_dir") or "-")))
    named = [run for run in runs if os.path.basename(run.folder) == name]
    if named:
        return named[0]
    # The config does not log into the run's folder: the last run that had begun when the checkpoint was written.
    written = _ml("lineage").origin_of(checkpoint).written
    begun = [run for run in runs if written and _start(run) <= written]
    return begun[-1] if begun else runs[-1]


def _start(run: PastRun) -> float:
    """Returns the time in the name of a run's folder, in seconds since 1970; 0 if the folder was renamed."""
    try:
        moment = datetime.strptime(os.path.basename(run.folder).split("-")[0], "%Y%m%dT%H%M%SZ")
    except ValueError:
        return 0.0
    return moment.replace(tzinfo=UTC).timestamp()


def _chosen(run: PastRun, runs: Sequence[PastRun], word: str | None) -> SavedWeights:
    every = _checkpoints(run.output_dir)
    own = [found for found in every if _writer(found.folder, runs).folder == run.folder]
    model = _own_model(run, runs)
    if word == MODEL or (word is None and not own and model is not None):
        if model is None:
            raise _unknown(run, "has saved no model", own, model)
        return SavedWeights(run=run, folder=model, step=None)
    if word in (None, "last"):
        return _newest(run, own, model)
    if word == "best":
        return _verified(run, _best(run, own, model))
    step = str(word).removeprefix("checkpoint-")
    found = next((one for one in own if str(one.step) == step), None)
    if found is None:
        other = next((one for one in every if str(one.step) == step), None)
        if other is not None:
            writer = os.path.basename(_writer(other.folder, runs).folder)
            raise _unknown(run, f"did not write {other.folder.name!r}, the run {writer!r} did", own, model)
        what = f"has no checkpoint of step {step}" if step.isdecimal() else f"has no checkpoint {word!r}"
        raise _unknown(run, what, own, model)
    return _verified(run, found)


def _newest(run: PastRun, own: Sequence[Any], model: str | None) -> SavedWeights:
    """Returns the newest intact checkpoint of a run."""
    skipped: list[CheckpointError] = []
    for found in reversed(own):
        try:
            _ml("manifest").verify(found.folder)
        except CheckpointError as error:
            skipped.append(error)
        else:
            messages = tuple(error.message for error in skipped)
            return SavedWeights(run=run, folder=str(found.folder), step=found.step, skipped=messages)
    if not skipped:
        raise _unknown(run, "has saved no checkpoint" + ("" if model else ", and no model"), own, model)
    raise CheckpointError(
        f"no checkpoint of the run {os.path.basename(run.folder)!r} is intact; of the newest, {skipped[0].message}",
        code="FG607",
        hint="evaluate the model that the run saved: --checkpoint model" if model else "restore one from a copy",
    )


def _verified(run: PastRun, found: Any) -> SavedWeights:
    _ml("manifest").verify(found.folder)
    return SavedWeights(run=run, folder=str(found.folder), step=found.step)


def _best(run: PastRun, own: Sequence[Any], model: str | None) -> Any:
    """Returns the checkpoint that the newest one names as the best so far."""
    steps = [_json(found.folder, "trainer_state.json").get("best_global_step") for found in own]
    step = next((step for step in reversed(steps) if isinstance(step, int) and step > 0), None)
    if step is None:
        raise _unknown(run, "does not know a best checkpoint: metric_for_best_model ranks them", own, model)
    found = next((one for one in own if one.step == step), None)
    if found is None:
        raise _unknown(run, f"was best at step {step}, and has no checkpoint of it", own, model)
    return found


def _unknown(run: PastRun, what: str, own: Sequence[Any], model: str | None) -> ProjectError:
    steps = [str(found.step) for found in own]
    shown = steps if len(steps) <= _LISTED else [steps[0], steps[1], "...", *steps[-3:]]
    there = [f"checkpoints of steps {', '.join(shown)}"] if steps else []
    there += ["the model of its end (--checkpoint model)"] if model else []
    return ProjectError(
        f"the run {os.path.basename(run.folder)!r} {what}",
        code="FG485",
        hint=f"it has {', and '.join(there)}" if there else "save_strategy: steps writes checkpoints",
    )


def _own_model(run: PastRun, runs: Sequence[PastRun]) -> str | None:
    """Returns the folder of the model that a run saved at its end; None if a later run has replaced it."""
    saved = [one for one in runs if "model" in (_json(Path(one.folder), "summary.json").get("places") or {})]
    if not _weight_files(run.output_dir):
        return None
    # A run without a summary does not tell whether it saved the model; the newest run of the folder then did.
    last = saved[-1] if saved else runs[-1]
    return run.output_dir if last.folder == run.folder else None


def _weight_files(folder: str) -> list[Path]:
    files = _ml("files")
    index = Path(folder, files.WEIGHTS_INDEX)
    single = [Path(folder, name) for name in (files.WEIGHTS, files.ADAPTER) if Path(folder, name).is_file()]
    if single or not index.is_file():
        return single
    return [index, *sorted(Path(folder).glob("model-*-of-*.safetensors"))]


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(str(folder / name), _MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
