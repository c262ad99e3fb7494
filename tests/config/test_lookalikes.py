import pytest
from documents import graph_of

from forgather.config.lint.suspicious_scalars import lookalike
from forgather.config.yaml.scalars import resolve_scalar
from forgather.errors import Severity


def findings(text):
    return [(found.code, found.severity, found.span.line, found.hint) for found in graph_of(text).diagnostics]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("1,000", "1000"),
        ("1.000.000", "1000000"),
        ("1 000 000", "1000000"),
        ("1,000.5", "1000.5"),
        ("0,5", "0.5"),
        ("3e-4f", "3e-4"),
        ("10k", "10000"),
        ("1.5M", "1500000"),
        ("5%", "0.05"),
        (".5e3", "500.0"),
        ("5 e-4", "5e-4"),
        ("1e-3,", "1e-3"),
        ("1e\u20113", "1e-3"),
        ("\u22125", "-5"),
        ("1\uff10", "10"),
        ("0XFF", "0xff"),
        ("1/3", '!calc "1/3"'),
        ("2**10", '!calc "2**10"'),
        ("yes", "true"),
        ("Off", "false"),
        ("TRUE;", "TRUE"),
        ("None,", "~"),
        ("true,", "true"),
        ("None", "~"),
        ("none", "~"),
        ("inf", ".inf"),
        ("-inf", "-.inf"),
        ("NaN", ".nan"),
    ],
)
def test_what_looks_like_a_value_and_is_a_string_is_told_how_to_write_it(text, meant):
    assert isinstance(resolve_scalar(text), str)
    in_words = f'quote it ("{text}") if it is a text, or write {meant}'
    assert lookalike(text) in (f"write {meant}, or quote it if it is a text", in_words)


def test_a_word_is_to_be_quoted_first_of_all():
    assert 'quote it ("no") if it is a text, or write false' == lookalike("no")
    assert "write 1000, or quote it if it is a text" == lookalike("1,000")


@pytest.mark.parametrize("text", [".5.", "0x1G", "1e", "1e-3.5", "--5", "10^-3", "1x10^-3", "0o9"])
def test_what_is_no_number_that_could_be_read_is_said_to_be_none(text):
    assert "write a plain number, or quote it" == lookalike(text)


@pytest.mark.parametrize(
    "text",
    "cosine;steps;off-policy;nothing;option;no_grad;y;n;i;-;+x;1.2.3;10.0.0.1;12:30;1-2;0-3;16-mixed;7b;8B;5GB;512MB;3d;"
    "1st;1-sqrt;train[:5%];info;nano;falsey;...;5 epochs".split(";"),
)
def test_words_versions_ranges_and_sizes_are_texts(text):
    assert lookalike(text) is None


def test_a_lookalike_is_a_lint_at_its_line():
    text = "a:\n  eval_strategy: no\n  steps: 1,000\n  list: [10k, none]\n"
    assert [("FG222", Severity.LINT, line) for line in (2, 3, 4, 4)] == [found[:3] for found in findings(text)]
    assert 'quote it ("no") if it is a text, or write false' == findings(text)[0][3]


def test_quotes_keys_tags_and_real_numbers_are_no_lookalikes():
    assert [] == findings(
        "a:\n  no: \"no\"\n  1,000: '1,000'\n  b: !call:int 1,000\n  c: [1_000, 1e-3, ~, false, .5]\n"
    )
