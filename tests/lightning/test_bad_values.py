"""A wrong value of a word or an option is one error with a code and one short line, whatever the value is."""

import dataclasses
import inspect

import pytest

import forgather.lightning as L
from forgather.aliases import read_aliases
from forgather.errors import ForgatherError
from forgather.lightning import read_words
from forgather.lightning.meaning import meaning_of
from tests.bad_values import BAD_VALUES
from tests.each import each

WORDS = sorted(word for word, record in read_aliases()["setting"].items() if "lightning" in record["tools"])
CALLBACKS = ("ModelCheckpoint", "GradientAccumulationScheduler", "EarlyStopping", "LearningRateMonitor", "Timer")
STRATEGIES = ("DDPStrategy", "FSDPStrategy", "DeepSpeedStrategy")


def outcome(call):
    """Returns the error of a call, or None; any other error than one of ours fails the test."""
    try:
        call()
    except ForgatherError as error:
        assert error.code[2:].isdigit()
        assert len(str(error)) < 1500
        assert str(error).isprintable()
        return error
    return None


def given(kind, option, value):
    needed = {"EarlyStopping": {"monitor": "loss"}, "ModelCheckpoint": {"monitor": "loss"}}.get(kind, {})
    made = getattr(L, kind)(**{**needed, option: value})
    return {"callbacks": [made]} if kind in CALLBACKS else {"strategy": made}


def test_a_wrong_value_of_a_word_is_one_error():
    def wrong_values(word):
        for value in BAD_VALUES.values():
            outcome(lambda value=value: read_words(devices=1) if word == "devices" else read_words(**{word: value}))
            outcome(lambda value=value: read_words(**{word: value}))

    each(WORDS, wrong_values)


OPTIONS = [
    (kind, name) for kind in (*CALLBACKS, *STRATEGIES) for name in inspect.signature(getattr(L, kind)).parameters
]


def test_a_wrong_value_of_an_option_is_one_error():
    def wrong_values(kind, option):
        for value in BAD_VALUES.values():
            outcome(lambda value=value: read_words(devices=1, max_epochs=1, **given(kind, option, value)))

    each(OPTIONS, wrong_values)


@pytest.mark.parametrize(
    ("kind", "option", "value"),
    [
        ("EarlyStopping", "patience", "3"),
        ("EarlyStopping", "min_delta", float("nan")),
        ("ModelCheckpoint", "save_last", "yes"),
        ("ModelCheckpoint", "every_n_epochs", 1.5),
        ("ModelCheckpoint", "dirpath", 3),
        ("ModelCheckpoint", "save_weights_only", "no"),
        ("DDPStrategy", "timeout", float("inf")),
        ("DDPStrategy", "timeout", -1),
        ("FSDPStrategy", "cpu_offload", "no"),
        ("DeepSpeedStrategy", "config", 3),
        ("DeepSpeedStrategy", "offload_optimizer", "no"),
    ],
)
def test_nonsense_is_not_taken(kind, option, value):
    error = outcome(lambda: read_words(devices=1, **given(kind, option, value)))
    assert error.code in ("FG811", "FG813")
    assert option in error.message


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("devices", "0,x"),
        ("devices", "²"),
        ("limit_train_batches", float("nan")),
        ("max_steps", 2**70),
        ("enable_progress_bar", "no"),
        ("max_time", "99999999999999:00:00:00"),
    ],
)
def test_nonsense_is_no_value_of_a_word(word, value):
    assert word in [found.argument for found in meaning_of({word: value})[1]]


@pytest.mark.parametrize("value", BAD_VALUES.values(), ids=BAD_VALUES)
def test_a_seed_is_a_whole_number(value, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert "FG813" == outcome(lambda: L.seed_everything(value)).code


def test_a_seed_in_the_environment_that_is_no_number_is_not_used(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "²")
    read_words()
    assert "FG813" == outcome(L.seed_everything).code


def test_every_option_is_driven():
    fields = {(kind, one.name) for kind in STRATEGIES for one in dataclasses.fields(getattr(L, kind))}
    assert fields <= set(OPTIONS)
