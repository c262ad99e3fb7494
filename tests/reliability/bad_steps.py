"""Runs in which one step, on one rank, computes something that is not finite or far too large.

A fault is planted in the model itself: the blocks that lie on the rank multiply what goes forward, or what
comes back, by a factor. So the fault takes the way that a real one takes, through the sums of every strategy.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor

import forgather.ml
from forgather.errors import ForgatherError
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.callbacks.metrics import JsonLogger
from forgather.ml.distributed.env import DistributedEnvironment
from tests.ml.distributed.bench import GLOBAL_ROWS, least_layers, make_model, packed_rows
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.patience import patience

FAULTS = {
    "loss nan": ("forward", float("nan")),
    "loss inf": ("forward", float("inf")),
    "gradient nan": ("backward", float("nan")),
    "gradient inf": ("backward", float("inf")),
    "gradient -inf": ("backward", float("-inf")),
    "spike": ("backward", 30.0),
}
"""Which way a fault goes, and its factor."""

STEPS = 7
"""Updates of a run."""

_planted = {"forward": 1.0, "backward": 1.0}


class _Factor(torch.autograd.Function):
    """Multiplies by the factors that are planted when it is called: by 1, most of the time."""

    @staticmethod
    def forward(ctx, value):
        return value * _planted["forward"]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * _planted["backward"]


def _hook(module, inputs, output):
    if isinstance(output, tuple):
        return (_Factor.apply(output[0]), *output[1:])
    return _Factor.apply(output)


def faulty_model(dtype, dropout, layers):
    """Returns a tiny model in which a fault can be planted."""
    model = make_model("llama", dtype, layers)
    for block in model.get_decoder().layers:
        block.self_attn.attention_dropout = dropout
        block.register_forward_hook(_hook)
    return model


def digest(tree):
    """Returns a digest of every tensor and number of a tree."""
    found = hashlib.sha256()

    def add(value):
        if isinstance(value, torch.Tensor):
            value = value.to_local() if isinstance(value, DTensor) else value
            found.update(str((value.dtype, tuple(value.shape))).encode())
            found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for name in sorted(value, key=str):
                found.update(str(name).encode())
                add(value[name])
        elif isinstance(value, list | tuple):
            found.update(str(len(value)).encode())
            for item in value:
                add(item)
        else:
            found.update(repr(value).encode())

    add(tree)
    return found.hexdigest()


def held(trainer):
    """Returns the digests of what lies in this process."""
    captured = trainer.strategy.capture()
    return {"model": digest([captured.weights, captured.extra]), "optimizer": digest(captured.optimizer)}


class Fault(TrainerCallback):
    """Plants the fault for a step on a rank, and keeps the digests of all state before and after each step.

    Args:
        kind: of `FAULTS`; anything else plants nothing.
        steps: in which it is planted.
        rank: where.
        dies: end the run as soon as it went back to a checkpoint.
        spoiled: a file that is cut short when the fault is planted.
    """

    def __init__(self, kind, steps, rank, *, dies=False, spoiled=None):
        self.way, self.factor = FAULTS.get(kind, ("forward", 1.0))
        self.steps, self.rank, self.dies, self.spoiled = set(steps), rank, dies, spoiled
        self.trainer = None
        self.before, self.after, self.lines, self.rewound = {}, {}, {}, []

    def on_train_begin(self, args, state, control, **kwargs):
        self.present = self._state()

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step + 1
        self.before[step] = self.present
        if step in self.steps and args.process_index == self.rank:
            _planted[self.way] = self.factor
            if self.spoiled is not None:
                os.truncate(self.spoiled, 1000)

    def on_step_end(self, args, state, control, **kwargs):
        _planted.update(forward=1.0, backward=1.0)
        self.after[state.global_step] = self.present = self._state()

    def on_rewind(self, args, state, control, **kwargs):
        _planted.update(forward=1.0, backward=1.0)
        self.present = self._state()
        self.rewound.append(state.global_step)
        if self.dies:
            raise Died

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "train_runtime" not in logs:
            known = ("loss", "grad_norm", "skipped_steps", "learning_rate", "epoch")
            self.lines[state.global_step] = {name: logs[name] for name in known if name in logs}

    def _state(self):
        return {**held(self.trainer), "schedule": self.trainer.lr_scheduler.state_dict()}


def spoil_sums(trainer, norm_of, steps, rank):
    """Has one rank scale its own copy of the gradients after they were added, to a norm that is asked for."""
    strategy = trainer.strategy
    right = strategy.forward_backward

    def wrong(*args, **kwargs):
        loss = right(*args, **kwargs)
        if trainer.state.global_step + 1 in steps and strategy.topology.rank == rank:
            gradients = [parameter.grad for parameter in strategy.model.parameters() if parameter.grad is not None]
            earlier = [line["grad_norm"] for line in trainer.state.log_history]
            factor = norm_of(earlier) / torch.nn.utils.get_total_norm(gradients)
            for gradient in gradients:
                gradient.mul_(factor)
        return loss

    strategy.forward_backward = wrong


class Died(BaseException):
    """The run ends here, as if it were killed."""


def trained(kind, strategy, settings, *, steps=(5,), rank=0, folder=None, resume=None, **acts):
    """Trains with a fault as the rank that the environment says; returns what is to be compared.

    `kind` is one of `FAULTS`, None for no fault, or a function that gives the norm which the gradients are to have from
    the norms of the steps before.
    """
    _planted.update(forward=1.0, backward=1.0)
    with tempfile.TemporaryDirectory() as own:
        fault = Fault(kind, steps, rank, **acts)
        trainer = fault.trainer = make_trainer(folder or own, strategy, settings, [fault, JsonLogger()])
        if callable(kind):
            spoil_sums(trainer, kind, steps, rank)
        error = None
        try:
            trainer.train(resume)
        except (ForgatherError, Died) as found:
            error = str(found) or "died"
        trainer.strategy.discard()
        return {
            "before": fault.before,
            "after": fault.after,
            "lines": fault.lines,
            "rewound": fault.rewound,
            "error": error,
            "step": trainer.state.global_step,
            "epoch": trainer.state.epoch,
            "tokens": trainer.state.num_input_tokens_seen,
            "history": [line for line in trainer.state.log_history if "train_runtime" not in line],
            "end": held(trainer),
        }


def make_trainer(folder, strategy, settings, callbacks):
    """Returns the trainer of a strategy: a kind of training as `tests/ml/distributed/cells.py` has them."""
    common = {
        "max_steps": STEPS,
        "use_cpu": True,
        "per_device_train_batch_size": GLOBAL_ROWS // strategy["dp_size"],
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "optim": "adamw_torch",
    }
    name = strategy["trainer"]
    arguments = getattr(forgather.ml, f"{name.removesuffix('Trainer')}TrainingArguments")
    # DeepSpeed keeps weights in float32.
    dtype = torch.float32 if "deepspeed" in strategy["settings"] else torch.float64
    return getattr(forgather.ml, name)(
        model_init=functools.partial(
            faulty_model, dtype, strategy.get("dropout", 0.0), least_layers(strategy["settings"])
        ),
        args=arguments(str(folder), **{**common, **strategy["settings"], **settings}),
        train_dataset=packed_rows(1),
        eval_dataset=packed_rows(1)[:4],
        callbacks=callbacks,
        distributed_env=DistributedEnvironment(timeout_seconds=patience(30), start_timeout_seconds=patience(30)),
    )


def gang(strategy, kind, settings, **given):
    """Returns what `trained` gives on each rank of a strategy."""
    if "deepspeed" in strategy["settings"]:
        import_engine()
    if strategy["world_size"] == 1:
        return [trained(kind, strategy, settings, **given)]
    return run_ranks(strategy["world_size"], functools.partial(trained, **given), kind, strategy, settings, timeout=120)


def check_left_out(found, step):
    """Raises unless a step changed nothing on any rank, and all others were taken.

    Args:
        found: what `trained` gave, by rank.
        step: the one that is left out.
    """
    for one in found:
        assert one["error"] is None
        assert one["before"][step] == one["after"][step], "the step that was to be left out was applied"
        for other in range(1, STEPS + 1):
            changed = one["before"][other]["optimizer"] != one["after"][other]["optimizer"]
            # A rank of a gang that writes nothing may hold no state that could change.
            assert other == step or changed or one is not found[0], f"step {other} was not applied"
            moved = one["before"][other]["schedule"] != one["after"][other]["schedule"]
            assert moved == (other != step)
        assert one["lines"][step].get("skipped_steps") == 1
        assert [line for line in one["lines"].values() if "skipped_steps" in line] == [one["lines"][step]]
        assert "loss" not in one["lines"][step]
        assert (one["step"], one["lines"], one["tokens"]) == (STEPS, found[0]["lines"], found[0]["tokens"])
