import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.config.calc import FUNCTIONS, evaluate, names_in, parse_calc
from forgather.config.yaml.events import Refusal

NAMES = {"total": 64, "batch": 5, "ratio": 0.5, "words": ["a", "b"], "text": "7", "none": None}


def refusal(expression):
    with pytest.raises(Refusal) as caught:
        evaluate(expression, NAMES.__getitem__)
    assert "FG305" == caught.value.code
    return caught.value.message


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("max(1, total // batch)", 12), ("total * ratio + 1", 33.0), ("-batch % 3", 1), ("2 ** 10", 1024),
        ("2 ** -1", 0.5), ("round(10 / 3, 2)", 3.33), ("int('12') + int(ratio)", 12), ("float(text)", 7.0),
        ("len(words)", 2), ("abs(-3)", 3), ("min([4, 2, 3])", 2), ("1 < batch <= 5 != 6", True), ("1 < 1 < none", False),
        ("not batch or none", None), ("batch and total", 64), ("1 if ratio > 1 else 2", 2), ("none == None", True),
        (" batch ", 5), ("True + 1", 2), ("1e3", 1000.0), ("+batch", 5),
    ],
)  # fmt: skip
def test_arithmetic_is_that_of_python(expression, expected):
    actual = evaluate(expression, NAMES.__getitem__)
    assert (type(expected), expected) == (type(actual), actual)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os')", """!calc "__import__('os')": "__import__('os')" is not allowed"""),
        ("words.clear()", "!calc 'words.clear()': 'words.clear()' is not allowed"),
        ("words[0]", "!calc 'words[0]': 'words[0]' is not allowed"),
        ("lambda: 1", "!calc 'lambda: 1': 'lambda: 1' is not allowed"),
        ("[x for x in words]", "!calc '[x for x in words]': '[x for x in words]' is not allowed"),
        ("f'{batch}'", """!calc "f'{batch}'": "f'{batch}'" is not allowed"""),
        ("(x := 1)", "!calc '(x := 1)': '(x := 1)' is not allowed"),
        ("1 << 9", "!calc '1 << 9': the operator LShift is not allowed"),
        ("~1", "!calc '~1': '~' is not allowed"),
        ("1 in words", "!calc '1 in words': the comparison In is not allowed"),
        ("max(words, key=len)", "!calc 'max(words, key=len)': 'max(words, key=len)' is not allowed"),
        ("'a' * 3", '!calc "\'a\' * 3": arithmetic on str \'a\''),
        ("words + words", "!calc 'words + words': arithmetic on list \"['a', 'b']\""),
        ("1 / 0", "!calc '1 / 0': ZeroDivisionError: division by zero"),
        ("int('x')", """!calc "int('x')": ValueError: invalid literal for int() with base 10: 'x'"""),
        ("1 < 'a'", """!calc "1 < 'a'": TypeError: '<' not supported between instances of 'int' and 'str'"""),
        ("(-8) ** 0.5", "!calc '(-8) ** 0.5': the result is a complex number"),
        ("1j", "!calc '1j': '1j' is not allowed"),
        ("9 ** 9 ** 9", "!calc '9 ** 9 ** 9': the result would have too many digits"),
        ("9 ** 10 ** 400", "!calc '9 ** 10 ** 400': the result would have too many digits"),
        ("10.0 ** 400", "!calc '10.0 ** 400': OverflowError: (34, 'Numerical result out of range')"),
        ("round(5, -1000000)", "!calc 'round(5, -1000000)': round to -1000000 digits"),
        ("1 +", "'1 +' is not an expression"),
        ("import os", "'import os' is not an expression"),
        ("1\0", "'1\\x00' is not an expression"),
        ("+".join("1" * 400), f"!calc {'+'.join('1' * 400)[:77] + '...'!r}: nested deeper than 50"),
        ("1" * 1_001, "a !calc expression of 1001 characters"),
        ("-" * 999 + "1", None),
        ("(" * 499 + "1" + ")" * 499, None),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_what_is_not_allowed_is_refused(expression, message):
    actual = refusal(expression)
    assert message is None or message == actual


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789+-*/%()<=>abtoxl., 'e", max_size=30))
def test_any_text_gives_a_value_or_a_refusal(text):
    try:
        evaluate(text, lambda name: NAMES.get(name, 2))
    except Refusal as refused:
        assert "FG305" == refused.code


def test_the_names_it_reads_are_known_without_evaluating():
    assert ["total", "batch", "len"] == names_in(parse_calc("max(total, batch) + total + len"))
    assert "len" in FUNCTIONS
