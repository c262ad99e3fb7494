"""Checkpoints of a training loop of the user's own: weights, optimizer, schedule and random numbers.

`LoopCheckpoints` writes a folder `checkpoint-<step>` that is complete or invisible, as the trainers do, and reads it
back. Sharded weights are gathered by torch, so that a checkpoint does not depend on the number of processes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from forgather.errors import CheckpointError, TrainingError
from forgather.ml.checkpoint.checkpoint_dir import (
    Draft,
    begin_draft,
    checkpoint_write_errors,
    discard_draft,
    finish_draft,
)
from forgather.ml.checkpoint.lineage import new_run, next_origin
from forgather.ml.checkpoint.manifest import FileFact, verify
from forgather.ml.checkpoint.retention import Retention, prune
from forgather.ml.checkpoint.rng import capture_rng, restore_rng
from forgather.ml.checkpoint.state import read_state, write_state
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.distributed import collectives
from forgather.ml.log import get_logger
from forgather.ml.trainer.save_function import SaveFunction, Scratch, run_save_function

_log = get_logger(__name__)
STATE = "loop_state"
"""The stem of the files with the state of a loop."""
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_CHUNK_BYTES = 1 << 24


class LoopCheckpoints:
    """Writes and reads the checkpoints of a training loop.

    Args:
        save_dir: the folder of the checkpoints.
        keep: the number of checkpoints of this loop that are kept; None keeps all.
        in_background: whether files are written in a thread. The state is copied to host memory before.
        save_function: a function of (engine, step, path) whose files become part of each checkpoint, or None.
    """

    def __init__(
        self, save_dir: Path, *, keep: int | None, in_background: bool, save_function: SaveFunction | None
    ) -> None:
        self._save_dir = save_dir
        self._retention = Retention(last=keep)
        self._in_background = in_background
        self._save_function = save_function
        self._run_id = new_run()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, engine: Any, step: int, optimizer: Any, lr_scheduler: Any) -> Path:
        """Writes a checkpoint, and returns its folder. Collective: every process must call it.

        Args:
            engine: the module, possibly inside of DDP or sharded by FSDP2, or a trainer of a script.
            step: the number of optimizer steps that were done.
            optimizer: the optimizer, or None.
            lr_scheduler: the learning rate schedule, or None.

        Raises:
            CheckpointError: FG609 if a file cannot be written, FG631 if `save_function` fails.
            TrainingError: FG811 if the engine cannot be saved in this way.
        """
        self.wait()
        module = module_of(engine)
        tree = _state_of(module, step, optimizer, lr_scheduler)
        scratch = None if self._save_function is None else run_save_function(self._save_function, engine, step)
        folder = self._save_dir / f"checkpoint-{step}"
        if self._in_background and not collectives.is_multi_process():
            tree = _copied(tree)
            self._thread = threading.Thread(target=self._write_quietly, args=(step, tree, scratch), daemon=False)
            self._thread.start()
        else:
            self._write(step, tree, scratch)
        return folder

    def wait(self) -> None:
        """Waits until the checkpoint of the background is written.

        Raises:
            CheckpointError: FG609 if it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def load(self, folder: Path, engine: Any, optimizer: Any, lr_scheduler: Any) -> int:
        """Restores what `save` has written, and returns the step. Collective: every process must call it.

        Args:
            folder: the folder of the checkpoint.
            engine: what was given to `save`, before its first step.
            optimizer: the optimizer, or None to leave it as it is.
            lr_scheduler: the schedule, or None to leave it as it is.

        Raises:
            CheckpointError: FG601 to FG604 if the folder is no intact checkpoint; FG605 if it does not fit.
        """
        self.wait()
        collectives.run_on_main(functools.partial(verify, folder))
        if not (folder / f"{STATE}.json").is_file():
            raise CheckpointError(
                f"{str(folder)!r} was not written by CheckpointManager",
                code="FG605",
                hint="a checkpoint of a trainer is read by DistributedTrainer.restore_from_checkpoint()",
            )
        tree = collectives.run_collectively(functools.partial(read_state, folder, STATE))
        _restore(module_of(engine), tree, optimizer, lr_scheduler, folder)
        return int(tree["step"])

    def _write_quietly(self, step: int, tree: Any, scratch: Scratch | None) -> None:
        try:
            self._write(step, tree, scratch)
        except Exception as error:  # noqa: BLE001 - worker top: `wait` raises it in the caller's thread
            self._error = error
            # A script may end without another call that would raise it.
            _log.error("the checkpoint of step %d is not written: %s", step, error)

    def _write(self, step: int, tree: Any, scratch: Scratch | None) -> None:
        storage = LocalStorage()
        begin = functools.partial(begin_draft, storage, self._save_dir, step)
        try:
            with checkpoint_write_errors(self._save_dir, step):
                draft = Draft(storage, collectives.run_on_main(lambda: begin().folder))
            try:
                parts = collectives.run_and_gather(functools.partial(self._fill, draft, step, tree, scratch))
                files = {name: fact for part in parts for name, fact in part.items()}
                collectives.run_on_main(functools.partial(self._finish, draft, step, files))
            finally:
                collectives.run_on_main(functools.partial(discard_draft, draft))
        finally:
            if scratch is not None:
                scratch.remove()

    def _fill(self, draft: Draft, step: int, tree: Any, scratch: Scratch | None) -> dict[str, FileFact]:
        with checkpoint_write_errors(self._save_dir, step):
            if collectives.rank() == 0:
                write_state(draft, STATE, tree)
            for name, file in (scratch.files if scratch is not None else {}).items():
                draft.write(name, _chunks(file))
        return draft.files

    def _finish(self, draft: Draft, step: int, files: dict[str, FileFact]) -> None:
        facts = {"run": next_origin(self._save_dir, self._run_id, step)}
        with checkpoint_write_errors(self._save_dir, step):
            folder = finish_draft(draft.storage, draft.folder, step, files, facts)
        prune(self._save_dir, self._retention, newest=folder, run=self._run_id)


def module_of(engine: Any) -> nn.Module:
    """Returns the module of an engine, without a wrapper for several processes.

    Raises:
        TrainingError: FG811 if the engine is one of DeepSpeed, which writes its own checkpoints, or no module.
    """
    if any(kind.__module__.split(".")[0] == "deepspeed" for kind in type(engine).__mro__):
        raise TrainingError(
            "CheckpointManager does not save a DeepSpeed engine, whose optimizer is in slices",
            code="FG811",
            hint="call engine.save_checkpoint(save_dir), or train with DistributedTrainer, which saves it",
        ).about("engine")
    module = engine if isinstance(engine, nn.Module) else getattr(engine, "model", None)
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if not isinstance(module, nn.Module):
        raise TrainingError(
            f"engine is a {type(engine).__name__}, which has no module", code="FG811", hint="give a torch.nn.Module"
        ).about("engine")
    return module


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def _state_of(module: nn.Module, step: int, optimizer: Any, lr_scheduler: Any) -> dict[str, Any]:
    if _is_sharded(module):
        model, of_optimizer = get_state_dict(module, [] if optimizer is None else optimizer, options=_WHOLE)
    else:
        model, of_optimizer = module.state_dict(), {} if optimizer is None else optimizer.state_dict()
    return {
        "step": step,
        "model": dict(model),
        "optimizer": None if optimizer is None else of_optimizer,
        "lr_scheduler": None if lr_scheduler is None else lr_scheduler.state_dict(),
        "rng": collectives.all_gather(capture_rng()),
    }


def _restore(module: nn.Module, tree: Any, optimizer: Any, lr_scheduler: Any, folder: Path) -> None:
    for name, part in (("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
        if (part is None) != (tree[name] is None):
            has = "no" if tree[name] is None else "an"
            raise CheckpointError(
                f"{str(folder)!r} has {has} {name}, and load() was given {'none' if part is None else 'one'}",
                code="FG605",
                hint="give load() what save() was given",
            )
    try:
        if _is_sharded(module):
            set_state_dict(
                module,
                [] if optimizer is None else optimizer,
                model_state_dict=tree["model"],
                optim_state_dict=tree["optimizer"] or {},
                options=StateDictOptions(full_state_dict=True),
            )
        else:
            module.load_state_dict(tree["model"])
            if optimizer is not None:
                optimizer.load_state_dict(tree["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{str(folder)!r} does not fit {type(module).__name__}: {error!s:.300}",
            code="FG605",
            hint="make the model and the optimizer as for the save",
        ) from error
    if lr_scheduler is not None:
        lr_scheduler.load_state_dict(tree["lr_scheduler"])
    if len(tree["rng"]) == collectives.size():
        restore_rng(tree["rng"][collectives.rank()])
    else:
        _log.warning(
            "%s has the random numbers of %d processes, and there are %d: they go on with their own",
            folder,
            len(tree["rng"]),
            collectives.size(),
        )


def _copied(tree: Any) -> Any:
    """Returns a state tree whose tensors are copies on the host: the loop changes them while they are written."""
    if isinstance(tree, Tensor):
        return tree.detach().to("cpu", copy=True)
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_copied(value) for value in tree)
    return tree


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            yield chunk
