"""Rows that `tokenize` packs, and what the first document of a row does to a training on the second."""

import functools
import os
import random
import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forgather.ml.data import tokenize

SYMBOLS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
VOCAB = len(SYMBOLS) + 2
BORDER, LENGTH = 5, 12


@functools.cache
def symbols():
    """A tokenizer that gives each letter and digit an id of its own; it pads with its end-of-text token."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # tests fork after it was used
    vocab = {"<eos>": 0, "<unk>": 1} | {symbol: number + 2 for number, symbol in enumerate(SYMBOLS)}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>")


def packed(texts, length, **options):
    """Returns the rows that `tokenize` makes of texts, as a list."""
    with tempfile.TemporaryDirectory() as folder:
        rows = tokenize(Dataset.from_dict({"text": texts}), symbols(), length, cache_dir=folder, **options)
        return [{name: value.clone() for name, value in row.items()} for row in rows]


@functools.cache
def two_documents(seed, count=4, **options):
    """Returns rows of two documents: the first depends on `seed` and no label is on it, the second is always the same."""
    first, second = random.Random(seed), random.Random("second")
    texts = []
    for _ in range(count):
        texts += [
            "".join(first.choices(SYMBOLS, k=BORDER - 1)),
            "".join(second.choices(SYMBOLS, k=LENGTH - BORDER - 1)),
        ]
    rows = packed(texts, LENGTH, **options)
    assert count == len(rows)
    for row in rows:
        row["labels"][: BORDER + 1] = -100  # without boundaries, the first token of the second one had a label
    return rows


def leak(train, **options):
    """Returns the largest difference of weights that `train(rows)` gives, between two trainings with other first documents.

    Both are the same training of the second documents: where documents are kept apart, nothing else has a gradient.
    """
    one, other = (train(two_documents(seed, **options)) for seed in (1, 2))
    moved = max(
        float((weight - before).abs().max()) for weight, before in zip(one["after"], one["before"], strict=True)
    )
    assert moved > 1e-4, "the training changes nothing"
    return max(float((a - b).abs().max()) for a, b in zip(one["after"], other["after"], strict=True))


def weights(trainer):
    """Returns the weights of the whole model; every process calls it."""
    return [value.detach().float().clone() for _, value in trainer.strategy.export()]
