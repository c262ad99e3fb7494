"""Inspection of checkpoints without torch: tensors of a safetensors file, progress, problems and contents.

Takes a folder; gives plain data for `fgcli ckpt`. No weights are read, except where every byte is verified
(`all_problems`). A damaged safetensors header is one located error; damaged JSON counts as empty.
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
    """Name, type and shape of a tensor in a safetensors file.

    Args:
        name: of the tensor in its file.
        dtype: in the notation of the format, such as "BF16".
        shape: of the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Size of the values, in bytes."""
        return self.numel * BITS.get(self.dtype, 0) // 8


def read_header(file: Path) -> tuple[list[TensorFact], dict[str, str]]:
    """Returns the tensors of a safetensors file, in the order of the file, and its metadata strings.

    Raises:
        CheckpointError: FG603 for a file that is not a safetensors file, FG604 for a missing one.
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
    """Progress of a run as its `trainer_state.json` has it.

    Args:
        step: optimizer steps that were done; -1 when unknown.
        max_steps: optimizer steps that the run was configured for.
        epoch: passes over the data.
        loss: of the last log entry that has one.
        loss_step: the step of that entry; -1 when unknown.
        metric: name and value of the metric that ranks checkpoints; None when this step was not evaluated.
        is_best: True when no earlier step had a better metric.
        greater_is_better: True when larger values of the metric are better.
        top_k: how many of the best checkpoints the run keeps.
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
    """One checkpoint of an output folder.

    Args:
        folder: of the checkpoint.
        origin: which run wrote it, and when.
        size: in bytes, from the manifest.
        progress: of its run.
        problem: why it is incomplete; None when the manifest and all file sizes are right.
        is_model_alone: True for a checkpoint that was saved with `save_only_model`, which cannot be resumed completely.
    """

    folder: Path
    origin: Origin
    size: int
    progress: Progress
    problem: CheckpointError | None
    is_model_alone: bool = False

    @property
    def step(self) -> int:
        """Number of optimizer steps that were done."""
        return step_of(self.folder)


@dataclass(frozen=True, slots=True)
class FolderSummary:
    """The checkpoints of an output folder.

    Args:
        folder: the output folder.
        checkpoints: from the oldest to the newest.
    """

    folder: Path
    checkpoints: tuple[CheckpointSummary, ...]

    @property
    def newest(self) -> CheckpointSummary | None:
        """The newest complete checkpoint, which `--resume auto` uses if its content is intact too; None without one."""
        return next((found for found in reversed(self.checkpoints) if found.problem is None), None)

    @property
    def best(self) -> CheckpointSummary | None:
        """The newest complete checkpoint that was the best so far when it was written; None without one."""
        known = [found for found in self.checkpoints if found.problem is None and found.progress.is_best]
        return known[-1] if known else None

    @property
    def best_steps(self) -> list[int]:
        """Steps of the best checkpoints, the best first; as many as the run of the newest checkpoint keeps."""
        newest = self.newest
        return [] if newest is None else self.ranked[: newest.progress.top_k]

    @property
    def ranked(self) -> list[int]:
        """Steps of the complete checkpoints that were evaluated, the best first."""
        # The direction of the newest run counts: an output folder may hold runs with other metrics.
        known = [found for found in self.checkpoints if found.problem is None and found.progress.metric]
        sign = -1.0 if known and known[-1].progress.greater_is_better else 1.0
        values = {found.step: sign * found.progress.metric[1] for found in known if found.progress.metric}
        ordered = sorted((step for step in values if not math.isnan(values[step])), key=lambda step: values[step])
        # The run's own record of the best comes first; sorting decides among the others only.
        best = [] if self.best is None else [self.best.step]
        return [*best, *(step for step in ordered if step not in best)]


def summarize_folder(output_dir: Path) -> FolderSummary:
    """Returns the checkpoints of an output folder with their progress and problems; weights are not read."""
    found = [_summary_of(folder, origin) for folder, origin in checkpoints_in_order(output_dir)]
    return FolderSummary(output_dir, tuple(_by_step_where_unknown(found)))


def _by_step_where_unknown(found: list[CheckpointSummary]) -> list[CheckpointSummary]:
    """Returns checkpoints in the order of writing; one without a readable manifest is put after the step before it."""
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
    """Returns the progress of a checkpoint's run; default values where its files do not have it."""
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
    """Returns the object in a JSON file; empty when the file cannot be read."""
    try:
        # Opening a pipe blocks until somebody writes into it.
        if not is_regular(file) or file.stat().st_size > _MAX_JSON_BYTES:
            return {}
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def all_problems(folder: Path) -> tuple[Manifest | None, list[CheckpointError]]:
    """Returns the manifest of a checkpoint (None when unreadable) and all problems; every byte is read."""
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
        manifest: step, versions, layout, files.
        origin: which run wrote it.
        progress: of the run.
        tensors: of each safetensors file.
        settings: of each parameter group of the optimizer, without the parameter names.
        num_parameters: number of parameter tensors in each group.
        position: in the data.
        classes: of optimizer and LR schedule.
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
        CheckpointError: as `read_manifest`; FG603 for a file of another size, FG604 for a missing one.
    """
    manifest = read_manifest(folder)
    for error in changed_files(folder, manifest, read=False):
        raise error
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
    """Returns a setting as it was before it became JSON: `write_state` marks tuples, such as Adam's betas."""
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
