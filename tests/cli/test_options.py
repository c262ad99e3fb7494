import argparse

import pytest

from forgather.cli.main import main
from forgather.cli.options import path_and_value


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
    "words", [["runs", "--sort=--"], ["runs", "-n--"], ["compare", ".", "--metric=--"], ["watch", "--port=--"]]
)
def test_two_dashes_are_no_value_of_an_option(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert 2 == ended.value.code
    assert "needs a value" in capsys.readouterr().err
