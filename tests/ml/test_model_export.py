"""The exported model is what `save_pretrained` writes, through the storage, and never half of it."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from forgather.errors import TrainingError
from forgather.ml.checkpoint.hf_layout import weight_files
from forgather.ml.checkpoint.model_folder import write_model
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.trainer.model_export import export_model
from tests.ml.fixtures import VOCAB, Regression, assert_same_weights, tiny_llama, weights


def tied_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2))


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4,
        )
    )  # fmt: skip


def qwen_moe():
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, head_dim=8,
        )
    )  # fmt: skip


def adapted():
    from peft import LoraConfig

    model = tiny_llama()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model


def peft_model():
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))


MODELS = {
    "llama": tiny_llama,
    "tied llama": lambda: tiny_llama(tie_word_embeddings=True),
    "bfloat16": lambda: tiny_llama().to(torch.bfloat16),
    "gpt2": tied_gpt2,
    "mixtral": mixtral,
    "qwen": qwen_moe,
    "adapter": adapted,
    "peft": peft_model,
}


def held(folder):
    """Returns what lies in a folder: each file, JSON as data, tensors by name."""
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as stream:
                found[f"{name} {stream.metadata()}"] = {key: stream.get_tensor(key) for key in sorted(stream.keys())}
        else:
            found[name] = json.loads(file.read_text()) if file.suffix == ".json" else file.read_bytes()
    return found


def assert_same_files(expected, actual):
    assert list(expected) == list(actual)
    for name, content in expected.items():
        if isinstance(content, dict) and any(isinstance(value, torch.Tensor) for value in content.values()):
            assert_same_weights(content, actual[name])
            assert {k: v.dtype for k, v in content.items()} == {k: v.dtype for k, v in actual[name].items()}
        else:
            assert content == actual[name], name


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_files_are_those_of_save_pretrained(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "theirs")
    export_model(LocalStorage(), model, model.state_dict(), tmp_path / "ours", None)
    assert_same_files(held(tmp_path / "theirs"), held(tmp_path / "ours"))


@pytest.mark.parametrize("make", [tiny_llama, tied_gpt2, mixtral])
def test_the_shards_are_those_of_save_pretrained(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    layout = weight_files(model, model.state_dict(), shard_size="20KB")
    assert 1 < len(layout.tensors)
    write_model(LocalStorage(), tmp_path / "ours", layout.write)
    theirs = {name: content for name, content in held(tmp_path / "theirs").items() if name.startswith("model")}
    assert_same_files(theirs, held(tmp_path / "ours"))


def test_a_plain_module_has_its_weights_alone(tmp_path):
    model = Regression()
    export_model(LocalStorage(), model, model.state_dict(), tmp_path, None)
    assert ["model.safetensors"] == [file.name for file in tmp_path.iterdir()]


def test_a_module_with_tied_weights_and_state_of_its_own_is_written(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.two.weight = self.one.weight

        def get_extra_state(self):
            return {"seen": 3}

        def set_extra_state(self, state):
            pass

    model = Own()
    export_model(LocalStorage(), model, model.state_dict(), tmp_path, None)
    assert "model.safetensors" in {file.name for file in tmp_path.iterdir()}


def test_the_mode_of_the_files_is_that_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        export_model(LocalStorage(), tiny_llama(), tiny_llama().state_dict(), tmp_path / "out", None)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert {0o640} == modes
    assert 0o750 == stat.S_IMODE((tmp_path / "out").stat().st_mode)


def write_layout(model, folder, shard_size, storage=None):
    def fill(draft):
        weight_files(model, model.state_dict(), shard_size=shard_size).write(draft)
        config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"]}
        draft.write("config.json", [json.dumps(config, default=str).encode()])

    write_model(storage or LocalStorage(), folder, fill)


SIZES = {"one file": "50GB", "shards": "60KB", "other shards": "40KB"}


@pytest.mark.parametrize("older", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("newer", SIZES.values(), ids=SIZES)
def test_weights_of_an_older_layout_go_and_everything_else_stays(tmp_path, older, newer):
    first, second = tiny_llama(0), tiny_llama(1)
    (tmp_path / "checkpoint-5").mkdir()
    for name in ("notes.txt", "model.bin", "model-00001-of-x.safetensors", "my_model.safetensors"):
        (tmp_path / name).write_text("mine")
    write_layout(first, tmp_path, older)
    write_layout(second, tmp_path, newer)
    assert_same_weights(weights(second), weights(AutoModelForCausalLM.from_pretrained(tmp_path)))
    write_layout(second, tmp_path / "fresh", newer)
    mine = {"notes.txt", "model.bin", "model-00001-of-x.safetensors", "my_model.safetensors", "checkpoint-5", "fresh"}
    fresh = {file.name for file in (tmp_path / "fresh").iterdir()}
    assert fresh | mine == {file.name for file in tmp_path.iterdir()}


class Dies(Exception):
    """The process ends here."""


class Numbered(LocalStorage):
    """Ends at the operation of a number; what comes after, a dead process does not do either."""

    def __init__(self, last):
        self.last, self.count = last, 0

    def _next(self):
        self.count += 1
        if self.count >= self.last:
            raise Dies


for _act in ("create", "make_folder", "rename", "remove_file", "remove_folder", "sync_folder"):

    def _counted(self, *given, _act=_act):
        self._next()
        return getattr(LocalStorage, _act)(self, *given)

    setattr(Numbered, _act, _counted)


@pytest.mark.parametrize("older", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("newer", ["50GB", "60KB"])
def test_whoever_loads_after_a_death_at_any_operation_gets_one_model_or_an_error(tmp_path, older, newer):
    first, second = tiny_llama(0), tiny_llama(1)
    expected = (weights(first), weights(second))
    unloadable, last = 0, 1
    while True:
        folder = tmp_path / str(last)
        write_layout(first, folder, older)
        storage = Numbered(last)
        try:
            write_layout(second, folder, newer, storage)
        except Dies:
            pass
        else:
            break
        unloadable += not _is_one_of(folder, expected)
        write_layout(second, folder, newer)
        assert not list(folder.glob(".saving*")) and _is_one_of(folder, expected[1:])
        last += 1
    assert last > 8
    # Shards that take the names of older ones: nothing can be loaded between the first and the last of them.
    assert (unloadable > 0) == (older == newer == "60KB")


def _is_one_of(folder, expected):
    try:
        found = weights(AutoModelForCausalLM.from_pretrained(folder))
    except OSError:
        return False
    assert any(all(torch.equal(one[name], found[name]) for name in one) for one in expected)
    return True


def test_a_folder_in_the_place_of_a_file_is_refused_before_anything_is_moved(tmp_path):
    first, second = tiny_llama(0), tiny_llama(1)
    export_model(LocalStorage(), first, first.state_dict(), tmp_path, None)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="FG817"):
        export_model(LocalStorage(), second, second.state_dict(), tmp_path, None)
    assert before == (tmp_path / "model.safetensors").read_bytes()
    assert not list(Path(tmp_path).glob(".saving*"))
