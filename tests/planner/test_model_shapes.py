"""The shapes of well-known models: the number of parameters that formulas use is that of the model itself."""

import pytest

from forgather.errors import PlanError
from forgather.planner.architectures import least_parameters
from forgather.planner.model_shapes import model_family, model_shape, shape_names
from tests.matrix import thinned

QUICK = ("facebook/opt-350m", "Qwen/Qwen3-8B", "google/flan-t5-small")


@pytest.mark.parametrize("name", shape_names())
def test_the_formula_gives_the_published_number_of_parameters(name):
    shape = model_shape(name)
    assert shape.published_parameters == shape.parameters
    assert name == shape.name


@pytest.mark.parametrize("name", thinned(shape_names(), lambda name: name in QUICK))
def test_the_model_that_transformers_builds_has_these_parameters(name):
    torch = pytest.importorskip("torch")
    import transformers

    shape = model_shape(name)
    sizes = dict(shape.config)
    if shape.traced is not None:
        diffusers = pytest.importorskip("diffusers")
        del sizes["model_type"]
        with torch.device("meta"):
            unet = getattr(diffusers, shape.model_class)(**sizes)
        assert shape.parameters == sum(parameter.numel() for parameter in unet.parameters())
        blocks = [m for m in unet.modules() if type(m).__name__ == "BasicTransformerBlock"]
        assert len(blocks) == sum(block.count for block in shape.blocks)
        assert shape.block_parameters == sum(p.numel() for block in blocks for p in block.parameters())
        return
    config = transformers.AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device("meta"):
        model = getattr(transformers, shape.model_class).from_config(config)
    # transformers 5 ties the output layer of Flan-T5, which its checkpoints have on their own.
    head = model.lm_head.weight.numel() if shape.config.get("feed_forward_proj") == "gated-gelu" else 0
    assert shape.parameters == head + sum(parameter.numel() for parameter in model.parameters())
    blocks = max((len(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)), default=0)
    assert blocks == max(block.count for block in shape.blocks)
    if shape.family != "vision":
        assert shape.vocab_size == config.vocab_size


def test_the_least_number_is_exact_where_all_is_given():
    known = {name: number for name in shape_names() if (number := least_parameters(model_shape(name).config))}
    assert known == {name: model_shape(name).parameters for name in known}
    families = {model_shape(name).config["model_type"] for name in known}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3"}
    assert least_parameters({"model_type": "llama", "hidden_size": "wide"}) is None


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "gemma", "gemma2", "phi3"])
def test_no_default_of_transformers_makes_a_model_smaller(family):
    torch = pytest.importorskip("torch")
    import transformers

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 16}
    config = transformers.AutoConfig.for_model(family, **sizes, pad_token_id=0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    least = least_parameters({"model_type": family, **sizes})
    assert 0 < least < sum(parameter.numel() for parameter in model.parameters())


def test_a_name_is_found_without_its_owner_and_by_other_names():
    assert "huggyllama/llama-7b" == model_shape("llama-7b").name
    assert "google-t5/t5-small" == model_shape("T5-small").name
    assert "meta-llama/Llama-2-7b-hf" == model_shape("llama2-7b").name


def test_an_unknown_name_gets_the_near_ones():
    with pytest.raises(PlanError, match="FG998.*'lama-7b'.*did you mean 'huggyllama/llama-7b'"):
        model_shape("lama-7b")
    with pytest.raises(PlanError, match="FG998.*'text_generatoin'.*did you mean 'text_generation'"):
        model_family("text_generatoin")
