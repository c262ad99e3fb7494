"""Rows of random tokens, and the tokenizer of a vocabulary of letters."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = 64


def tokens(number, length=12, seed=1):
    draw = random.Random(seed)
    rows = [[draw.randrange(3, WORDS) for _ in range(length)] for _ in range(number)]
    return [{"input_ids": row, "labels": list(row)} for row in rows]


def tokenizer():
    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="w0", pad_token="w1", eos_token="w2")
