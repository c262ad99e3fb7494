"""Checkpoints of a module: which one `ckpt_path` names, its hyper-parameters, and a module made from it.

A checkpoint is a folder in the layout of all our runs; the file `custom/module.json` in it has the class and the
hyper-parameters. Weights can also be read from a file that Lightning wrote.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from forgather.errors import CheckpointError
from forgather.lightning.hooks import unsupported
from forgather.ml.checkpoint.checkpoint_dir import list_checkpoints
from forgather.ml.checkpoint.lineage import checkpoints_in_order
from forgather.ml.checkpoint.manifest import MANIFEST, malformed_file, read_small_file, verify
from forgather.ml.checkpoint.pickled_tensors import read_pickled
from forgather.ml.checkpoint.reader import CheckpointReader
from forgather.ml.log import get_logger
from forgather.ml.trainer.resume import read_progress
from forgather.value_text import can_be_path, shown

_log = get_logger(__name__)
M = TypeVar("M", bound=nn.Module)
_FILE = "module.json"


def write_hyperparameters(model: nn.Module, step: int, path: Path) -> None:
    """Writes the class and the hyper-parameters of a module into a checkpoint; a `save_function` of our trainers.

    Args:
        model: the module.
        step: the step of the checkpoint, which is not used.
        path: the folder to make.
    """
    kept: dict[str, Any] = {}
    for name, value in dict(getattr(model, "hparams_initial", {})).items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            _log.warning("the hyper-parameter %r is no plain value: checkpoints do not store it", name)
            continue
        kept[name] = value
    path.mkdir()
    described = {"class": f"{type(model).__module__}:{type(model).__qualname__}", "hyper_parameters": kept}
    (path / _FILE).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def resume_folder(ckpt_path: Any, output_dir: str) -> Any:
    """Returns what `resume_from_checkpoint` is for a `ckpt_path`: None, true for the newest one, or a folder.

    Args:
        ckpt_path: None, "last", "best", or the folder of a checkpoint.
        output_dir: the folder of the run.

    Raises:
        TrainingError: FG865 if it is a file of Lightning.
        CheckpointError: FG601 if there is no best checkpoint.
    """
    if ckpt_path is None:
        return None
    if not can_be_path(ckpt_path):
        raise unsupported(f"ckpt_path={shown(ckpt_path)}", 'give "last", "best" or the folder of a checkpoint')
    if str(ckpt_path) == "last":
        return True
    if str(ckpt_path) == "best":
        return str(best_folder(output_dir))
    if str(ckpt_path) in ("hpc", "registry"):
        raise unsupported(f"ckpt_path={shown(ckpt_path, 300)}", 'give "last", "best" or the folder of a checkpoint')
    if Path(ckpt_path).is_file():
        raise unsupported(
            f"ckpt_path is the file {shown(str(ckpt_path), 300)}, and a run resumes from a folder of ours",
            "for its weights alone: model = MyModule.load_from_checkpoint(path), and fit without ckpt_path",
        )
    if not Path(ckpt_path).exists() and Path(ckpt_path).name.startswith(("last", "best")):
        word = Path(ckpt_path).name[:4]
        raise CheckpointError(
            f"there is no {shown(str(ckpt_path), 300)}",
            code="FG601",
            hint=f'give ckpt_path="{word}" for that of {output_dir}',
        )
    return os.fspath(inner_folder(Path(ckpt_path)))


def inner_folder(path: Path) -> Path:
    """Returns the checkpoint in a folder that `save_checkpoint` made, or the folder itself."""
    inside = [] if (path / MANIFEST).exists() else checkpoints_in_order(path)
    return inside[-1][0] if inside else path


def best_folder(output_dir: str) -> Path:
    """Returns the best checkpoint of a run: that which its newest checkpoint names.

    Raises:
        CheckpointError: FG601 if there is none.
    """
    for _, folder in reversed(list_checkpoints(Path(output_dir))):
        progress = read_progress(folder)
        best = None if progress is None else progress.best_model_checkpoint
        if best is not None and (found := folder.parent / Path(best).name).is_dir():
            return found
    raise CheckpointError(
        f"no checkpoint in {output_dir!r} is the best one",
        code="FG601",
        hint="give ModelCheckpoint a monitor, and log that metric in validation_step",
    )


def saved_paths(output_dir: str) -> tuple[str, str, float | None]:
    """Returns the best checkpoint of a run, its newest one, and the metric of the best one.

    Args:
        output_dir: the folder of the run.

    Returns:
        Two folders, "" for none, and the metric, or None. Without a metric, the newest checkpoint is the best one.
    """
    found = list_checkpoints(Path(output_dir))
    if not found:
        return "", "", None
    newest = found[-1][1]
    progress = read_progress(newest)
    if progress is None or progress.best_model_checkpoint is None:
        return str(newest), str(newest), None
    best = newest.parent / Path(progress.best_model_checkpoint).name
    return str(best if best.is_dir() else newest), str(newest), progress.best_metric


def load_weights(module: nn.Module, path: Path, *, strict: bool = True, map_location: Any = None) -> None:
    """Loads the weights of a checkpoint into a module in one process.

    Args:
        module: the module.
        path: the folder of a checkpoint, or a file that Lightning wrote.
        strict: whether the names must be the same.
        map_location: where the tensors of a file are read to.
    """
    weights = _weights(path, map_location)
    try:
        module.load_state_dict(weights, strict=strict)
    except (RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"the weights of {str(path)!r} do not fit {type(module).__name__}: {' '.join(str(error).split())[:300]}",
            code="FG605",
            hint="make the module with the hyper-parameters of that run, or give strict=False",
        ) from None


def _weights(path: Path, map_location: Any) -> dict[str, Any]:
    if path.is_file():
        found = read_pickled(path, map_location=map_location or "cpu").get("state_dict")
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise malformed_file(path, "it has no state_dict with names")
        return dict(found)
    folder = inner_folder(path)
    verify(folder)
    with CheckpointReader(folder) as saved:
        return {name: saved.whole(stored) for name, stored in saved.weights.items()} | dict(saved.extra)


def _existing(path: Any) -> Path:
    if not can_be_path(path) or not Path(path).exists():
        raise CheckpointError(
            f"there is no checkpoint {shown(path, 300)}",
            code="FG601",
            hint="give the folder of a checkpoint, or a file that Lightning wrote",
        )
    return Path(path)


def load_from_checkpoint(
    kind: type[M],
    checkpoint_path: str | os.PathLike[str],
    map_location: Any = None,
    *,
    strict: bool = True,
    **given: Any,
) -> M:
    """Returns a module of a class, built from the hyper-parameters of a checkpoint, with its weights.

    Args:
        kind: the class of the module.
        checkpoint_path: the folder of a checkpoint, or a file that Lightning wrote.
        map_location: the device of the weights; the CPU by default.
        strict: whether the names of all weights must be the same.
        **given: hyper-parameters that replace stored ones, or that a checkpoint cannot store.

    Raises:
        CheckpointError: FG601 to FG604 if it is not an intact checkpoint.
    """
    path = _existing(checkpoint_path)
    stored = {**_hyperparameters(path), **given}
    parameters = inspect.signature(kind.__init__).parameters
    if not any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        stored = {name: value for name, value in stored.items() if name in parameters}
    module = kind(**stored)
    load_weights(module, path, strict=strict, map_location=map_location)
    return module.to(map_location) if isinstance(map_location, str | torch.device) else module


def _hyperparameters(path: Path) -> Mapping[str, Any]:
    if path.is_file():
        found = read_pickled(path).get("hyper_parameters") or {}
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise malformed_file(path, "its hyper_parameters are no mapping with names")
        return found
    path = inner_folder(path)
    for file in (path / "custom" / _FILE, path / "custom" / "rank-0" / _FILE):
        if file.is_file():
            try:
                return dict(json.loads(read_small_file(file))["hyper_parameters"])
            except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
                raise malformed_file(file, f"{type(error).__name__}: {error!s:.80}") from None
    return {}
