"""Models and tokenizers of the shapes that a GGUF file can have, for the tests and for `make oracles`."""

import torch
from datasets import Dataset
from tokenizers import Regex, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forgather.ml.data.tokenizer import train_bpe
from forgather.ml.gguf_tokenizer import PRE_TOKENIZERS

WORDS = 400
ROWS = WORDS + 8
SIZES = {
    "vocab_size": ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TEXTS = [
    "The quick brown fox: it's 12345 times!",
    "x = {'a': 1}\n\n\n    return  x\t# caf\u00e9",
    "  \n \u4f60\u597d we'LL see DON'T  100%",
    "line one\r\nline two \n   \n three   ",
]


def tokenizer(pre="gpt-2", cache_dir=None):
    """Returns a byte-level BPE of our own whose texts are divided in the given way."""
    rows = Dataset.from_dict({"text": [text * 3 for text in TEXTS] + ["we will see 100 quick foxes " * 4]})
    found = train_bpe(
        rows, vocab_size=300, min_frequency=1, special_tokens=["<|turn|>"], cache_dir=cache_dir, chat_template=None
    )
    if pre != "gpt-2":
        pattern = next(regex for regex, name in PRE_TOKENIZERS.items() if name == pre)
        found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    found.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<|turn|>{% endfor %}assistant:"
    return found


def model(kind, words):
    """Returns a model with random weights of a shape."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    torch.manual_seed(0)
    made = {
        "Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **rope, **ids)),
        "tied Llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, **ids, head_dim=16, tie_word_embeddings=True)),
        "Mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, **rope, **ids, sliding_window=None)),
        "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **rope, **ids)),
        "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **rope, **ids, head_dim=16)),
        "GPT-2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=ROWS, n_embd=32, n_layer=2, n_head=4, n_positions=128, n_ctx=128, **ids)
        ),
    }[kind]()
    with torch.no_grad():
        for weight in made.parameters():
            # Larger than the usual ones, so that a wrong order of rows shows; vectors are not all ones or zeros.
            weight.add_(torch.randn_like(weight) * (0.2 if weight.ndim > 1 else 0.1))
    made.generation_config.eos_token_id = [words.eos_token_id, words.convert_tokens_to_ids("<|turn|>")]
    return made.eval()


KINDS = {
    "Llama": "gpt-2",
    "tied Llama": "llama-bpe",
    "Mistral": "gpt-2",
    "Qwen2": "qwen2",
    "Qwen3": "qwen2",
    "GPT-2": "gpt-2",
}
"""The shapes, and the pre-tokenizer that each is tested with."""
