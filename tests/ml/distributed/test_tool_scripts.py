"""A script of Accelerate and one of DeepSpeed against a run that has their words: losses and weights are equal."""

import functools
import json
import sys

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from forgather.ml.callbacks import RunSummaryCallback
from forgather.ml.trainer.deepspeed_schedules import DeepSpeedSchedule
from tests.matrix import thinned
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import VOCAB, Recorder, largest_difference, tiny_llama, weights

ROWS, ACCUMULATED, STEPS = 2, 3, 4


def even_rows(count=ROWS * ACCUMULATED * STEPS, length=10):
    """Rows with equally many targets: the mean of the means of micro-batches is then the mean."""
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, VOCAB, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in ids]


def of_windows(losses):
    return [sum(losses[at : at + ACCUMULATED]) / ACCUMULATED for at in range(0, len(losses), ACCUMULATED)]


def ours(folder, rows, **words):
    """The losses of the steps and the final weights of a run on the rows in their order."""
    quiet = {"report_to": "none", "save_strategy": "no", "logging_steps": 1, "use_cpu": True, "control": "off"}
    recorder = Recorder()
    args = AccelTrainingArguments(folder, max_steps=STEPS, train_sampling_strategy="sequential", **quiet, **words)
    trainer = AccelTrainer(
        tiny_llama, args, train_dataset=rows, callbacks=[recorder, RunSummaryCallback(run_dir=folder, report=False)]
    )
    trainer.train()
    found = {name: value.detach().clone() for name, value in trainer.strategy.export()}
    return [line["loss"] for line in recorder.lines if "loss" in line], found


def assert_same_run(theirs, found):
    assert theirs[0] == pytest.approx(found[0], abs=1e-6)
    assert sorted(theirs[1]) == sorted(found[1])
    assert largest_difference(theirs[1], found[1]) <= 1e-6


def accelerate_script(rows):
    """A loop as the documentation of Accelerate writes it."""
    plugin = GradientAccumulationPlugin(num_steps=ACCUMULATED)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 1, STEPS)
    model, optimizer, loader, scheduler = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=ROWS), scheduler
    )
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return of_windows(losses), weights(accelerator.unwrap_model(model))


# The words of the script; the loop itself is that of the trainer.
SCRIPT_WORDS = {
    "accelerator_args": {"cpu": True, "gradient_accumulation_plugin": {"num_steps": ACCUMULATED}},
    "per_device_train_batch_size": ROWS,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 1,
    "max_grad_norm": 0.5,
    "optim": "adamw_torch",
}


def compared_with_accelerate(folder, rows):
    return accelerate_script(rows), ours(folder, rows, **SCRIPT_WORDS)


def test_a_script_of_accelerate_and_its_words_give_the_same_losses(tmp_path):
    ((theirs, found),) = run_ranks(1, compared_with_accelerate, str(tmp_path), even_rows())
    assert STEPS == len(found[0])
    assert_same_run(theirs, found)
    # The comparison sees another schedule.
    other = ours(str(tmp_path), even_rows(), **{**SCRIPT_WORDS, "warmup_steps": 2})
    assert largest_difference(theirs[1], other[1]) > 1e-4


DEEPSPEED = {
    "train_micro_batch_size_per_gpu": ROWS,
    "gradient_accumulation_steps": ACCUMULATED,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 6, "warmup_min_lr": 1e-4, "warmup_max_lr": 2e-3, "warmup_num_steps": 3},
    },
}


def deepspeed_script(rows, config):
    """A loop as the documentation of DeepSpeed writes it."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = tiny_llama()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=None, config=config
    )
    losses = []
    for batch in DataLoader(rows, batch_size=ROWS):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return of_windows(losses), weights(model)


def run_with_deepspeed_words(folder, rows, config):
    return ours(folder, rows, deepspeed=config)


@pytest.fixture(scope="module")
def engine():
    import_engine()


@pytest.mark.usefixtures("engine")
def test_a_script_of_deepspeed_and_its_config_give_the_same_losses(tmp_path):
    rows = even_rows()
    (theirs,) = run_ranks(1, deepspeed_script, rows, DEEPSPEED)
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(DEEPSPEED))
    (found,) = run_ranks(1, run_with_deepspeed_words, str(tmp_path / "out"), rows, str(file))
    assert STEPS == len(found[0])
    assert_same_run(theirs, found)


def run_without_deepspeed(folder, rows, config):
    sys.modules["deepspeed"] = None
    losses, found = ours(folder, rows, deepspeed=config, strict=False)
    return losses, found


def run_alone(folder, rows):
    """A run of one process without any engine, with the numbers of `DEEPSPEED` as our own settings."""
    params = DEEPSPEED["optimizer"]["params"]
    adam = functools.partial(torch.optim.AdamW, betas=tuple(params["betas"]))
    schedule = functools.partial(DeepSpeedSchedule, kind="WarmupDecayLR", params=DEEPSPEED["scheduler"]["params"])
    recorder = Recorder()
    args = TrainingArguments(
        folder, max_steps=STEPS, train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", use_cpu=True,
        control="off", max_grad_norm=0.5, gradient_accumulation_steps=ACCUMULATED, per_device_train_batch_size=ROWS,
        learning_rate=params["lr"], weight_decay=params["weight_decay"],
    )  # fmt: skip
    trainer = Trainer(
        tiny_llama,
        args,
        train_dataset=rows,
        optimizer_factory=adam,
        lr_scheduler_factory=schedule,
        callbacks=[recorder],
    )
    trainer.train()
    return [line["loss"] for line in recorder.lines if "loss" in line], None


@pytest.mark.parametrize(("stage", "ranks"), thinned([(1, 1), (2, 2), (3, 2)], lambda stage, ranks: stage == 2))
def test_without_deepspeed_fsdp2_gives_the_same_losses(tmp_path, stage, ranks):
    config = {**DEEPSPEED, "zero_optimization": {"stage": stage}}
    rows = even_rows()
    if ranks == 2:
        config |= {"train_micro_batch_size_per_gpu": ROWS // 2}
    (expected,) = run_ranks(1, run_alone, str(tmp_path / "one"), rows)
    for found in run_ranks(ranks, run_without_deepspeed, str(tmp_path / "out"), rows, config):
        assert expected[0] == pytest.approx(found[0], abs=1e-6)
    summary = tmp_path / "out" / "summary.json"
    strategy = "full_shard" if stage == 3 else "shard_grad_op"
    expected = {"deepspeed": config, "trained_with": f"FSDP2 ({strategy})"}
    assert expected == json.loads(summary.read_text())["deepspeed_replaced"]


def run_in_words(folder, rows, words):
    return ours(folder, rows, learning_rate=2e-3, **words)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (4, {"fsdp": "hybrid_shard_zero2 auto_wrap", "fsdp_config": {"shard_size": 2}}),
        (4, {"accelerator_args": {"parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2}}}),
        (2, {"fsdp": "full_shard auto_wrap offload"}),
        (2, {"accelerator_args": {"fsdp_plugin": {"sharding_strategy": "SHARD_GRAD_OP"}}}),
    ],
)
def test_the_words_of_fsdp_give_the_losses_of_one_process(tmp_path, ranks, words):
    rows = even_rows(4 * STEPS)
    one = {"per_device_train_batch_size": 4}
    (expected,) = run_ranks(1, run_in_words, str(tmp_path / "one"), rows, one)
    words |= {"per_device_train_batch_size": 4 // ranks}
    for found in run_ranks(ranks, run_in_words, str(tmp_path / "out"), rows, words):
        assert_same_run(expected, found)


SCHEDULES = [
    ("WarmupLR", {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}),
    ("WarmupLR", {"warmup_type": "linear", "warmup_num_steps": 4, "warmup_min_lr": 1e-5}),
    ("WarmupDecayLR", {"total_num_steps": 9, "warmup_num_steps": 3}),
    ("WarmupDecayLR", {"total_num_steps": 3, "warmup_num_steps": 5, "warmup_type": "linear"}),
    ("WarmupCosineLR", {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 3, "warmup_num_steps": 1}),
]


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("kind", "params"), SCHEDULES)
def test_the_rates_are_those_of_deepspeed(kind, params):
    from deepspeed.runtime import lr_schedules

    rates = []
    for make in (getattr(lr_schedules, kind), lambda optimizer, **given: DeepSpeedSchedule(optimizer, kind, given)):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
        schedule = make(optimizer, **params)
        seen = []
        for _ in range(12):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        rates.append(seen)
    assert rates[0] == pytest.approx(rates[1], rel=1e-12, abs=1e-15)
    assert len(set(rates[0])) > 2
