"""The model of a folder is the one that was trained: each kind, each type of weights, whole and as an adapter."""

import pytest
import torch
from transformers import GemmaConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, MixtralConfig, Phi3Config, Qwen3Config

from forgather.ml import Trainer
from forgather.ml.generation.generator import CONTEXT, Generator, Sampling
from forgather.ml.generation.loading import LoadingError, RecordNeeded, Source, load_for_generation
from forgather.ml.models import from_config, from_pretrained
from tests.matrix import thinned
from tests.ml.chat_cases import byte_pairs
from tests.ml.fixtures import rows
from tests.ml.test_adapters import KINDS, settings

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40,
}
CONFIGS = {
    "Llama": lambda: LlamaConfig(**SIZES),
    "Llama, tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "Qwen": lambda: Qwen3Config(**SIZES, head_dim=8),
    "Gemma": lambda: GemmaConfig(**SIZES, head_dim=8),
    "Phi": lambda: Phi3Config(**SIZES, pad_token_id=0),
    "GPT-2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=40),
    "GPT-NeoX": lambda: GPTNeoXConfig(**{k: v for k, v in SIZES.items() if "key_value" not in k}),
    "Mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=2),
}


def trained(folder, model, adapter=None, steps=2):
    args = settings(folder, max_steps=steps, save_strategy="steps", save_steps=steps)
    trainer = Trainer(model, args, train_dataset=rows(), processing_class=byte_pairs(), adapter=adapter)
    trainer.train()
    return trainer.model.eval()


def loaded(folder, *, is_checkpoint, **options):
    place = folder / "checkpoint-2" if is_checkpoint else folder
    return load_for_generation(Source(folder=place, is_checkpoint=is_checkpoint, **options))


def logits(model):
    device = next(model.parameters()).device
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 14, device=device)[None]).logits.float().cpu()


@pytest.mark.parametrize(
    ("kind", "dtype"),
    thinned(
        [(kind, dtype) for kind in CONFIGS for dtype in ("float32", "bfloat16")],
        lambda *cell: cell == ("Qwen", "float32"),
    ),
)
def test_the_weights_of_a_folder_are_those_that_were_trained(kind, dtype, tmp_path):
    model = trained(tmp_path, from_config(CONFIGS[kind](), tokenizer=byte_pairs(), dtype=dtype))
    expected = {name: value for name, value in model.state_dict().items()}

    for is_checkpoint in (True, False):
        found = loaded(tmp_path, is_checkpoint=is_checkpoint).model
        assert type(found) is type(model) and not found.training
        assert expected.keys() == found.state_dict().keys()
        assert all(torch.equal(value, found.state_dict()[name].cpu()) for name, value in expected.items())
        assert torch.equal(logits(model), logits(found))


@pytest.fixture
def base(tmp_path):
    from_config(CONFIGS["Llama"](), tokenizer=byte_pairs(), seed=5).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("kind", thinned(list(KINDS), lambda kind: kind == "PiSSA"))
def test_an_adapter_is_the_one_that_was_trained_and_merged_it_computes_the_same(kind, base, tmp_path):
    model = trained(tmp_path / "out", lambda: from_pretrained(base), KINDS[kind])
    expected, plain = logits(model), logits(from_pretrained(base))

    for is_checkpoint in (True, False):
        found = loaded(tmp_path / "out", is_checkpoint=is_checkpoint)
        merged = loaded(tmp_path / "out", is_checkpoint=is_checkpoint, merged=True)
        assert found.is_base_verified and str(base) == found.base.name
        assert float((logits(found.model) - expected).abs().max()) <= 1e-6
        assert float((logits(merged.model) - expected).abs().max()) <= 1e-5
        assert not any("lora" in name for name in merged.model.state_dict())
    assert float((plain - expected).abs().max()) > 1e-3


@pytest.mark.matrix
def test_the_base_is_loaded_in_the_type_of_the_training(base, tmp_path):
    model = trained(tmp_path / "out", lambda: from_pretrained(base, dtype="bfloat16"), KINDS["LoRA"])

    found = loaded(tmp_path / "out", is_checkpoint=True)

    assert found.is_base_verified and torch.equal(logits(model), logits(found.model))


def test_a_base_that_has_changed_is_refused(base, tmp_path):
    trained(tmp_path / "out", lambda: from_pretrained(base), KINDS["LoRA"])
    from_config(CONFIGS["Llama"](), tokenizer=byte_pairs(), seed=6).save_pretrained(base)

    with pytest.raises(RecordNeeded, match="was trained on .*, and its base model is") as refused:
        loaded(tmp_path / "out", is_checkpoint=True)
    assert "FG926" == refused.value.code
    with pytest.raises(LoadingError) as refused:
        loaded(tmp_path / "out", is_checkpoint=True, build=lambda: from_pretrained(base))
    assert "FG926" == refused.value.code and not isinstance(refused.value, RecordNeeded)


def test_an_answer_ends_at_the_last_position_of_the_model():
    tokenizer = byte_pairs()
    model = from_config(CONFIGS["GPT-2"](), tokenizer=tokenizer)
    model.generation_config.eos_token_id = None
    tokenizer.eos_token, before = None, tokenizer.eos_token
    try:
        answer = Generator(model, tokenizer).answer([5] * 30, Sampling(max_new_tokens=50))
    finally:
        tokenizer.eos_token = before

    assert (CONTEXT, 10) == (answer.finish, len(answer.ids))
