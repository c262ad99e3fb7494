"""Every public word of every tool has an answer, the pages have the answers, and the recorded words are those of today."""

from importlib.metadata import version

import pytest

from forgather.cli.main import main
from scripts import write_words
from scripts.oracles import word_lists
from tests.matrix import thinned

PLACES = [(tool, place) for tool in write_words.TITLES for place in write_words.WORDS[tool]["words"]]


@pytest.mark.parametrize(("tool", "place"), PLACES)
def test_every_word_of_a_place_is_answered(tool, place, record_property):
    """A word that is refused says what to do, and one with another name says which."""
    found = write_words.answers(tool)[place]
    every = sum(len(words) for tool in write_words.TITLES for words in write_words.WORDS[tool]["words"].values())
    record_property("words", every)
    assert {} == {word: one for word, one in found.items() if one.outcome not in write_words.OUTCOMES}
    silent = {word for word, one in found.items() if one.outcome in ("refused", "no effect") and not one.text}
    assert set() == silent - {word for word, one in found.items() if one.ours}
    assert all(one.ours for one in found.values() if one.outcome == "renamed")


def test_a_word_that_no_record_and_no_rule_has_is_unknown():
    assert "unknown" == write_words.answer("transformers", "TrainingArguments", "learning_rates_of_mine").outcome
    assert "unknown" == write_words.answer("accelerate", "Accelerator", "quantum_plugin").outcome
    assert "unknown" == write_words.answer("deepspeed", "config", "quantum_offload").outcome


@pytest.mark.parametrize("tool", write_words.TITLES)
def test_a_page_is_what_the_program_says(tool):
    """After a change of records or rules: python scripts/write_words.py."""
    assert write_words.page(tool) == (write_words.FOLDER / f"{tool}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("tool", ["transformers", "accelerate"])
def test_the_recorded_words_are_those_of_the_installed_library(tool):
    """After another release was installed: python scripts/oracles/word_lists.py TOOL."""
    pytest.importorskip("torch")
    assert version(tool) == write_words.WORDS[tool]["version"]
    assert word_lists.TOOLS[tool]() == write_words.WORDS[tool]["words"]


@pytest.mark.matrix
def test_the_recorded_words_of_deepspeed_are_those_of_the_installed_library(monkeypatch):
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert word_lists.deepspeed() == write_words.WORDS["deepspeed"]["words"]


def asked():
    """The words that are not called the same here, and are not keys of a mapping."""
    for tool in write_words.TITLES:
        for place, words in write_words.answers(tool).items():
            if (tool != "deepspeed" or place == "config") and place not in write_words.HANDLERS:
                yield from (word for word, one in words.items() if one.outcome != "same")


@pytest.mark.parametrize("every", thinned([8, 1], lambda every: every == 8))
def test_explain_knows_every_word(every, capsys):
    words = sorted(set(asked()))[::every]
    assert len(words) > 20
    unknown = [
        word for word in words if main(["explain", word]) != 0 and main(["explain", word.removeprefix("fsdp_")]) != 0
    ]
    assert [] == unknown
