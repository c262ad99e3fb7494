"""Checkpoints of a run with an adapter, and the folder that it leaves: peft reads it, and a resumed run is the same."""

import json
import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.adapter_base import read_base
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.models import from_pretrained
from tests.matrix import thinned
from tests.ml.fixtures import StopAt, rows, tiny_llama
from tests.ml.test_adapters import KINDS, distance, settings

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "save_only_model": False}
DROPOUT = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.2}


@pytest.fixture
def base(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run(folder, base, adapter, *, stop=None, resume=False, seed=42, **changes):
    model = base if callable(base) else (lambda: from_pretrained(base))
    args = settings(folder, **{**SAVING, "seed": seed, **changes})
    callbacks = [StopAt(stop)] if stop else []
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=callbacks, adapter=adapter)
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    "kind",
    # tests/reliability/test_adapter_kills.py resumes dropout with tokens.
    thinned(["LoRA", "PiSSA", "names, biases and a head", "tokens", "dropout"], lambda kind: kind == "tokens"),
)
def test_a_resumed_run_is_bit_for_bit_the_run_that_was_never_stopped(tmp_path, base, kind):
    adapter = KINDS.get(kind, DROPOUT)
    whole, losses = run(tmp_path / "whole", base, adapter)
    run(tmp_path / "stopped", base, adapter, stop=4)
    again, theirs = run(tmp_path / "stopped", base, adapter, resume=True)
    assert losses == theirs
    assert distance(whole.model.state_dict(), again.model.state_dict()) == 0
    one, other = (dict(whole_weights(tmp_path / name / "checkpoint-6")) for name in ("whole", "stopped"))
    assert distance(one, other) == 0


def test_a_checkpoint_holds_the_adapter_and_names_the_base(tmp_path, base):
    trainer, _ = run(tmp_path / "out", base, KINDS["names, biases and a head"])
    folder = tmp_path / "out" / "checkpoint-6"
    kept = {name for name, _ in whole_weights(folder)}
    assert {name for name, weight in trainer.model.named_parameters() if weight.requires_grad} == kept
    found = read_base(folder)
    assert (found.name, len(found.digest)) == (str(base), 32)
    assert found == read_base(tmp_path / "out")
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("kind", thinned([*KINDS, "dropout"], lambda kind: kind in ("DoRA", "PiSSA", "tokens")))
def test_peft_loads_the_final_folder_with_equal_logits(tmp_path, base, kind, record_property):
    trainer, _ = run(tmp_path / "out", base, KINDS.get(kind, DROPOUT))
    ids = rows(2)[1]["input_ids"][None]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(from_pretrained(base), tmp_path / "out").eval()
        plain = from_pretrained(base).eval()(input_ids=ids).logits
        difference = float((loaded(input_ids=ids).logits - expected).abs().max())
        assert difference <= 1e-6
        record_property("difference", difference)
    # A negative control: the adapter has an effect.
    assert float((plain - expected).abs().max()) > 1e-3
    with safe_open(tmp_path / "out" / "adapter_model.safetensors", "pt") as stored:
        assert not any("base_layer" in name for name in stored.keys())  # noqa: SIM118


def test_another_base_is_refused_when_a_run_resumes(tmp_path, base):
    run(tmp_path / "out", base, KINDS["LoRA"], stop=4)
    other = tmp_path / "other"
    tiny_llama(seed=3).save_pretrained(other)
    with pytest.raises(CheckpointError, match=r"an adapter of '.*base' \(digest .*\), and .* is '.*other'") as refused:
        run(tmp_path / "out", other, KINDS["LoRA"], resume=True)
    assert refused.value.code == "FG906"
    # The same weights in another folder are the same base.
    run(tmp_path / "out", base.rename(tmp_path / "moved"), KINDS["LoRA"], resume=True)


def test_a_base_with_random_weights_is_the_same_only_with_the_same_seed(tmp_path):
    example = tiny_llama()

    def random_base():
        return type(example)(example.config)

    run(tmp_path, random_base, KINDS["LoRA"], stop=4, data_seed=42)
    run(tmp_path, random_base, KINDS["LoRA"], stop=5, resume=True, data_seed=42)
    with pytest.raises(CheckpointError, match="the checkpoint holds an adapter of a model without a name") as refused:
        run(tmp_path, random_base, KINDS["LoRA"], resume=True, seed=43, data_seed=42)
    assert refused.value.code == "FG906"


def test_changed_settings_are_refused_when_a_run_resumes(tmp_path, base):
    run(tmp_path / "out", base, KINDS["LoRA"], stop=4)
    with pytest.raises(CheckpointError, match="lora_alpha is 16, and was 8") as refused:
        run(tmp_path / "out", base, {**KINDS["LoRA"], "lora_alpha": 16}, resume=True)
    assert refused.value.code == "FG613"
    with pytest.raises(CheckpointError, match="r is 8, and was 4"):
        run(tmp_path / "out", base, {**KINDS["LoRA"], "r": 8}, resume=True)


def test_a_model_that_the_config_wrapped_itself_is_kept_alike(tmp_path, base):
    def wrapped():
        return get_peft_model(from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    run(tmp_path / "out", wrapped, None, stop=4)
    folder = tmp_path / "out" / "checkpoint-4"
    assert all(".lora_" in name for name, _ in whole_weights(folder))
    assert read_base(folder).name == str(base)
    _, losses = run(tmp_path / "out", wrapped, None, resume=True)
    assert run(tmp_path / "whole", wrapped, None)[1] == losses


def test_a_checkpoint_that_also_holds_the_base_is_resumed(tmp_path, base, monkeypatch):
    # As earlier releases wrote it: all weights, and no file about the base.
    with monkeypatch.context() as patched:
        patched.setattr("forgather.ml.trainer.model_setup.note_base", lambda *args: None)
        patched.setattr("forgather.ml.adapters.note_base", lambda *args: None)
        run(tmp_path / "out", base, KINDS["LoRA"], stop=4)
    kept = {name for name, _ in whole_weights(tmp_path / "out" / "checkpoint-4")}
    assert any("base_layer" in name for name in kept)
    _, losses = run(tmp_path / "out", base, KINDS["LoRA"], resume=True)
    assert run(tmp_path / "whole", base, KINDS["LoRA"])[1] == losses


def test_the_best_adapter_is_the_final_one(tmp_path, base):
    given = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.5}
    args = settings(tmp_path / "out", **{**SAVING, **given})
    model = from_pretrained(base)
    trainer = Trainer(model, args, train_dataset=rows(), eval_dataset=rows(4, seed=2), adapter=KINDS["LoRA"])
    trainer.train()
    best = dict(whole_weights(tmp_path / "out" / f"checkpoint-{trainer.state.best_global_step}"))
    assert trainer.state.best_global_step < 6
    assert all(torch.equal(value, trainer.model.state_dict()[name]) for name, value in best.items())


def test_the_summary_counts_the_trainable_parameters(tmp_path, base, capsys):
    from forgather.ml.callbacks.summary import RunSummaryCallback

    args = settings(tmp_path / "out", max_steps=1, logging_dir=str(tmp_path / "run"))
    adapter = {"r": 1, "target_modules": ["q_proj"]}
    callbacks = [RunSummaryCallback(report=False)]
    Trainer(from_pretrained(base), args, train_dataset=rows(), callbacks=callbacks, adapter=adapter).train()
    facts = json.loads((tmp_path / "run" / "summary.json").read_text())["model"]
    assert (facts["num_trainable"], facts["num_parameters"]) == (128, 21_792)
    assert "trainable  128 of 21,792 parameters (0.59 %)" in capsys.readouterr().out


def test_nothing_is_logged_about_a_model_without_an_adapter(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path, tiny_llama, None, max_steps=1)
    assert "trainable" not in caplog.text
    assert not (tmp_path / "base_model.json").exists()
