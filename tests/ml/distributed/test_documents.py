"""Documents of a packed row do not see one another, whatever the strategy: the others' weights move alike."""

import functools
import tempfile
import warnings

import pytest
from torch.nn import functional as F

import forgather.ml
from forgather.ml.distributed.env import DistributedEnvironment
from tests.ml.distributed.bench import PRECISIONS, least_layers, make_model
from tests.ml.distributed.gang import run_ranks
from tests.ml.packed_rows import leak, two_documents, weights
from tests.patience import patience

ROWS = 4
PIPELINE = {"split_spec": "auto", "pipeline_parallel_size": 2, "pipeline_chunks": 2}
STRATEGIES = {
    "DDP": ("Accel", {}),
    "FSDP2": ("Accel", {"fsdp": "full_shard"}),
    "TP": ("Accel", {"tensor_parallel_size": 2}),
    "ZeRO-2": ("Accel", {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    "ZeRO-3": ("Accel", {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    "1F1B": ("Pipeline", {**PIPELINE, "schedule_class": "Schedule1F1B"}),
    "ZBV": ("Pipeline", {**PIPELINE, "schedule_class": "ScheduleZBVZeroBubble", "stages_per_rank": 2}),
}
RECOMPUTED = {"gradient_checkpointing": True}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}


def own_loss(logits, labels, reduction="mean"):
    return F.cross_entropy(logits, labels, reduction=reduction)


def cached_model(layers, attention="sdpa"):
    """Returns a model whose configuration asks for a cache."""
    model = make_model("llama", PRECISIONS["fp32 sgd"]["dtype"], layers)
    model.config.use_cache, model.config._attn_implementation = True, attention
    return model


def train_once(rows, strategy, attention="sdpa", loss_fn=None, **settings):
    # torch.compile looks at gradients of tensors that have none, and warns of itself.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    trainer_name, own = STRATEGIES[strategy]
    with tempfile.TemporaryDirectory() as folder:
        args = getattr(forgather.ml, f"{trainer_name}TrainingArguments")(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=ROWS if {"tensor_parallel_size", "split_spec"} & {*own} else ROWS // 2,
            max_steps=1,
            optim="sgd",
            learning_rate=1.0,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            save_strategy="no",
            **own,
            **settings,
        )
        trainer = getattr(forgather.ml, f"{trainer_name}Trainer")(
            model_init=functools.partial(cached_model, least_layers(own), attention),
            args=args,
            train_dataset=rows,
            eval_dataset=rows,
            loss_fn=loss_fn,
            distributed_env=DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60)),
        )
        evaluated = trainer.evaluate()["eval_loss"]
        before = weights(trainer)
        trainer.train()
        return {"before": before, "after": weights(trainer), "evaluated": evaluated}


def leaked(strategy, options, settings):
    losses = []

    def train(rows):
        trained = train_once(rows, strategy, **settings)
        losses.append(trained["evaluated"])
        return trained

    return max(leak(train, **options), abs(losses[0] - losses[1]))


def of_two_ranks(strategy, *, document_boundaries=True, **settings):
    options = {} if document_boundaries else {"document_boundaries": False}
    for seed in (1, 2):
        two_documents(seed, ROWS, **options)  # made here once, for the ranks that are forked off
    return max(run_ranks(2, leaked, strategy, options, settings, timeout=180))


CELLS = [
    ("DDP", {"loss_fn": own_loss, **RECOMPUTED}),
    ("FSDP2", {"loss_fn": own_loss}),
    ("ZeRO-2", {"loss_fn": own_loss}),
    ("1F1B", {"loss_fn": own_loss}),
]
FURTHER = [
    ("DDP", {}),
    ("FSDP2", RECOMPUTED),
    ("1F1B", {"attention": "eager"}),
    ("DDP", {"attention": "eager"}),
    *((strategy, {"attention": "varlen"}) for strategy in STRATEGIES),
    ("FSDP2", {"attention": "varlen", **RECOMPUTED}),
    ("1F1B", {"attention": "varlen", **RECOMPUTED}),
    ("FSDP2", {**COMPILED, "torch_compile_regions": False}),
    ("FSDP2", {}),
    ("FSDP2", {"attention": "eager", "loss_fn": own_loss, **RECOMPUTED}),
    ("FSDP2", COMPILED),
    ("DDP", COMPILED),
    ("TP", {"loss_fn": own_loss}),
    ("ZeRO-2", RECOMPUTED),
    ("ZeRO-3", {}),
    ("ZeRO-3", {"loss_fn": own_loss, **RECOMPUTED}),
    ("1F1B", COMPILED),
    ("1F1B", RECOMPUTED),
    ("ZBV", {"loss_fn": own_loss}),
]


@pytest.mark.parametrize(
    ("strategy", "settings"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.matrix) for cell in FURTHER)]
)
def test_the_second_document_does_not_see_the_first(strategy, settings):
    assert of_two_ranks(strategy, **settings) <= 1e-6


@pytest.mark.parametrize("strategy", ["DDP", pytest.param("1F1B", marks=pytest.mark.matrix)])
def test_without_boundaries_it_does(strategy):
    assert of_two_ranks(strategy, document_boundaries=False) > 1e-4
