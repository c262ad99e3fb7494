"""A folder that a run, a save or an export writes is loaded as the model that it is, or cannot be loaded at all."""

import json
import logging

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.checkpoint.export import export_checkpoint
from forgather.ml.checkpoint.hf_layout import load_mismatch
from forgather.ml.checkpoint.manifest import verify
from forgather.ml.checkpoint.rng import capture_rng
from tests.cli.checkpoint_folders import forge
from tests.ml.fixtures import Regression, regression_rows, rows, tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, where peft asks it
IDS = rows(1)[0]["input_ids"][None]


class Holding(nn.Module):
    """A module that holds a model of transformers, and shows its configuration."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_llama()
        self.config = self.inner.config

    def forward(self, input_ids, labels=None):
        return self.inner(input_ids=input_ids, labels=labels)


def peft_of(base, kind, **given):
    import peft

    settings = {
        "lora": lambda: peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "ia3": lambda: peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[], task_type="CAUSAL_LM"),
    }[kind]()
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)


def adapted(base):
    from peft import LoraConfig

    model = AutoModelForCausalLM.from_pretrained(base)
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model


def with_another_head(base):
    model = tiny_llama()
    model.lm_head = nn.Sequential(model.lm_head)
    return model


MODELS = {
    "a model of transformers": (lambda base: tiny_llama(), {"run", "output", "export"}),
    "tied weights": (lambda base: tiny_llama(tie_word_embeddings=True), {"run", "output", "export"}),
    "compiled": (lambda base: torch.compile(tiny_llama(), backend="eager"), {"output"}),
    "LoRA of peft": (lambda base: peft_of(base, "lora"), {"output"}),
    "IA3 of peft": (lambda base: peft_of(base, "ia3"), {"output"}),
    "an adapter in the model": (adapted, {"output"}),
    "what peft put into a model": (lambda base: peft_of(base, "lora").base_model.model, set()),
    "another head": (with_another_head, set()),
    "a module that holds a model": (lambda base: Holding(), set()),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    place = tmp_path_factory.mktemp("base")
    tiny_llama().save_pretrained(place)
    return str(place)


def loaded(folder):
    """Returns the logits of a folder's model; None where it cannot be loaded."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_is_loaded_as_what_it_is_or_not_at_all(settings, base, name, tmp_path):
    make, expected = MODELS[name]
    args = settings(max_steps=2, save_strategy="steps", save_steps=2)
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        trainer = Trainer(make(base), args, train_dataset=rows())
        with torch.enable_grad():
            trainer.train()
        logits = trainer.model.eval()(input_ids=IDS).logits
    run = tmp_path / "out/checkpoint-2"
    verify(run)
    found = {"run": loaded(run), "output": loaded(tmp_path / "out")}
    try:
        export_checkpoint(run, tmp_path / "export")
        found["export"] = loaded(tmp_path / "export")
    except CheckpointError as error:
        assert "FG612" == error.code and "remove" not in str(error) and "corrupt" not in str(error)
    present = {place: one for place, one in found.items() if one is not None}
    assert expected == set(present)
    for place, one in present.items():
        torch.testing.assert_close(one, logits, rtol=0, atol=1e-5, msg=place)


def test_a_run_goes_on_from_a_checkpoint_that_cannot_be_loaded(settings, base):
    def trainer(**given):
        args = settings(save_strategy="steps", save_steps=2, **given)
        return Trainer(peft_of(base, "lora"), args, train_dataset=rows())

    trainer(max_steps=2).train()
    later = trainer(max_steps=4)
    later.train(resume_from_checkpoint=True)
    assert 4 == later.state.global_step


@pytest.mark.parametrize(
    ("first", "second"), [("a model of transformers", "another head"), ("LoRA of peft", "a model of transformers")]
)
def test_what_an_older_model_said_of_its_weights_is_not_read_of_newer_ones(settings, base, first, second, tmp_path):
    for name in (first, second):
        Trainer(MODELS[name][0](base), settings(), train_dataset=rows()).save_model(tmp_path / "out")
    logits = loaded(tmp_path / "out")
    if second == "another head":
        assert logits is None
    else:
        with torch.no_grad():
            torch.testing.assert_close(tiny_llama().eval()(input_ids=IDS).logits, logits)


def test_a_checkpoint_of_an_earlier_release_is_refused_or_repaired(settings, base, tmp_path):
    """It has a configuration beside weights that are not those of its class."""
    for name, is_refused in (("LoRA of peft", True), ("a module that holds a model", True), ("compiled", False)):
        out = tmp_path / name
        args = settings(max_steps=1, save_strategy="steps", save_steps=1, output_dir=str(out))
        with torch.compiler.set_stance("force_eager"):
            Trainer(MODELS[name][0](base), args, train_dataset=rows()).train()
        config = {**tiny_llama().config.to_dict(), "architectures": None if is_refused else ["LlamaForCausalLM"]}
        forge(out / "checkpoint-1", "config.json", json.dumps(config, default=str).encode())
        if is_refused:
            with pytest.raises(CheckpointError, match="FG612"):
                export_checkpoint(out / "checkpoint-1", out / "export")
        else:
            export_checkpoint(out / "checkpoint-1", out / "export")
            assert torch.equal(loaded(out), loaded(out / "export"))


def test_the_end_of_a_run_says_that_its_model_cannot_be_loaded(settings, caplog, tmp_path):
    Trainer(with_another_head(None), settings(), train_dataset=rows()).save_model(tmp_path / "out")
    assert "is written without its configuration, and cannot be loaded: they are not those of Llama" in caplog.text


def test_an_own_module_is_exported_under_the_names_that_it_has(settings, tmp_path):
    args = settings(max_steps=1, save_strategy="steps", save_steps=1)
    Trainer(Regression(), args, train_dataset=regression_rows()).train()
    export_checkpoint(tmp_path / "out/checkpoint-1", tmp_path / "export")
    assert {"model.safetensors", "SHA256SUMS", "export.json"} == {file.name for file in (tmp_path / "export").iterdir()}


def test_to_look_at_a_class_draws_no_random_number():
    model = tiny_llama()
    before = capture_rng()
    assert load_mismatch(model) is None
    assert str(before) == str(capture_rng())


@pytest.mark.parametrize(
    "facts", [{"num_hidden_layers": 10**9}, {"model_type": "no such type"}, {"vocab_size": -1}, {"hidden_size": "x"}]
)
def test_a_configuration_that_is_none_is_one_error(settings, tmp_path, caplog, facts):
    caplog.set_level(logging.INFO)
    args = settings(max_steps=1, save_strategy="steps", save_steps=1)
    Trainer(tiny_llama(), args, train_dataset=rows()).train()
    config = {**tiny_llama().config.to_dict(), "architectures": ["LlamaForCausalLM"], **facts}
    forge(tmp_path / "out/checkpoint-1", "config.json", json.dumps(config, default=str).encode())
    with pytest.raises(CheckpointError, match="FG61[12]"):
        export_checkpoint(tmp_path / "out/checkpoint-1", tmp_path / "export")
