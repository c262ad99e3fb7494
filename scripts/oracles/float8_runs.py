"""Records how runs with `fp8` compare with a plain loop over torchao's layers, for tests that do not need torchao.

    PYTHONPATH=FOLDER_OF_TORCHAO python scripts/oracles/float8_runs.py

Writes tests/ml/recorded/float8_runs.json. Float8 is emulated, so any machine gives these figures. The plain loop knows
nothing of Forgather: it converts the model with torchao, and steps AdamW. Under DDP and FSDP2, the scales of a rank
come from its own rows; the distance of their updates from those of one process is recorded next to that of float8
itself from float32.
"""

import functools
import json
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: E402
from torchao.float8.float8_linear import Float8Linear  # noqa: E402

from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments  # noqa: E402
from forgather.ml.distributed.env import DistributedEnvironment  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402
from tests.ml.fixtures import StopAt, rows, tiny_llama  # noqa: E402

RECORD = ROOT / "tests/ml/recorded/float8_runs.json"
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
STEPS, RATE = 4, 1e-3
SIZES = {"hidden_size": 32, "intermediate_size": 64}
SETTINGS = {
    "use_cpu": True,
    "max_steps": STEPS,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "fp8_emulate": True,
}
SETTINGS |= {"max_grad_norm": 0.0, "save_strategy": "no", "optim": "adamw_torch", "per_device_train_batch_size": 4}


TOGETHER = {"initial_weights": "counter", "gradient_checkpointing": True}
TOGETHER |= {"linear_cross_entropy": True, "linear_cross_entropy_chunk_size": 8}


def model():
    return tiny_llama(**SIZES)


def data():
    return rows(count=4 * STEPS, length=16)


def plain_loop(recipe):
    """The weights after the steps of a plain loop, and its losses."""
    net = model()
    if recipe is not None:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        convert_to_float8_training(net, config=config, module_filter_fn=lambda _, name: ".layers." in f".{name}")
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, weight_decay=0.0)
    losses = []
    every = data()
    for step in range(STEPS):
        batch = every[4 * step : 4 * step + 4]
        columns = {name: torch.stack([torch.as_tensor(row[name]) for row in batch]) for name in batch[0]}
        loss = net(**columns).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return weights(net.state_dict()), losses


def weights(state):
    return {name: value.detach().clone() for name, value in state.items()}


def own_run(recipe, *, stop=None, resume=None, folder=None, **more):
    settings = {**SETTINGS, "train_sampling_strategy": "sequential", "fp8": recipe, **more}
    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(
            model_init=model,
            args=TrainingArguments(folder or place, **settings),
            train_dataset=data(),
            callbacks=[] if stop is None else [StopAt(stop)],
        )
        trainer.train(resume_from_checkpoint=resume)
        layers = [one for one in trainer.model.modules() if isinstance(one, Float8Linear)]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return weights(dict(trainer.strategy.export())), losses, layers


def on_ranks(recipe, fsdp, rows=2, **more):
    with tempfile.TemporaryDirectory() as place:
        settings = {**SETTINGS, "per_device_train_batch_size": rows, "train_sampling_strategy": "sequential", **more}
        trainer = AccelTrainer(
            model_init=model,
            args=AccelTrainingArguments(place, fp8=recipe, fsdp="full_shard" if fsdp else None, **settings),
            train_dataset=data(),
            distributed_env=DistributedEnvironment(timeout_seconds=60, start_timeout_seconds=60),
        )
        trainer.train()
        return weights(dict(trainer.strategy.export()))


def distance(one, other, start):
    """The distance of two updates, relative to the update."""
    difference = sum(((one[name] - other[name]).double() ** 2).sum() for name in start)
    return (difference / sum(((other[name] - start[name]).double() ** 2).sum() for name in start)).sqrt().item()


def figures(recipe):
    start = weights(model().state_dict())
    plain, plain_losses = plain_loop(recipe)
    own, _, layers = own_run(recipe)
    with tempfile.TemporaryDirectory() as folder:
        saves = {"save_strategy": "steps", "save_steps": 2}
        own_run(recipe, folder=folder, stop=2, **saves)
        resumed, _, _ = own_run(recipe, folder=folder, resume=True, **saves)
    found = {
        "layers in float8": len(layers),
        "one process, from a plain loop": distance(own, plain, start),
        "resumed, from one run": distance(resumed, own, start),
        "recomputed, from one run": distance(own_run(recipe, gradient_checkpointing=True)[0], own, start),
        "compiled, from one run": distance(
            own_run(recipe, torch_compile=True, torch_compile_backend="aot_eager")[0], own, start
        ),
        "float32, from a plain loop": distance(plain_loop(None)[0], plain, start),
    }
    for name, fsdp in (("DDP", False), ("FSDP2", True)):
        found[f"{name} on two ranks, from one process"] = distance(
            run_ranks(2, on_ranks, recipe, fsdp, timeout=120)[0], own, start
        )
    alone = functools.partial(on_ranks, recipe, False, 4, **TOGETHER)
    one = run_ranks(1, alone, timeout=120)[0]
    counted = run_ranks(1, functools.partial(alone, learning_rate=0.0), timeout=120)[0]
    two = run_ranks(2, functools.partial(on_ranks, recipe, True, **TOGETHER), timeout=120)[0]
    found["FSDP2 with what is new together, from one process"] = distance(two, one, counted)
    return found


if __name__ == "__main__":
    versions = {name: version(name) for name in ("torch", "torchao")}
    record = {"versions": versions, "figures": {recipe: figures(recipe) for recipe in RECIPES}}
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(RECORD.read_text())
