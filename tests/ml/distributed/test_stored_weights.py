"""A loaded model is read slice by slice by each rank, and has the values that the library loads."""

import functools
import json
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from forgather.ml.models import from_pretrained
from forgather.ml.strategy import seed_checkpoint
from forgather.ml.strategy.initial_weights import make_initial_weights
from forgather.ml.strategy.meta_model import tensors_of
from forgather.ml.strategy.stored_weights import stored_weights
from forgather.ml.trainer.model_source import stored_in
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.test_initial import recipe_of, started

LLAMA = LlamaConfig(
    hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2,
    vocab_size=64, tie_word_embeddings=True, pad_token_id=0,
)  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LLAMA),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16)),
    "mixtral": lambda: MixtralForCausalLM(
        MixtralConfig(
            hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
            vocab_size=64, num_local_experts=2,
        )
    ),
}  # fmt: skip


def loaded(folder, options):
    make = functools.partial(from_pretrained, folder, **options)
    topology = started()
    recipe = recipe_of(make, stored_in=stored_in(make, None))
    folders = []
    mkdtemp = tempfile.mkdtemp
    tempfile.mkdtemp = lambda *args, **kwargs: folders.append(1) or mkdtemp(*args, **kwargs)
    weights = make_initial_weights(recipe, topology)
    model = weights.on_meta()
    assert model.training
    fully_shard(model)
    weights.fill(model)
    expected = make()
    by_name = {fqn: tensor for fqn, _, _, tensor in tensors_of(expected)}
    found = {fqn: tensor for fqn, _, _, tensor in tensors_of(model)}
    assert list(by_name) == list(found)
    for fqn, tensor in found.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert full.dtype == by_name[fqn].dtype
        assert torch.equal(full, by_name[fqn]), fqn
    assert expected.config.to_dict() == model.config.to_dict()
    assert expected.generation_config.to_dict() == model.generation_config.to_dict()
    return len(folders)


@pytest.fixture(autouse=True)
def no_cache(monkeypatch):
    # The cache of one process's weights would hide who reads what.
    monkeypatch.setattr(seed_checkpoint, "MAX_BYTES", 0)


@pytest.mark.parametrize(
    ("name", "options", "shard_size"),
    thinned(
        [("llama", {}, "5GB"), ("gpt2", {"dtype": "bfloat16"}, "20KB")], lambda name, options, size: name == "gpt2"
    ),
)
def test_each_rank_reads_its_slices(name, options, shard_size, tmp_path):
    MODELS[name]().save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").is_file() == (shard_size == "20KB")
    assert [0, 0] == run_ranks(2, loaded, tmp_path, options)


def rename(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): one for name, one in weights.items()}, folder / "model.safetensors")


def remove(folder):
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def add(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_version": "4.0.0"}))
    weights = load_file(folder / "model.safetensors")
    weights["model.extra"] = torch.ones(3)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "change"),
    thinned(
        [("mixtral", None), ("llama", rename), ("llama", remove), ("llama", add)], lambda name, change: change is remove
    ),
)
def test_one_process_loads_a_model_whose_files_have_other_names(name, change, tmp_path):
    MODELS[name]().save_pretrained(tmp_path)
    if change is not None:
        change(tmp_path)
    assert [1, 0] == run_ranks(2, loaded, tmp_path, {})


def test_only_a_function_that_loads_a_folder_is_read_by_slices(tmp_path):
    assert tmp_path == stored_in(functools.partial(from_pretrained, tmp_path), None)
    assert stored_in(functools.partial(from_pretrained, tmp_path), object()) is None
    assert stored_in(functools.partial(from_pretrained, tmp_path, revision="main"), None) is None
    assert stored_in(functools.partial(from_pretrained, tmp_path, upcast_unquantized=True), None) is None
    assert stored_in(functools.partial(from_pretrained, "owner/name"), None) is None
    assert stored_in(MODELS["llama"], None) is None
    assert stored_in(None, None) is None


def test_tied_weights_that_are_stored_twice_are_left_to_the_library(tmp_path):
    LlamaForCausalLM(LLAMA).save_pretrained(tmp_path)
    make = functools.partial(from_pretrained, str(tmp_path))
    assert stored_weights(make, tmp_path) is not None
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    save_file({**stored, "lm_head.weight": stored["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    whole = make()
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    # Without values, the library does not tie them: read by slices, they would be trained apart.
    assert stored_weights(make, tmp_path) is None
