import argparse

import pytest

from forgather.cli.main import main
from forgather.cli.options import a_time, path_and_value
from forgather.cli.parsing import parse


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("a=1", ("a", "1")),
        ("trainer.args.lr=3e-4", ("trainer.args.lr", "3e-4")),
        ("a=", ("a", "")),
        ("a=b=c", ("a", "b=c")),
        ("+a.b=[1, 2]", ("+a.b", "[1, 2]")),
        ("a['x=y'].b=1", ("a['x=y'].b", "1")),
        ("a['x['].b=1", ("a['x['].b", "1")),
        ("a['x]=y']=1", ("a['x]=y']", "1")),
        ("it's=1", ("it's", "1")),
    ],
)
def test_a_setting_is_split_at_the_first_equals_sign_outside_brackets(text, pair):
    assert pair == path_and_value(text)


@pytest.mark.parametrize("text", ["", "a", "=1", "+=1", "a['x=y']"])
def test_a_setting_without_path_or_value_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not PATH=VALUE"):
        path_and_value(text)


@pytest.mark.parametrize(
    ("words", "name", "found"),
    [
        (["control", "R", "set", "--timeout", "5", "learning_rate=1"], "settings", ["learning_rate=1"]),
        (["queue", "rm", "--queue", "q", "0", "1"], "number", ["0", "1"]),
        (["queue", "rm", "0", "--queue", "q", "1"], "number", ["0", "1"]),
        (["watch", "a", "--once", "b"], "targets", ["a", "b"]),
        (["runs", "a", "--json", "b"], "folders", ["a", "b"]),
        (["runs", "tag", "t", "a", "--json", "b"], "runs", ["a", "b"]),
    ],
)
def test_words_of_a_list_may_follow_an_option(words, name, found):
    assert found == getattr(parse(words)[1].options, name)


@pytest.mark.parametrize("text", ["nan", "inf", "-1", "0", "1e99", "", "1_0", "five"])
def test_a_time_is_a_finite_number_above_zero(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number of seconds above 0"):
        a_time(text)
    assert 2.5 == a_time("2.5")


@pytest.mark.parametrize(
    "words", [["runs", "--sort=--"], ["runs", "-n--"], ["compare", ".", "--metric=--"], ["watch", "--port=--"]]
)
def test_two_dashes_are_no_value_of_an_option(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert 2 == ended.value.code
    assert "needs a value" in capsys.readouterr().err
