"""The job that is disturbed: nine steps of a tiny model with three saves, and what must be the same in the end.

Takes an output folder, a kind of saving and a storage; gives a digest of everything that the run left: each tensor,
optimizer, schedule, random states, position, losses. Keeps true: the data draw from all sources of randomness and the
model has dropout, so that a resume that loses any of them is seen; what a clock or a path says is left out.
"""

import hashlib
import json
import random
import re

import numpy as np
import torch

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.checkpoint import newest_verified
from forgather.ml.checkpoint.checkpoint_dir import checkpoint_folder
from forgather.ml.checkpoint.manifest import verify
from forgather.ml.checkpoint.state import read_tensors
from tests.ml.fixtures import Regression, regression_rows

STEPS = 9
# The loss falls from save to save: the best is to be the first one, so that it is none of those that stay anyhow.
_BY_EVAL = {"metric_for_best_model": "loss", "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 3}
KINDS = {
    "synchronous": {},
    "asynchronous": {"async_save": True},
    "retention": {**_BY_EVAL, "save_total_limit": 1, "load_best_model_at_end": True},
    # Begins anew in the folder of a finished run, and replaces its checkpoints.
    "replacing": {},
}
# Whatever a clock, the machine or the place of the run decides.
_PATH = re.compile(r'"[^"]*/(checkpoint-\d+)"')
_MOVING = ("_times", "_per_second", "_runtime", "memory_bytes", "data_wait_share", "_dir")


class Noisy(torch.utils.data.Dataset):
    """Rows that draw from all three sources of randomness."""

    def __init__(self):
        self.base = regression_rows()

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        row = self.base[index]
        noise = torch.tensor([random.random(), float(np.random.rand()), float(torch.rand(())), 0.0])
        return {**row, "x": row["x"] + noise}


class Acknowledged(TrainerCallback):
    """Leaves the step of the newest save that was told to have succeeded, where the death of the process leaves it."""

    def __init__(self, file):
        self.file = file

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.file.write_text(str(state.global_step))


def acknowledged_in(file):
    """Returns the step that was left in a file; 0 for none."""
    return int(file.read_text()) if file.exists() else 0


def trainer(folder, kind, storage=None, callbacks=(), **more):
    """Returns the trainer of a job that writes into `folder`."""
    given = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_strategy": "steps",
        "logging_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "per_device_train_batch_size": 2,
        "use_cpu": True,
        "report_to": "none",
        **KINDS[kind],
        **more,
    }
    return Trainer(
        Regression(),
        TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Noisy(),
        eval_dataset=regression_rows(4),
        callbacks=callbacks,
        storage=storage,
    )


def prepare(folder, kind):
    """Makes the folder of a job; returns the step that a resume finds there before the job has saved anything."""
    folder.mkdir(parents=True)
    if kind != "replacing":
        return 0
    trainer(folder, kind).train()
    return STEPS


def resumes_at(folder):
    """Returns the step from which `auto` goes on; 0 where it begins anew. Nothing that is seen may be damaged."""
    newest, skipped = newest_verified(folder)
    assert [] == [error.message for error in skipped]
    return 0 if newest is None else verify(newest).step


def newest_step(folder):
    """Returns the step of the newest intact checkpoint; 0 where there is none."""
    newest, _ = newest_verified(folder)
    return 0 if newest is None else verify(newest).step


def finish(folder, kind, **more):
    """Trains to the end from the newest checkpoint, and returns the digest."""
    trainer(folder, kind, **more).train(resume_from_checkpoint="auto")
    return digest(folder)


def digest(folder, steps=STEPS):
    """Returns what a finished run left, as digests by name."""
    last = checkpoint_folder(folder, steps)
    found = exported(folder)
    for name in verify(last).files:
        for part, value in _content(last / name).items():
            found[f"{name}/{part}"] = value
    return found


def exported(folder):
    """Returns digests of the model that lies ready for use, by name; nothing where there is none."""
    file = folder / "model.safetensors"
    return {f"export/{name}": value for name, value in _content(file).items()} if file.exists() else {}


def may_be_exported(folder, clean, before):
    """Tells whether the model for use is whole: that of the finished run, or none where none was there before."""
    found, whole = exported(folder), {name: value for name, value in clean.items() if name.startswith("export/")}
    return found == whole or (found == {} and before == 0)


def _content(file):
    if file.suffix == ".safetensors":
        return {name: _hash(_bytes_of(tensor)) for name, tensor in read_tensors(file).items()}
    if file.suffix != ".json":
        return {"": _hash(file.read_bytes())}
    tree = json.loads(_PATH.sub(r'"\1"', file.read_text(encoding="utf-8")))
    parts = tree.items() if isinstance(tree, dict) else [("", tree)]
    return {name: _hash(json.dumps(_still(part), sort_keys=True).encode()) for name, part in parts if _is_still(name)}


def _bytes_of(tensor):
    facts = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    return facts + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _still(value):
    if isinstance(value, dict):
        return {name: _still(inner) for name, inner in value.items() if _is_still(name)}
    if isinstance(value, list):
        # The line that closes a run is one of its process, not of its state.
        lines = [line for line in value if not (isinstance(line, dict) and "train_runtime" in line)]
        return [_still(inner) for inner in lines]
    return value


def _is_still(name):
    return not name.endswith(_MOVING)


def _hash(content):
    return hashlib.sha256(content).hexdigest()[:16]


def differences(expected, found):
    """Returns the names whose digests differ."""
    return sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
