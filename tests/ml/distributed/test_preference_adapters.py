"""Losses of preferences with an adapter: equal to a loop with peft alone, in one process and in several, and resumed.

The reference of a new adapter is the model with its adapter disabled; that of an adapter which was trained before is a
frozen copy of it. The loop below says so in so many words.
"""

import copy
import json
import logging
import math
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from forgather.errors import CheckpointError, DistributedError, TrainingError
from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.data import PreferenceCollator
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.models import from_pretrained
from forgather.ml.preference_losses import DPOLoss, KTOLoss, ORPOLoss
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.strategy.state import on_host
from tests.matrix import thinned
from tests.ml import preference_cases as cases
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import Recorder, StopAt, assert_same_weights
from tests.ml.test_preference_losses import plain_logps
from tests.patience import patience

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
SEED, STEPS, RATE = 42, 3, 5e-2
NEW = {"r": 4, "lora_alpha": 16}
ADAPTERS = {
    "new": NEW,
    "DoRA": {**NEW, "use_dora": True},
    "head and tokens": {**NEW, "modules_to_save": ["lm_head"], "trainable_token_indices": [3, 9]},
    "trained before": None,
}
LOSSES = {
    "dpo": lambda: DPOLoss(beta=0.3),
    "orpo": lambda: ORPOLoss(beta=0.3, includes_prompt=False),
    "kto": lambda: KTOLoss(beta=0.3),
}
ANSWERS = {"dpo": ("chosen_ids", "rejected_ids"), "kto": ("completion_ids", "kl_ids")}
FEEDBACK = cases.FEEDBACK[:4]
# Processes, rows of a replica, trainer, arguments, settings.
LAYOUTS = {
    "one": (1, 4, Trainer, TrainingArguments, {}),
    "DDP": (2, 2, AccelTrainer, AccelTrainingArguments, {}),
    "FSDP2": (2, 2, AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "1F1B": (2, 4, PipelineTrainer, PipelineTrainingArguments, {"pipeline_chunks": 2}),
}
LIMIT = 1e-10


def rows_of(loss):
    return FEEDBACK if loss == "kto" else cases.PAIRS


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of the base model; an adapter that was trained before is in `sft` there."""
    folder = tmp_path_factory.mktemp("base")
    cases.language_model(1).double().save_pretrained(folder)
    torch.manual_seed(1)
    adapted = get_peft_model(
        from_pretrained(folder), LoraConfig(**NEW, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.sin(torch.arange(weight.numel(), dtype=weight.dtype)).view(weight.shape) * 0.1)
    adapted.save_pretrained(folder / "sft")
    # Without the name of its base model, an adapter fits a copy of the folder.
    config = folder / "sft/adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def trainer_of(folder, base, layout, loss, adapter, callbacks=(), **settings):
    ranks, rows, trainer, arguments, given = LAYOUTS[layout]
    plain = {
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "weight_decay": 0.0,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "seed": SEED,
    }
    several = {"timeout_seconds": patience(30), "start_timeout_seconds": patience(30)}
    return trainer(
        lambda: from_pretrained(base),
        arguments(str(folder), use_cpu=True, **{**plain, **given, **settings}),
        train_dataset=rows_of(loss),
        eval_dataset=rows_of(loss),
        data_collator=PreferenceCollator(),
        loss_fn=LOSSES[loss](),
        adapter={"path": base / "sft"} if adapter == "trained before" else ADAPTERS[adapter],
        callbacks=callbacks,
        **({"distributed_env": DistributedEnvironment(**several)} if ranks > 1 else {}),
    )


def ours(folder, base, layout, loss, adapter):
    """Returns the losses, the metrics of an evaluation after the last step, and the weights that are trained."""
    recorder = Recorder()
    trainer = trainer_of(folder, base, layout, loss, adapter, [recorder])
    trainer.train()
    found = {name: value for name, value in trainer.evaluate().items() if "rewards" in name or name == "eval_loss"}
    state = on_host(trainer.strategy.export(), keep=True)
    return [line["loss"] for line in recorder.lines if "loss" in line], found, trained_of(state)


def trained_of(state):
    marks = ("lora_", ".modules_to_save.", "trainable_tokens_delta")
    return {name: value.detach() for name, value in state.items() if any(mark in name for mark in marks)}


def losses_of(loss, model, rows, references):
    """Returns the loss of each row: the formulas of the papers, row by row."""
    if loss == "dpo":
        for row, (good, bad) in zip(rows, references, strict=True):
            ratio = plain_logps(model, row["prompt_ids"], row["chosen_ids"]) - good
            yield -F.logsigmoid(0.3 * (ratio - plain_logps(model, row["prompt_ids"], row["rejected_ids"]) + bad))
    elif loss == "kto":
        with torch.no_grad():
            logps = [plain_logps(model, row["prompt_ids"], row["kl_ids"]) for row in rows]
        divergence = sum(logp - other for logp, (_, other) in zip(logps, references, strict=True)) / len(rows)
        for row, (own, _) in zip(rows, references, strict=True):
            ratio = plain_logps(model, row["prompt_ids"], row["completion_ids"]) - own
            gain = 0.3 * (ratio - max(divergence, torch.zeros(())))
            yield torch.sigmoid(-gain if row["label"] else gain)
    else:
        for row in rows:
            good, bad = (
                plain_logps(model, row["prompt_ids"], row[name]) / len(row[name])
                for name in ("chosen_ids", "rejected_ids")
            )
            odds = [torch.log(torch.exp(mean) / (1 - torch.exp(mean))) for mean in (good, bad)]
            yield -good - 0.3 * F.logsigmoid(odds[0] - odds[1])


def plain_loop(base, loss, adapter, *, scored=None):
    """Trains with torch and peft alone; `scored` is the model whose answers are the reference, if another one is."""
    torch.manual_seed(SEED)
    if adapter == "trained before":
        model = PeftModel.from_pretrained(from_pretrained(base), base / "sft", is_trainable=True, torch_device="cpu")
        reference = copy.deepcopy(model)
    else:
        given = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **ADAPTERS[adapter]}
        model = get_peft_model(from_pretrained(base), LoraConfig(**given))
        reference = from_pretrained(base)
    rows, references = rows_of(loss), [None] * 4
    with torch.no_grad():
        if loss in ANSWERS:
            references = [
                [plain_logps(scored or reference, row["prompt_ids"], row[name]) for name in ANSWERS[loss]]
                for row in rows
            ]
    parameters = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        total = sum(losses_of(loss, model, rows, references)) / len(rows)
        total.backward()
        losses.append(total.item())
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        found = float(sum(losses_of(loss, model, rows, references)) / len(rows))
    return losses, found, trained_of(model.state_dict())


@pytest.fixture(scope="module")
def plain(base):
    known = {}

    def of(*case):
        if case not in known:
            known[case] = plain_loop(base, *case)
        return known[case]

    return of


QUICK = {
    ("one", "dpo", "new"),
    ("one", "dpo", "trained before"),
    ("one", "kto", "head and tokens"),
}


@pytest.mark.parametrize(
    ("layout", "loss", "adapter"),
    thinned(
        [(layout, loss, adapter) for layout in LAYOUTS for loss in LOSSES for adapter in ADAPTERS],
        lambda *case: case in QUICK,
    ),
)
def test_a_training_equals_a_loop_with_peft(tmp_path, base, plain, layout, loss, adapter):
    losses, evaluated, state = plain(loss, adapter)
    for found, metrics, own in run_ranks(LAYOUTS[layout][0], ours, tmp_path, base, layout, loss, adapter):
        assert found == pytest.approx(losses, rel=0, abs=LIMIT)
        assert metrics["eval_loss"] == pytest.approx(evaluated, rel=0, abs=LIMIT)
        assert own.keys() == state.keys()
        assert max(float((own[name] - state[name]).abs().max()) for name in own) <= LIMIT
    if loss == "dpo":
        assert losses[0] == pytest.approx(math.log(2), rel=0, abs=1e-6)


def divided(folder, base):
    with pytest.raises(DistributedError, match="context_parallel_size is 2, and") as caught:
        trainer_of(folder, base, "DDP", "dpo", "new", context_parallel_size=2, data_parallel_size=1)
    return caught.value.code


def test_rows_of_preferences_are_not_divided_and_have_no_loss_without_logits(tmp_path, base):
    assert ["FG757"] * 2 == run_ranks(2, divided, tmp_path, base)
    with pytest.raises(TrainingError, match="linear_cross_entropy is True") as caught:
        trainer_of(tmp_path, base, "one", "dpo", "new", linear_cross_entropy=True)
    assert caught.value.code == "FG716"


def test_another_reference_gives_other_losses(base, plain):
    """The negative control: the model without its adapter is not the reference of an adapter that was trained before."""
    losses, *_ = plain("dpo", "trained before")
    others, *_ = plain_loop(base, "dpo", "trained before", scored=from_pretrained(base))
    assert max(abs(one - other) for one, other in zip(losses, others, strict=True)) > 1e-3
    assert others[0] != pytest.approx(math.log(2), abs=1e-3)


def stopped_and_resumed(folder, base, layout, loss, adapter, *, keeps_cache=True):
    """Returns the weights, and the losses, of a run without a stop and of one that was stopped after two steps."""
    found = []
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    for name, callbacks in (("whole", ()), ("cut", [StopAt(2)]), ("cut", ())):
        recorder = Recorder()
        trainer = trainer_of(folder / name, base, layout, loss, adapter, [recorder, *callbacks], **saving)
        trainer.train(resume_from_checkpoint=True)
        losses = [line["loss"] for line in recorder.lines if "loss" in line]
        found.append((losses, on_host(trainer.strategy.export(), keep=True)))
        if not keeps_cache:
            shutil.rmtree(folder / "cache", ignore_errors=True)
    return found


@pytest.mark.matrix
@pytest.mark.parametrize(("loss", "adapter"), [("dpo", "trained before"), ("kto", "new")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resumed_run_is_bit_equal(tmp_path, base, layout, loss, adapter):
    ranks = LAYOUTS[layout][0]
    for keeps in (True, False):
        for whole, cut, rest in run_ranks(
            ranks, _resumed, tmp_path / str(keeps), base, layout, loss, adapter, keeps, timeout=120
        ):
            assert whole[0] == [*cut[0], *rest[0]]
            assert_same_weights(whole[1], rest[1])


def _resumed(folder, base, layout, loss, adapter, keeps):
    pytest.MonkeyPatch().setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return stopped_and_resumed(folder, base, layout, loss, adapter, keeps_cache=keeps)


@pytest.fixture
def predictions(monkeypatch):
    """The number of forward passes without a loss: only the reference needs them."""
    calls, predict = [], ModelStrategy.predict
    monkeypatch.setattr(ModelStrategy, "predict", lambda self, batch: calls.append(1) or predict(self, batch))
    return calls


def first_loss(folder, base, adapter):
    trainer = trainer_of(folder, base, "one", "dpo", adapter)
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("file", "change"), [("sft/adapter_config.json", {"lora_alpha": 160}), ("config.json", {"rms_norm_eps": 0.5})]
)
def test_the_cache_tells_settings_apart_that_change_what_the_weights_compute(tmp_path, base, file, change, predictions):
    """The weights are the same, and the reference is not: the first loss shows which one was read."""
    other = shutil.copytree(base, tmp_path / "other")
    settings = json.loads((other / file).read_text())
    (other / file).write_text(json.dumps({**settings, **change}))
    for folder in (base, other):
        assert first_loss(tmp_path / "out", folder, "trained before") == pytest.approx(math.log(2), rel=0, abs=1e-6)
    # Two batches for the reference and two for the loss, of each model; then the same again from the cache.
    assert len(predictions) == (2 + 0) * 2


@pytest.mark.filterwarnings("ignore:Detected call of")
def test_another_reference_is_refused_when_a_run_resumes_and_other_batches_are_not(tmp_path, base):
    own = shutil.copytree(base, tmp_path / "own")
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}

    def resumed(**settings):
        trainer = trainer_of(tmp_path / "out", own, "one", "dpo", "trained before", [StopAt(2)], **saving, **settings)
        trainer.train(resume_from_checkpoint=True)

    resumed()
    shutil.rmtree(tmp_path / "cache")
    resumed(per_device_eval_batch_size=3)
    file = own / "sft/adapter_model.safetensors"
    save_file({name: value * 1.5 for name, value in load_file(file).items()}, file, {"format": "pt"})
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    with pytest.raises(CheckpointError, match="4 of 4 compared rows differ in 'reference_logps'") as refused:
        resumed()
    assert refused.value.code == "FG610"


def test_the_dropout_of_an_adapter_is_reported(tmp_path, base, caplog, monkeypatch):
    monkeypatch.setitem(ADAPTERS, "dropout", {**NEW, "lora_dropout": 0.1})
    with caplog.at_level(logging.WARNING):
        trainer_of(tmp_path, base, "one", "dpo", "dropout")
    assert "drops activations at random (lora_dropout 0.1), and its reference does not" in caplog.text
