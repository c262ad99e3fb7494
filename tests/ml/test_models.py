import random

import numpy as np
import pytest
import torch
from transformers import GPT2Config, LlamaConfig, ViTConfig

from forgather.ml.models import ModelConfigError, ModelSourceError, from_config, from_pretrained


@pytest.fixture
def config():
    return LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )


def weights(model):
    return torch.cat([parameter.detach().float().reshape(-1) for parameter in model.parameters()])


def test_weights_depend_on_the_seed_alone(config):
    torch.manual_seed(1)
    first = weights(from_config(config, seed=7))
    torch.manual_seed(2)
    assert torch.equal(weights(from_config(config, seed=7)), first)
    assert not torch.equal(weights(from_config(config, seed=8)), first)


def test_the_random_state_of_the_caller_is_untouched(config):
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    from_config(config)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_the_weights_are_those_of_transformers_under_the_same_seed(config):
    from transformers import LlamaForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(5)
        expected = weights(LlamaForCausalLM(config))
    assert torch.equal(weights(from_config(config, seed=5)), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_dtype_is_taken_by_name_or_value(config, dtype):
    torch_default = torch.get_default_dtype()
    assert {parameter.dtype for parameter in from_config(config, dtype=dtype).parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch_default


def test_the_config_is_copied_and_follows_a_tokenizer(config):
    class Tokens:
        bos_token_id, eos_token_id, pad_token_id = 3, 4, 5

        def __len__(self):
            return 100

    model = from_config(config, tokenizer=Tokens())
    assert model.get_input_embeddings().weight.shape[0] == 100
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (3, 4, 5)
    assert model.generation_config.eos_token_id == 4
    assert config.vocab_size == 64


@pytest.mark.parametrize(
    ("given", "way_out"),
    [
        (50, ["leave vocab_size out"]),
        (5000, ["--set model.tokenizer=null"]),
        (100, []),
        (32000, ["--set model.tokenizer=null"]),
    ],
)
def test_a_vocabulary_size_that_a_tokenizer_overrides_is_reported_once(caplog, given, way_out):
    class Tokens:
        bos_token_id, eos_token_id, pad_token_id = 3, 4, 5

        def __len__(self):
            return 100

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for _ in range(2):
        from_config(LlamaConfig(vocab_size=given, **shape), tokenizer=Tokens())
    said = [f"vocab_size is {given}, but the model gets the size of the tokenizer, 100"] * len(way_out)
    assert len(way_out) == len(caplog.messages)
    assert all(one in message for one, message in zip(said + way_out, caplog.messages * 2, strict=True))
    kept = from_config(LlamaConfig(vocab_size=given, **shape))
    assert given == kept.get_input_embeddings().weight.shape[0]


def test_building_and_loading_say_nothing_of_their_own(tmp_path, capfd, caplog):
    made = from_config(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0))
    made.save_pretrained(tmp_path)
    capfd.readouterr()
    ids = torch.tensor([[1, 2, 3]])
    expected, actual = (model.eval()(input_ids=ids, labels=ids).loss for model in (made, from_pretrained(tmp_path)))
    assert torch.equal(expected, actual)
    assert (("", ""), "") == (tuple(capfd.readouterr()), caplog.text)


def test_other_architectures_are_built_alike():
    model = from_config(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert model.training


@pytest.mark.parametrize("wrong", [{"hidden_size": 16}, "llama", None, ViTConfig()])
def test_something_else_than_a_causal_config_is_refused(wrong):
    with pytest.raises(ModelConfigError) as excinfo:
        from_config(wrong)
    assert excinfo.value.code == "FG842"
    assert excinfo.value.hint


def test_a_misspelt_dtype_gets_a_suggestion(config):
    with pytest.raises(ModelConfigError, match="did you mean 'bfloat16'"):
        from_config(config, dtype="bfloat")


def test_saved_weights_come_back(config, tmp_path):
    model = from_config(config)
    model.save_pretrained(tmp_path)
    assert torch.equal(weights(from_pretrained(tmp_path)), weights(model))


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ModelSourceError) as excinfo:
        from_pretrained(tmp_path)
    assert excinfo.value.code == "FG841"


def test_a_name_that_cannot_be_reached_is_named():
    with pytest.raises(ModelSourceError) as excinfo:
        from_pretrained("nobody/nothing", local_files_only=True)
    assert excinfo.value.code == "FG840"
    assert "nobody/nothing" in excinfo.value.message
    assert isinstance(excinfo.value, OSError)
