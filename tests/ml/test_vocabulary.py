"""Tokens that are added to a trained model: their rows, and the adapters that train them."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from forgather.ml.adapters import AdapterError, as_adapter
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.tokenizer import load_tokenizer
from forgather.ml.models import from_pretrained
from forgather.ml.trained_adapter import TrainedAdapter
from forgather.ml.trainer.adapter_export import export_adapter, export_merged
from forgather.ml.vocabulary import extend_vocabulary, new_rows, vocabulary_layers
from tests.matrix import thinned
from tests.ml.fixtures import StopAt, rows, tiny_llama
from tests.ml.gguf_cases import tokenizer
from tests.ml.test_adapters import SEED, gpt2

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing", "ignore:.*fan_in_fan_out", "ignore:.*save_embedding_layers"
)

ADDED = ["<|one|>", "<|two|>"]
NEW = {"r": 2, "trainable_token_indices": "new"}


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("<|one|>", "is '<|one|>'"),
        (None, "is None"),
        ({"<|one|>": 1}, "is {"),
        (["<|one|>", ""], "has the blank text ''"),
        ([" "], "has the blank text ' '"),
        ([None], "has None"),
        ([1], "has 1"),
        (["\ud800"], "has '"),
    ],
)
def test_added_tokens_are_a_list_of_texts(tokens, told):
    with pytest.raises(DataError) as refused:
        load_tokenizer("nowhere", add_tokens=tokens)
    assert ("FG884", "add_tokens") == (refused.value.code, refused.value.argument)
    assert refused.value.message.startswith(f"add_tokens {told}")


def extended(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    extend_vocabulary(model, model.config.vocab_size + 2)
    return model


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Compares fewer generated tokens than an export does, which is most of its time with models this small."""
    monkeypatch.setattr("forgather.ml.output_comparison._NEW_TOKENS", 3)


@pytest.fixture(params=thinned(["untied", "tied"], lambda kind: kind == "untied"))
def base(request, tmp_path):
    model = tiny_llama() if request.param == "untied" else gpt2()
    model.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_new_rows_are_the_mean_and_old_rows_do_not_change(base):
    plain, state = AutoModelForCausalLM.from_pretrained(base), torch.random.get_rng_state()
    found = extended(base)
    size = plain.config.vocab_size
    assert torch.equal(state, torch.random.get_rng_state())
    for name in vocabulary_layers(found):
        before, after = (model.get_submodule(name).weight for model in (plain, found))
        assert torch.equal(before, after[:size]) and after.shape[0] == size + 2
        assert torch.allclose(after[size:], before.mean(0).expand(2, -1), atol=1e-7)
    assert list(new_rows(found)) == [size, size + 1] and found.config.vocab_size == size + 2
    assert not torch.equal(plain.get_input_embeddings().weight.mean(0), plain.get_input_embeddings().weight[0])
    extend_vocabulary(plain, size - 1)
    assert plain.config.vocab_size == size and not new_rows(plain)


def test_tokens_of_a_config_are_added_once_and_saved(tmp_path):
    tokenizer(cache_dir=str(tmp_path / "cache")).save_pretrained(tmp_path / "base")
    tiny_llama(vocab_size=300).save_pretrained(tmp_path / "base")
    words = load_tokenizer(tmp_path / "base", add_tokens=[*ADDED, ADDED[0], "<|turn|>"])
    assert [words.convert_tokens_to_ids(token) for token in ADDED] == [300, 301] and len(words) == 302
    assert words("<|one|>a<|two|>")["input_ids"][::2] == [300, 301]
    assert words.decode([300, 301], skip_special_tokens=True) == ""
    model = from_pretrained(tmp_path / "base", tokenizer=words)
    assert model.config.vocab_size == 302 and list(new_rows(model)) == [300, 301]
    words.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved")("<|two|>")["input_ids"] == [301]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").config.vocab_size == 302
    again = load_tokenizer(tmp_path / "saved", add_tokens=ADDED)
    assert len(again) == 302 and not new_rows(from_pretrained(tmp_path / "saved", tokenizer=again))


def test_an_adapter_that_leaves_new_rows_frozen_is_refused(base):
    size = AutoModelForCausalLM.from_pretrained(base).config.vocab_size
    for settings in (
        {"r": 2},
        {"r": 2, "trainable_token_indices": [size]},
        {"r": 2, "modules_to_save": ["ln_f", "norm"]},
    ):
        model = extended(base)
        settings = {
            **settings,
            "modules_to_save": [
                one for one in settings.get("modules_to_save", ()) if one in dict(model.named_modules())
            ]
            or None,
        }
        with pytest.raises(AdapterError, match="are those of added tokens, and would stay frozen") as refused:
            as_adapter(settings).apply(model, seed=SEED)
        assert refused.value.code == "FG939" and "trainable_token_indices: new" in refused.value.hint
    layers = vocabulary_layers(extended(base))
    for settings in (
        {"r": 2, "modules_to_save": layers},
        {"r": 2, "trainable_token_indices": dict.fromkeys(layers, [size, size + 1])},
        NEW,
    ):
        as_adapter(settings).apply(extended(base), seed=SEED)
    # Without new rows, the word means nothing, and an adapter needs nothing.
    as_adapter(NEW).apply(AutoModelForCausalLM.from_pretrained(base), seed=SEED)


def test_trained_rows_are_saved_resumed_and_exported(base, tmp_path):
    size = AutoModelForCausalLM.from_pretrained(base).config.vocab_size
    data = rows()
    for row in data:
        row["input_ids"][1:3] = torch.tensor([size, size + 1])
        row["labels"] = row["input_ids"].clone()
    trainer, losses = train(tmp_path / "out", base, data)
    train(tmp_path / "stopped", base, data, stop=4)
    again, theirs = train(tmp_path / "stopped", base, data, resume=True)
    assert losses == theirs
    one, other = (dict(made.model.state_dict()) for made in (trainer, again))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    model = trainer.model.eval()
    adapter = TrainedAdapter(
        folder=tmp_path / "out/checkpoint-6",
        is_checkpoint=True,
        make_base=lambda: extended(base),
        adapter=as_adapter(NEW),
        seed=SEED,
    )
    export_merged(adapter, tmp_path / "merged")
    export_adapter(adapter, tmp_path / "alone")
    ids = torch.tensor([[3, size, 4, size + 1]])
    # Rows alone are stored, not the layers.
    stored = load_file(tmp_path / "alone/adapter_model.safetensors")
    assert {2} == {len(value) for name, value in stored.items() if "lora_" not in name}, sorted(stored)
    plain = AutoModelForCausalLM.from_pretrained(base)
    # What a user of plain peft does; what the new rows start with does not matter, because their values are stored.
    plain.resize_token_embeddings(size + 2, mean_resizing=False)
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        loaded = PeftModel.from_pretrained(plain, tmp_path / "alone")
        for found in (merged, loaded):
            assert float((found.eval()(input_ids=ids).logits - expected).abs().max()) <= 1e-5
        # A negative control: the two rows were trained, so they differ.
        first, second = merged.get_input_embeddings().weight[size:].detach()
    assert float((first - second).abs().max()) > 1e-3


def train(folder, base, data, *, stop=None, resume=False):
    from forgather.ml import Trainer
    from tests.ml.test_adapters import settings

    args = settings(folder, save_strategy="steps", save_steps=2, max_steps=6, save_only_model=False, seed=SEED)
    trainer = Trainer(
        lambda: extended(base),
        args,
        train_dataset=data,
        callbacks=[StopAt(stop)] if stop else [],
        adapter=as_adapter(NEW),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer, [line["loss"] for line in trainer.state.log_history if "loss" in line]
