"""Packed conversations against the same ones in rows of their own: loss and gradients are equal under every strategy.

The loop below sees each example alone, so it needs neither padding nor positions. One update with plain SGD and a rate
of 1 moves each weight by its gradient.
"""

import functools
import random
import tempfile

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import forgather.ml
from forgather.ml.data import CausalLMCollator, pack_examples
from forgather.ml.distillation import DistillationLoss
from forgather.ml.distributed.env import DistributedEnvironment
from tests.matrix import thinned
from tests.ml.distributed.bench import make_model
from tests.ml.distributed.cells import SCHEDULES
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import Recorder
from tests.ml.packed_rows import LENGTH, VOCAB
from tests.patience import patience

ROWS = 4
"""Rows of a micro-batch over all ranks; the last one is short."""
LIMITS = {torch.float64: 1e-10, torch.float32: 1e-6}
"""Of the relative difference of the loss, and of the difference of a gradient. DeepSpeed has no float64."""
SMOOTHING = 0.1


def own_loss(logits, labels, reduction="mean"):
    return F.cross_entropy(logits, labels, reduction=reduction)


def divided_loss(logits, labels, num_items_in_batch=None):
    return F.cross_entropy(logits, labels, reduction="sum") / (num_items_in_batch or len(labels))


def class_weights():
    return torch.linspace(0.5, 2.0, VOCAB)


@functools.cache
def teacher():
    torch.manual_seed(11)
    folder = tempfile.mkdtemp()
    make_model("gpt2", torch.float32, 1).save_pretrained(folder)
    return folder


LOSSES = {
    "default": lambda dtype: {},
    "smoothed": lambda dtype: {"label_smoothing_factor": SMOOTHING},
    "torch": lambda dtype: {"loss_fn": nn.CrossEntropyLoss()},
    "weighted": lambda dtype: {"loss_fn": nn.CrossEntropyLoss(weight=class_weights().to(dtype))},
    "own": lambda dtype: {"loss_fn": own_loss},
    "divided": lambda dtype: {"loss_fn": divided_loss},
    "distilled": lambda dtype: {"loss_fn": DistillationLoss(teacher=teacher(), temperature=2.0, weight=0.5)},
}


def _pipeline(schedule, ranks=2, **further):
    stages = SCHEDULES[schedule]
    sizes = {"split_spec": "auto", "pipeline_parallel_size": 2, "pipeline_chunks": 4, "stages_per_rank": stages}
    return ranks, "Pipeline", {**sizes, "schedule_class": schedule, **further}


def _zero(stage):
    return 2, "Accel", {"deepspeed": {"zero_optimization": {"stage": stage}}}


LAYOUTS = {
    "one": (1, "", {}),
    "DDP": (2, "Accel", {}),
    "FSDP2": (2, "Accel", {"fsdp": "full_shard"}),
    "HSDP": (4, "Accel", {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}),
    "TP2": (2, "Accel", {"tensor_parallel_size": 2}),
    **{f"ZeRO-{stage}": _zero(stage) for stage in (1, 2, 3)},
    **{name.removeprefix("Schedule"): _pipeline(name) for name in SCHEDULES},
    "FSDP2 x 1F1B": _pipeline("Schedule1F1B", 4, fsdp="shard_grad_op", pipeline_chunks=2),
}


@functools.cache
def examples():
    """Conversations of two turns: a question without a loss, and an answer with one."""
    draw, made = random.Random(5), []
    for _ in range(23):
        parts = [[draw.randrange(2, VOCAB) for _ in range(draw.randint(1, 2))] for _ in range(4)]
        ids = [token for part in parts for token in part]
        labels = [token if place % 2 else -100 for place, part in enumerate(parts) for token in part]
        made.append({"input_ids": ids, "labels": labels})
    return made


@functools.cache
def packed():
    with tempfile.TemporaryDirectory() as folder:
        rows = [dict(row) for row in pack_examples(examples(), LENGTH, cache_dir=folder)]
    assert len(examples()) > len(rows) > 2 * ROWS
    assert len(rows) % ROWS
    return rows


def model_of(kind, attention, stages, dtype):
    model = make_model(kind, dtype, max(2, stages))
    model.config._attn_implementation = attention
    return model


def exported(trainer):
    return {name: value.detach().clone() for name, value in trainer.strategy.export()}


def dtype_of(settings):
    return torch.float32 if "deepspeed" in settings else torch.float64


def ours(layout, kind, attention, loss, rows):
    ranks, trainer_name, own = LAYOUTS[layout]
    stages = own.get("pipeline_parallel_size", 1) * own.get("stages_per_rank", 1)
    replicas = 1 if "tensor_parallel_size" in own else ranks // own.get("pipeline_parallel_size", 1)
    given = LOSSES[loss](dtype_of(own))
    recorder, settings = Recorder(), {k: v for k, v in given.items() if k != "loss_fn"}
    env = DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60))
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(forgather.ml, f"{trainer_name}TrainingArguments")(
            folder,
            use_cpu=True,
            per_device_train_batch_size=ROWS // replicas,
            gradient_accumulation_steps=-(-len(rows) // ROWS),
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            **own,
            **settings,
        )
        trainer = getattr(forgather.ml, f"{trainer_name}Trainer")(
            model_init=functools.partial(model_of, kind, attention, stages, dtype_of(own)),
            args=arguments,
            train_dataset=rows,
            data_collator=CausalLMCollator(),
            loss_fn=given.get("loss_fn"),
            callbacks=[recorder],
            **({"distributed_env": env} if ranks > 1 else {}),
        )
        before = exported(trainer)
        trainer.train()
        after = exported(trainer)
    losses = [line["loss"] for line in recorder.lines if "loss" in line]
    return losses, {name: before[name] - after[name] for name in before}


def loss_alone(loss, logits, target, ids):
    """Returns the summed loss of one example and its divisor, by plain torch."""
    keep = target != -100
    if loss == "smoothed":
        total = F.cross_entropy(logits[keep], target[keep], reduction="sum", label_smoothing=SMOOTHING)
    elif loss == "weighted":
        total = F.cross_entropy(logits[keep], target[keep], weight=class_weights().to(logits), reduction="sum")
        return total, class_weights().to(logits)[target[keep]].sum()
    elif loss == "distilled":
        taught = make_teacher()(input_ids=ids).logits[0, :-1][keep].to(logits) / 2
        pair = (logits[keep] / 2).log_softmax(-1), taught.log_softmax(-1)
        total = 0.5 * 4 * F.kl_div(*pair, reduction="sum", log_target=True)
        total = total + 0.5 * F.cross_entropy(logits[keep], target[keep], reduction="sum")
    else:
        total = F.cross_entropy(logits[keep], target[keep], reduction="sum")
    return total, keep.sum()


@functools.cache
def make_teacher():
    return type(make_model("gpt2", torch.float32, 1)).from_pretrained(teacher()).eval().requires_grad_(False)


@functools.cache
def alone(kind, attention, loss, layers, dtype, *, sees_all=False):
    """Returns the loss and the gradients of all examples, each in a row of its own."""
    model, total, count = model_of(kind, attention, layers, dtype).train(), 0.0, 0.0
    rows = packed() if sees_all else examples()
    for row in rows:
        ids, target = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        part, divisor = loss_alone(loss, model(input_ids=ids).logits[0, :-1], target, ids)
        total, count = total + part, count + divisor
    (total / count).backward()
    return (total / count).item(), {name: weight.grad for name, weight in model.named_parameters()}


def distance(found, expected):
    losses, gradients = found
    assert 1 == len(losses)
    apart = [abs(losses[0] / expected[0] - 1)]
    apart += [float((gradients[name] - gradient).abs().max()) for name, gradient in expected[1].items()]
    return max(apart)


CELLS = [
    *((layout, "llama", attention, "default") for layout in LAYOUTS for attention in ("sdpa", "eager")),
    *((layout, "gpt2", "sdpa", "default") for layout in ("one", "DDP", "FSDP2", "ZeRO-3", "1F1B")),
    *(
        (layout, "llama", "sdpa", loss)
        for layout in ("one", "DDP", "FSDP2", "TP2", "ZeRO-2", "1F1B")
        for loss in list(LOSSES)[1:]
    ),
]
QUICK = {
    *(("one", "llama", "sdpa", loss) for loss in LOSSES),
    ("one", "llama", "eager", "default"),
    ("FSDP2", "llama", "eager", "default"),
    ("1F1B", "llama", "sdpa", "weighted"),
}


@pytest.mark.parametrize(("layout", "kind", "attention", "loss"), thinned(CELLS, lambda *cell: cell in QUICK))
def test_packed_conversations_are_those_of_rows_alone(layout, kind, attention, loss, record_property):
    ranks, _, own = LAYOUTS[layout]
    if "deepspeed" in own:
        import_engine()
    layers = own.get("pipeline_parallel_size", 1) * own.get("stages_per_rank", 1)
    expected = alone(kind, attention, loss, layers, dtype_of(own))
    # The teacher is in float32, and so is the softmax of eager attention, which some processors add up otherwise for
    # longer rows.
    limit = LIMITS[torch.float32 if loss == "distilled" or attention == "eager" else dtype_of(own)]
    every = run_ranks(ranks, ours, layout, kind, attention, loss, packed(), timeout=180)
    worst = max(distance(found, expected) for found in every)
    record_property("difference", worst)
    assert worst <= limit


def test_examples_that_see_one_another_are_another_training():
    """The negative control: packed rows without positions."""
    expected, joined = (alone("llama", "sdpa", "default", 1, torch.float64, sees_all=one) for one in (False, True))
    assert abs(joined[0] / expected[0] - 1) > 1e-3
    assert distance(([expected[0]], joined[1]), expected) > 1e-3
