"""Prompts are how the documents of the evaluation data begin."""

import torch
from torch.utils.data import IterableDataset

from forgather.ml.data import beginnings
from tests.ml.callback_scene import letters


def packed(text, length=6):
    """Returns rows of a stream of documents, which "." ends."""
    ids = [1 if char == "." else "abcdefgh".index(char) + 2 for char in text]
    return [{"input_ids": torch.tensor(ids[at : at + length])} for at in range(0, len(ids) - length + 1, length)]


def test_prompts_are_the_beginnings_of_the_first_documents():
    rows = packed("abcabc.gh.abcabc.defdef.hhhhhhhh")
    assert ["ab", "gh", "hh"] == [text.replace(" ", "") for text in beginnings(rows, letters(), num_tokens=2)]
    assert beginnings(rows, letters(), count=1, num_tokens=2) == beginnings({"x": rows}, letters(), 1, 2)


def test_the_middle_of_a_document_is_no_beginning():
    rows = packed("aaaaaaaaaaaa.bbbbb")
    assert ["aa", "bb"] == [text.replace(" ", "") for text in beginnings(rows, letters(), num_tokens=2)]


def test_what_has_no_tokens_gives_the_empty_prompt():
    class Stream(IterableDataset):
        def __iter__(self):
            raise AssertionError("a stream is not read")

    for dataset, tokenizer in (
        (None, letters()), ([], letters()), ([{"x": 1}], letters()), (Stream(), letters()), (packed("abcabc"), None)
    ):  # fmt: skip
        assert [""] == beginnings(dataset, tokenizer)
