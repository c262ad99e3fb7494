"""Losses of preferences under every strategy are those of one process: losses, rewards and weights."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.data import PreferenceCollator
from forgather.ml.distillation import DistillationLoss
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.preference_losses import DPOLoss, KTOLoss, ORPOLoss, RewardLoss
from forgather.ml.strategy.state import on_host
from tests.matrix import thinned
from tests.ml.distributed.gang import RankFailed, import_engine, run_ranks
from tests.ml.distributed.pipeline_runs import VOCAB, make_llama
from tests.ml.fixtures import Recorder
from tests.ml.moved_activations import moved_to_host
from tests.patience import patience

ROWS = 7
"""Of steps of four rows; the last one has three, so a rank or a pipeline has rows that only fill it up."""

CELLS = {
    "DDP": (2, {}),
    "FSDP2": (2, {"fsdp": "full_shard"}),
    "TP2": (2, {"tensor_parallel_size": 2}),
    "ZeRO-2": (2, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    "ZeRO-3": (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    "1F1B": (2, {"schedule_class": "Schedule1F1B", "pipeline_chunks": 2}),
    "ZBV x DP2": (4, {"schedule_class": "ScheduleZBVZeroBubble", "pipeline_chunks": 2, "data_parallel_size": 2}),
}
LOSSES = ("dpo", "orpo", "kto", "reward", "distillation")
REFUSED = {("1F1B", "reward"), ("ZBV x DP2", "reward")}
"""The last stage of a pipeline has no token ids, by which a reward model finds the last token."""
QUICK = {("FSDP2", "dpo"), ("1F1B", "kto")}


def ids(generator, length):
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def rows_of(kind):
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(ROWS):
        prompt, answers = ids(generator, 2 + number % 3), [ids(generator, 2 + (number * k) % 4) for k in (1, 3)]
        if kind == "distillation":
            made.append({"input_ids": [*prompt, *answers[0]][:4], "labels": [-100, *prompt[1:], *answers[0]][:4]})
            continue
        names = ("completion_ids", "kl_ids") if kind == "kto" else ("chosen_ids", "rejected_ids")
        label = {"label": number % 2} if kind == "kto" else {}
        made.append({"prompt_ids": prompt, **dict(zip(names, answers, strict=True)), **label})
    return made


def scores_model(dtype):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 4}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, num_labels=1, pad_token_id=0)
    return LlamaForSequenceClassification(config).to(dtype)


def loss_of(kind, teacher):
    return {
        "dpo": lambda: DPOLoss(sft_weight=0.3),
        "orpo": ORPOLoss,
        "kto": lambda: KTOLoss(undesirable_weight=1.3),
        "reward": RewardLoss,
        "distillation": lambda: DistillationLoss(teacher=teacher, temperature=1.5, weight=0.7),
    }[kind]()


def figures(folder, teacher, kind, settings, **further):
    """Returns (losses and rewards, weights) of a run of two epochs."""
    base, arguments, given = Trainer, TrainingArguments, {"per_device_train_batch_size": 4}
    # Of its own, so that no run reads the reference that another one has computed.
    pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(folder / "cache"))
    dtype = torch.float32 if settings and "deepspeed" in settings else torch.float64
    if settings is not None:
        piped = "schedule_class" in settings
        base, arguments = (
            (PipelineTrainer, PipelineTrainingArguments) if piped else (AccelTrainer, AccelTrainingArguments)
        )
        per_rank = 4 // settings.get("data_parallel_size", 1) if piped or "tensor_parallel_size" in settings else 2
        given = {**settings, "per_device_train_batch_size": per_rank}
    args = arguments(
        str(folder / "out"),
        use_cpu=True,
        per_device_eval_batch_size=2,
        num_train_epochs=2,
        learning_rate=2e-2,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        **given,
        **further,
    )
    recorder = Recorder()
    make = (lambda: scores_model(dtype)) if kind == "reward" else lambda: make_llama(dtype=dtype, num_key_value_heads=2)
    rows = rows_of(kind)
    trainer = base(
        make,
        args,
        train_dataset=rows,
        eval_dataset=rows[:5],
        data_collator=None if kind == "distillation" else PreferenceCollator(),
        loss_fn=loss_of(kind, teacher),
        callbacks=[recorder],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(30), start_timeout_seconds=patience(30)),
    )
    trainer.train()
    names = ("loss", "eval_loss", "eval_rewards/chosen", "eval_rewards/margins")
    return [line[name] for line in recorder.lines for name in names if name in line], on_host(
        trainer.strategy.export(), keep=True
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("preferences"), {}

    def of(kind):
        if kind not in found:
            if kind == "distillation":
                make_llama(dtype=torch.float64, num_key_value_heads=2, initializer_range=0.1).save_pretrained(folder)
            found[kind] = figures(folder / "one" / kind, folder, kind, None)
        return folder, found[kind]

    return of


@pytest.mark.parametrize(
    ("cell", "kind"), thinned([(cell, kind) for cell in CELLS for kind in LOSSES], lambda *case: case in QUICK)
)
def test_a_strategy_gives_the_figures_of_one_process(alone, tmp_path, cell, kind, record_property):
    world, settings = CELLS[cell]
    folder, (expected, weights) = alone(kind)
    if "ZeRO" in cell:
        import_engine()
    limit = 1e-4 if "ZeRO" in cell else 1e-10
    if (cell, kind) in REFUSED:
        with pytest.raises(RankFailed, match=r"FG762.*finds the last token of a row by the token ids"):
            run_ranks(world, figures, folder / cell / kind, folder, kind, settings)
        return
    for found, own in run_ranks(world, figures, folder / cell / kind, folder, kind, settings, timeout=120):
        assert found == pytest.approx(expected, rel=0, abs=limit)
        for name, value in own.items():
            torch.testing.assert_close(value.double(), weights[name].double(), rtol=0, atol=limit)
            # The figures of ZeRO are of single precision.
            precision = "difference in single precision" if limit > 1e-5 else "difference"
            record_property(precision, float((value.double() - weights[name].double()).abs().max()))


def offloaded_figures(*args):
    with moved_to_host() as moved:
        found = figures(*args, activation_offloading=True)
    assert moved
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("kind", LOSSES)
def test_activations_on_the_host_change_no_figure(alone, tmp_path, kind):
    folder, (expected, weights) = alone(kind)
    found, own = offloaded_figures(tmp_path, folder, kind, None)
    assert expected == found
    assert all(torch.equal(value, weights[name]) for name, value in own.items())
    for found, _ in run_ranks(2, offloaded_figures, tmp_path / "2", folder, kind, CELLS["FSDP2"][1], timeout=120):
        assert found == pytest.approx(expected, rel=0, abs=1e-10)


def test_another_setting_is_seen(alone, tmp_path):
    """The negative control: the figures tell a little other loss apart."""
    folder, (expected, _) = alone("dpo")
    found, _ = figures(tmp_path / "own", folder, "dpo", None, max_grad_norm=0.01)
    assert found != pytest.approx(expected, rel=0, abs=1e-6)
