"""Layouts of processes, and a training in each of them that can be left and taken up by way of a folder.

Takes the name of a layout; gives what its strategy holds after some steps. Keeps true: the rows of a step are the same
in every layout.
"""

import dataclasses
import functools
from pathlib import Path

import torch

from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.data_parallel import DataParallel
from forgather.ml.strategy.deepspeed import deepspeed_strategy
from forgather.ml.strategy.fsdp2 import Sharded
from forgather.ml.strategy.fsdp_config import Sharding
from forgather.ml.strategy.single import SingleDevice
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments
from tests.ml.distributed.pipeline_runs import environment, make_llama, pipeline, recipe, train, windows
from tests.ml.distributed.states import read, restore, write

STEPS = 3
ROWS = 4


def groups(model):
    """AdamW with a group for matrices and one for the rest, as trainers make them."""
    named = list(model.parameters())
    large, small = [p for p in named if p.ndim > 1], [p for p in named if p.ndim < 2]
    return torch.optim.AdamW([{"params": large}, {"params": small, "weight_decay": 0.0, "lr": 2e-3}], lr=1e-3)


TIED = functools.partial(
    make_llama, layers=2, dtype=torch.float32, num_key_value_heads=2, tie_word_embeddings=True
)  # fmt: skip


def _built(strategy, **method):
    strategy.build(dataclasses.replace(recipe(TIED, optimizer=groups), **method))
    strategy.build_optimizer()
    return strategy


def single(world):
    return _built(SingleDevice(environment(), use_cpu=True))


def copies(world, context=1, **method):
    return _built(DataParallel(environment(), Layout.for_world(world, context=context), use_cpu=True), **method)


def shards(world, shard_size=None, tensor=1, context=1):
    data = world // (tensor * context)
    sizes = {"tensor_parallel_size": tensor, "context_parallel_size": context}
    layout = Layout(data_parallel_size=data, shard_size=shard_size or data, **sizes)
    return _built(Sharded(environment(), layout, sharding=Sharding() if data > 1 else None, use_cpu=True))


def stages(world, data=1, sharding=None):
    settings = {"sharding": sharding} if sharding is not None else {}
    return pipeline(
        recipe(TIED, optimizer=groups), world=world, data=data, rows=ROWS // data, pipeline_chunks=2, **settings
    )


def zero(world, stage):
    args = AccelTrainingArguments(
        "unused",
        use_cpu=True,
        per_device_train_batch_size=ROWS // world,
        deepspeed={"zero_optimization": {"stage": stage}},
        max_grad_norm=0.5,
    )
    return _built(deepspeed_strategy(environment(), args))


# Processes, and what makes the strategy.
LAYOUTS = {
    "single": (1, single),
    "DDP 2": (2, copies),
    "FSDP2 2": (2, shards),
    "FSDP2 4": (4, shards),
    "HSDP 2x2": (4, functools.partial(shards, shard_size=2)),
    "TP 2": (2, functools.partial(shards, tensor=2)),
    "FSDP2 x TP 2x2": (4, functools.partial(shards, tensor=2)),
    "CP 2": (2, functools.partial(copies, context=2)),
    "CP ring 2": (2, functools.partial(copies, context=2, context_method="ring")),
    "FSDP2 x CP 2x2": (4, functools.partial(shards, context=2)),
    "PP 2": (2, stages),
    "DP x PP 2x2": (4, functools.partial(stages, data=2)),
    "PP x FSDP2 2x2": (4, functools.partial(stages, data=2, sharding=Sharding())),
    "ZeRO-1": (2, functools.partial(zero, stage=1)),
    "ZeRO-2": (2, functools.partial(zero, stage=2)),
    "ZeRO-3": (2, functools.partial(zero, stage=3)),
}


def leave(layout, folder):
    """Trains, writes the state, goes on, and writes that too; the work of one rank."""
    strategy = LAYOUTS[layout][1](environment().world_size)
    _train(strategy, 0)
    write(strategy.capture(), folder / "left")
    _train(strategy, STEPS)
    write(strategy.capture(), folder / "end")


def take_up(layout, left, folder):
    """Takes up what was left, writes it again, goes on, and writes that too; the work of one rank."""
    strategy = LAYOUTS[layout][1](environment().world_size)
    restore(strategy, left)
    write(strategy.capture(), folder / "left")
    _train(strategy, STEPS)
    write(strategy.capture(), folder / "end")


def _train(strategy, first):
    own = {"dp_rank": strategy.topology.dp_rank, "dp_size": strategy.topology.dp_size}
    train(strategy, windows(2 * STEPS, 1, ROWS)[first : first + STEPS], **own)


def largest_differences(one, other):
    """Returns the largest difference of each kind of number between two folders: weights, moments, settings."""
    first, second = read(Path(one)), read(Path(other))
    assert sorted(first["model"]) == sorted(second["model"])
    found = {"weights": max(_off(value, second["model"][name]) for name, value in first["model"].items())}
    states = first["optimizer"]["state"], second["optimizer"]["state"]
    assert sorted(states[0]) == sorted(states[1])
    for name, entry in states[0].items():
        assert sorted(entry) == sorted(states[1][name])
        for key, value in entry.items():
            found[key] = max(found.get(key, 0.0), _off(value, states[1][name][key]))
    settings = [
        {name: (group["lr"], group["weight_decay"], group["betas"]) for group in tree["param_groups"] for name in group["params"]}
        for tree in (first["optimizer"], second["optimizer"])
    ]  # fmt: skip
    assert settings[0] == settings[1]
    return found


def _off(one, other):
    return float((torch.as_tensor(one).double() - torch.as_tensor(other).double()).abs().max())
