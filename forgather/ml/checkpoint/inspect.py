"""Inspection of checkpoints without torch: tensors of a safetensors file, progress, problems and contents.

The functions return plain data for `fgcli ckpt`. Only `all_problems`, which verifies every byte, reads weights. A
damaged safetensors header is an error that names the file. A damaged JSON file is treated as empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgather.errors import CheckpointError
from forgather.ml.checkpoint.checkpoint_dir import step_of
from forgather.ml.checkpoint.files import (
    OPTIMIZER,
    RESUME_PARTS,
    TRAINER_STATE,
    TRAINING_ARGS,
    TRAINING_STATE,
    parts_in,
)
from forgather.ml.checkpoint.lineage import Origin, checkpoints_in_order, origin_of
from forgather.ml.checkpoint.manifest import (
    Manifest,
    changed_files,
    check_complete,
    corrupt_file,
    extra_files,
    is_regular,
    missing_file,
    read_manifest,
)

# Keyed by the names of the format, so that torch is not needed.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U8": 8, "U16": 16, "U32": 32, "U64": 64, "BOOL": 8, "C64": 64,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorFact:
    """The name, type and shape of a tensor in a safetensors file.

    Args:
        name: the name of the tensor in the file.
        dtype: the type of the values, in the notation of the safetensors format, such as "BF16".
        shape: the shape of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """The size of the values in bytes; 0 if the type is unknown."""
        return self.numel * BITS.get(self.dtype, 0) // 8


def read_header(file: Path) -> tuple[list[TensorFact], dict[str, str]]:
    """Returns descriptions of the tensors in a safetensors file, in the order of their data, and the metadata strings.

    Raises:
        CheckpointError: FG603 if the file is not a safetensors file; FG604 if it is missing.
    """
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            # The first eight bytes of any other file would be taken for a length, and that many bytes would be read.
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise corrupt_file(file, f"it is not a safetensors file (a header of {length} bytes)")
            header: dict[str, Any] = json.loads(stream.read(length))
        texts = header.pop("__metadata__", {})
        found = [(fact["data_offsets"], _fact(name, fact)) for name, fact in header.items()]
        # By offset: the order of the names in a header is arbitrary. Empty tensors share an offset, so the name
        # decides.
        ordered = [fact for _, fact in sorted(found, key=lambda item: (item[0], item[1].name))]
        return ordered, {str(name): str(text) for name, text in texts.items()}
    except FileNotFoundError:
        raise missing_file(file) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise corrupt_file(file, f"it is not a safetensors file ({type(error).__name__})") from None


def _fact(name: str, fact: dict[str, Any]) -> TensorFact:
    shape = tuple(fact["shape"])
    # A shape with a float or a negative number would give nonsense sizes.
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"no shape: {shape}")
    return TensorFact(name, str(fact["dtype"]), shape)


_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run at a checkpoint, read from its trainer state and training arguments.

    Args:
        step: the number of optimizer steps that were done; -1 if it is unknown.
        max_steps: the number of optimizer steps for which the run was configured.
        epoch: the number of passes over the data, which may be a fraction.
        loss: the loss in the last log line that contains a loss; None if there is none.
        loss_step: the step of that log line; -1 if it is unknown.
        metric: the name and value of the metric that ranks checkpoints; None if this step was not evaluated.
        is_best: whether the metric was the best of the run so far.
        greater_is_better: whether larger values of the metric are better.
        top_k: the number of best checkpoints that the run keeps.
    """

    step: int = -1
    max_steps: int = 0
    epoch: float = math.nan
    loss: float | None = None
    loss_step: int = -1
    metric: tuple[str, float] | None = None
    is_best: bool = False
    greater_is_better: bool = False
    top_k: int = 1


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """The summary of one checkpoint in an output folder.

    Args:
        folder: the folder of the checkpoint.
        origin: the run that wrote the checkpoint, and the time.
        size: the size of all files in bytes, according to the manifest.
        progress: the progress of the run at the checkpoint.
        problem: the first error that was found; None if the manifest and all file sizes are right.
        is_model_alone: whether the checkpoint was saved with `save_only_model`, so that a run cannot resume completely.
    """

    folder: Path
    origin: Origin
    size: int
    progress: Progress
    problem: CheckpointError | None
    is_model_alone: bool = False

    @property
    def step(self) -> int:
        """The number of optimizer steps that were done, according to the name of the folder."""
        return step_of(self.folder)


@dataclass(frozen=True, slots=True)
class FolderSummary:
    """The summaries of all checkpoints in an output folder.

    Args:
        folder: the output folder.
        checkpoints: the summaries of the checkpoints, from the oldest to the newest.
    """

    folder: Path
    checkpoints: tuple[CheckpointSummary, ...]

    @property
    def newest(self) -> CheckpointSummary | None:
        """The newest complete checkpoint; None if there is none. `--resume auto` uses it if its content is intact."""
        return next((found for found in reversed(self.checkpoints) if found.problem is None), None)

    @property
    def best(self) -> CheckpointSummary | None:
        """The newest complete checkpoint that was the best so far when it was written; None if there is none."""
        known = [found for found in self.checkpoints if found.problem is None and found.progress.is_best]
        return known[-1] if known else None

    @property
    def best_steps(self) -> list[int]:
        """The steps of the best checkpoints, best first: as many as the run of the newest checkpoint keeps."""
        newest = self.newest
        return [] if newest is None else self.ranked[: newest.progress.top_k]

    @property
    def ranked(self) -> list[int]:
        """The steps of the complete checkpoints that were evaluated, best first."""
        # The direction of the newest run counts: an output folder may hold runs with other metrics.
        known = [found for found in self.checkpoints if found.problem is None and found.progress.metric]
        sign = -1.0 if known and known[-1].progress.greater_is_better else 1.0
        values = {found.step: sign * found.progress.metric[1] for found in known if found.progress.metric}
        ordered = sorted((step for step in values if not math.isnan(values[step])), key=lambda step: values[step])
        # The run's own record of the best comes first; sorting decides among the others only.
        best = [] if self.best is None else [self.best.step]
        return [*best, *(step for step in ordered if step not in best)]


def summarize_folder(output_dir: Path) -> FolderSummary:
    """Returns the summaries of all checkpoints in an output folder; weights are not read."""
    found = [_summary_of(folder, origin) for folder, origin in checkpoints_in_order(output_dir)]
    return FolderSummary(output_dir, tuple(_by_step_where_unknown(found)))


def _by_step_where_unknown(found: list[CheckpointSummary]) -> list[CheckpointSummary]:
    """Returns the checkpoints in the order in which they were written.

    The position of a checkpoint without a readable manifest is unknown. It is placed after the last of the other
    checkpoints with a smaller step.
    """
    # Their place in the order of writing is unknown; the step in the folder name is the best estimate.
    lost = [one for one in found if one.problem is not None and one.origin == Origin()]
    ordered = [one for one in found if one not in lost]
    for one in lost:
        place = max((number for number, other in enumerate(ordered, 1) if other.step < one.step), default=0)
        ordered.insert(place, one)
    return ordered


def _summary_of(folder: Path, origin: Origin) -> CheckpointSummary:
    problem: CheckpointError | None = None
    size, is_model_alone = 0, False
    try:
        manifest = read_manifest(folder)
        size = manifest.size
        # No part next to the weights is listed at all. A single missing file is an incomplete checkpoint instead.
        is_model_alone = not any(set(parts_in(name)) & set(RESUME_PARTS) for name in manifest.files)
        problem = next(changed_files(folder, manifest, read=False), None)
    except CheckpointError as error:
        problem = error
    return CheckpointSummary(folder, origin, size, progress_of(folder), problem, is_model_alone)


def progress_of(folder: Path) -> Progress:
    """Returns the progress of the run at a checkpoint; a value that the files do not contain has its default."""
    state, args = _json(folder / TRAINER_STATE), _json(folder / TRAINING_ARGS)
    # Every value is checked for its type: the file is meant for people, who may have edited it.
    step = said if isinstance(said := state.get("global_step"), int) else -1
    name = args.get("metric_for_best_model")
    # transformers' argument accepts the metric with and without this prefix; the log has it with the prefix.
    name = name if name is None or str(name).startswith("eval_") else f"eval_{name}"
    loss, loss_step = None, -1
    value: float | None = None
    lines = state.get("log_history")
    # From the end: the last loss, and of a step that was evaluated several times the last metric.
    for line in reversed(lines if isinstance(lines, list) else []):
        if not isinstance(line, dict):
            continue
        if loss is None and _is_number(line.get("loss")):
            loss, loss_step = line["loss"], said if isinstance(said := line.get("step"), int) else -1
        if name is not None and value is None and line.get("step") == step and _is_number(line.get(name)):
            value = line[name]
        if loss is not None and (name is None or value is not None or line.get("step") != step):
            break
    return Progress(
        step=step,
        max_steps=said if isinstance(said := state.get("max_steps"), int) else 0,
        epoch=epoch if isinstance(epoch := state.get("epoch"), int | float) else 0.0,
        loss=loss,
        loss_step=loss_step,
        metric=None if name is None or value is None else (name, value),
        is_best=step > 0 and state.get("best_global_step") == step,
        greater_is_better=args.get("greater_is_better") is True,
        top_k=max(1, top_k) if isinstance(top_k := args.get("save_top_k"), int) else 1,
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json(file: Path) -> dict[str, Any]:
    """Returns the object that is stored in a JSON file; an empty one if the file cannot be read."""
    try:
        # Opening a pipe blocks until somebody writes into it.
        if not is_regular(file) or file.stat().st_size > _MAX_JSON_BYTES:
            return {}
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def all_problems(folder: Path) -> tuple[Manifest | None, list[CheckpointError]]:
    """Verifies every byte of a checkpoint; returns the manifest, or None if it cannot be read, and all problems."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return None, [error]
    extra = [
        CheckpointError(
            f"{str(folder / name)!r} is not part of the checkpoint: its manifest does not list it",
            code="FG673",
            hint="move it elsewhere; a resumed run does not read it",
            found=name,
        )
        for name in extra_files(folder, manifest)
    ]
    return manifest, [*changed_files(folder, manifest), *extra]


@dataclass(frozen=True, slots=True)
class Contents:
    """The description of a checkpoint for `fgcli ckpt show`.

    Args:
        manifest: the manifest, which contains the step, versions, the parallel layout and the list of files.
        origin: the run that wrote the checkpoint, and the time.
        progress: the progress of the run at the checkpoint.
        tensors: the descriptions of the tensors in each safetensors file, by file name.
        settings: the settings of each parameter group of the optimizer, without the parameter names.
        num_parameters: the number of parameter tensors in each parameter group.
        position: the position in the training data.
        classes: the class names of the optimizer and the learning rate schedule.
        arguments: the training arguments.
    """

    manifest: Manifest
    origin: Origin
    progress: Progress
    tensors: Mapping[str, list[TensorFact]]
    settings: list[dict[str, Any]] = field(default_factory=list)
    num_parameters: list[int] = field(default_factory=list)
    position: Mapping[str, Any] = field(default_factory=dict)
    classes: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)


def contents(folder: Path) -> Contents:
    """Returns the description of a checkpoint.

    Raises:
        CheckpointError: the errors of `read_manifest`; FG603 if a file has another size than the manifest says; FG604
            if a file is missing.
    """
    manifest = check_complete(folder)
    tensors = {name: read_header(folder / name)[0] for name in manifest.files if name.endswith(".safetensors")}
    # The JSON files are read without the tensors next to them: `write_state` marks where a tensor would be.
    optimizer, training = _json(folder / f"{OPTIMIZER}.json"), _json(folder / f"{TRAINING_STATE}.json")
    groups = [group for group in _listed(optimizer, "param_groups") if isinstance(group, dict)]
    return Contents(
        manifest,
        origin_of(folder),
        progress_of(folder),
        tensors,
        settings=[{name: _plain(value) for name, value in group.items() if name != "params"} for group in groups],
        num_parameters=[len(_listed(group, "params")) for group in groups],
        position={name: value for name, value in _table(training, "data").items() if _is_shown(value)},
        classes=_table(training, "classes"),
        arguments=_json(folder / TRAINING_ARGS),
    )


def _plain(value: Any) -> Any:
    """Returns a setting of the optimizer; an object {"$tuple": [...]}, as `write_state` writes it, becomes a tuple."""
    is_tuple = isinstance(value, dict) and list(value) == ["$tuple"] and isinstance(value["$tuple"], list)
    return tuple(value["$tuple"]) if is_tuple else value


def _is_shown(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _listed(tree: Mapping[str, Any], name: str) -> list[Any]:
    found = tree.get(name)
    return found if isinstance(found, list) else []


def _table(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, dict) else {}
