"""GGUF files: what can be written, how weights are named and arranged, and the recorded figures of their readers.

The package gguf is not a part of `dev`, so files are written and read by `make oracles`, which records the figures.
"""

import copy
import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GPTNeoXConfig, PreTrainedTokenizerFast

from forgather.cli.main import main
from forgather.ml.gguf_export import export_gguf
from forgather.ml.gguf_layout import GgufError, architecture_of, gguf_entries, gguf_tensors, interleaved
from forgather.ml.gguf_tokenizer import GgufTokenizerError, TokenKind, gguf_tokenizer
from forgather.ml.output_comparison import LIMIT
from tests.ml.gguf_cases import KINDS, ROWS, TEXTS, model, tokenizer

RECORDED = json.loads((Path(__file__).parent / "recorded" / "gguf_exports.json").read_text())


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return tokenizer(cache_dir=str(tmp_path_factory.mktemp("words")))


@pytest.fixture
def other(words):
    """Returns a function that gives the tokenizer with one part replaced."""

    def make(**parts):
        backend = Tokenizer.from_str(words.backend_tokenizer.to_str())
        for name, part in parts.items():
            setattr(backend, name, part)
        return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_were_read_by_transformers_and_by_llama_cpp_with_equal_outputs(kind):
    found = RECORDED["shapes"][kind]
    exact = found["transformers"]["float32"]
    assert exact["logits_difference"] <= LIMIT * exact["largest_logit"]
    assert exact["equal_greedy_ids"] == exact["prompts"] >= 8
    # A negative control: rounded weights give other logits, and another pre-tokenizer other tokens.
    assert all(found["transformers"][dtype]["logits_difference"] > 1e-4 for dtype in ("float16", "bfloat16"))
    reader = found["llama.cpp"]
    assert (reader["equal_tokens"], reader["equal_greedy_ids"], reader["equal_chat_prompt"]) == (len(TEXTS), 4, True)
    assert found["control"]["equal_tokens_with_another_pre_tokenizer"] < len(TEXTS)
    assert found["pre"] == KINDS[kind] and {"gguf", "xllamacpp", "transformers"} <= set(RECORDED["versions"])


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_has_one_place_in_the_file(kind, words):
    made = model(kind, words)
    architecture = architecture_of(made.config, type(made).__name__)
    found = dict(gguf_tensors(made, architecture))
    own = {value.data_ptr(): name for name, value in made.state_dict().items()}
    assert len(found) == len(own) and ("output.weight" in found) == (not made.config.tie_word_embeddings)
    assert torch.equal(found["token_embd.weight"], made.get_input_embeddings().weight)
    assert found["blk.1.ffn_up.weight"].shape == (made.config.intermediate_size if kind != "GPT-2" else 128, 32)
    sizes = gguf_entries(made.config, architecture)
    assert (2, 32, 128) == tuple(
        sizes[f"{architecture}.{name}"] for name in ("block_count", "embedding_length", "context_length")
    )


def test_the_queries_of_a_llama_are_interleaved_and_those_of_a_qwen_are_not(words):
    weight = torch.randn(12, 5)
    # Independent: row by row, as the rotation pairs them.
    for heads, size in ((2, 6), (3, 4)):
        rows = [
            head * size + part * (size // 2) + i for head in range(heads) for i in range(size // 2) for part in (0, 1)
        ]
        assert torch.equal(weight[rows], interleaved(weight, heads))
    llama, qwen = (model(kind, words) for kind in ("Llama", "Qwen2"))
    for made, architecture, is_same in ((llama, "llama", False), (qwen, "qwen2", True)):
        found = dict(gguf_tensors(made, architecture))["blk.0.attn_k.weight"]
        assert torch.equal(found, made.model.layers[0].self_attn.k_proj.weight) == is_same


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("Llama", {"attention_bias": True}, "attention_bias: True"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
            "rope_type: 'linear'",
        ),
        ("Mistral", {"sliding_window": 64}, "sliding_window: 64"),
        ("Qwen2", {"use_sliding_window": True}, "use_sliding_window: True"),
        ("GPT-2", {"n_inner": 64}, "n_inner: 64"),
        ("GPT-2", {"activation_function": "relu"}, "activation_function: 'relu'"),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(kind, changes, text, words):
    made = model(kind, words)
    config = copy.deepcopy(made.config)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(GgufError) as refused:
        architecture_of(config, type(made).__name__)
    assert refused.value.code == "FG937" and text in str(refused.value)


def test_another_architecture_is_refused_by_name():
    with pytest.raises(GgufError, match="a GPTNeoXForCausalLM cannot be written as a GGUF file") as refused:
        architecture_of(GPTNeoXConfig(), "GPTNeoXForCausalLM")
    assert refused.value.code == "FG937" and "LlamaForCausalLM, MistralForCausalLM, Qwen2" in str(refused.value.hint)


def test_a_tokenizer_has_its_tokens_kinds_and_ends(words):
    found = gguf_tokenizer(words, rows=ROWS, ends=[words.eos_token_id, words.convert_tokens_to_ids("<|turn|>")])
    assert found.pre == "gpt-2" and len(found.tokens) == len(found.kinds) == ROWS
    vocabulary = words.get_vocab()
    assert all(found.tokens[number] == text for text, number in vocabulary.items())
    assert found.special == {"bos": 0, "eos": 0, "pad": words.pad_token_id, "eot": vocabulary["<|turn|>"]}
    assert [found.kinds[number] for number in (0, 20, ROWS - 1)] == [
        TokenKind.CONTROL, TokenKind.NORMAL, TokenKind.UNUSED,
    ]  # fmt: skip
    assert not found.adds_bos and not found.adds_eos and "<|turn|>" in found.chat_template
    assert found.merges and all(len(pair.split(" ")) == 2 for pair in found.merges)


def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(words, other):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(r"\d"), behavior="isolated")
    for changed, text in (
        (other(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), "adds a space before the text"),
        (other(pre_tokenizer=pre_tokenizers.Sequence([split, byte_level])), r"no name for its pre-tokenizer '\\d'"),
        (other(pre_tokenizer=byte_level), "no name for its pre-tokenizer"),
        (other(normalizer=normalizers.Lowercase()), "its normalizer Lowercase"),
        (other(decoder=decoders.Metaspace()), "it is not a byte-level BPE"),
        (other(model=models.WordLevel({"a": 0}, "a")), "it is not a byte-level BPE"),
    ):
        with pytest.raises(GgufTokenizerError) as refused:
            gguf_tokenizer(changed, rows=ROWS)
        assert refused.value.code == "FG938" and text in str(refused.value)
    for options, text in (({"rows": 10}, "the model has 10 rows"), ({"rows": ROWS, "ends": [0, 5, 6]}, "at 3 tokens")):
        with pytest.raises(GgufTokenizerError) as refused:
            gguf_tokenizer(words, **options)
        assert text in str(refused.value)


@pytest.mark.parametrize("found", [None, "0.9.1"])
def test_a_missing_package_is_named_before_anything_is_read(found, tmp_path, monkeypatch):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr("forgather.ml.gguf_export.version", version)
    with pytest.raises(GgufError, match="--gguf needs gguf >= 0.10, ") as refused:
        export_gguf(tmp_path / "nothing", tmp_path / "new", lambda folder: None)
    assert refused.value.code == "FG936" and (found or "not installed") in str(refused.value)
    assert "pip install 'forgather[gguf]'" == refused.value.hint and not list(tmp_path.iterdir())


def test_the_help_says_what_a_gguf_file_is_for(capsys):
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert "--gguf" in capsys.readouterr().out
