import pytest

from forgather.config.split import Part, is_header, split


def test_a_file_without_headers_is_one_part():
    assert (Part(None, 1, "a: 1\n"),) == split("a: 1\n")


def test_headers_may_stand_on_the_first_and_on_the_last_line():
    assert (Part(None, 1, ""), Part("a", 2, "x\n"), Part("b", 4, "")) == split("#--- a ---\nx\n#--- b ---")


def test_a_part_knows_the_line_it_begins_on():
    text = "one\ntwo\n#--- sub/x.yaml ---\nthree\n\n# ---- other ----\nfour"
    assert [(None, 1, "one\ntwo\n"), ("sub/x.yaml", 4, "three\n\n"), ("other", 7, "four")] == [
        (part.name, part.line, part.text) for part in split(text)
    ]


@pytest.mark.parametrize("line", ["#--- a ---", "#---a---", "#  ----\ta.b/c-d_e  -----", "# --- 1 ---", "#--- a ---  "])
def test_these_lines_are_headers(line):
    assert is_header(line)


@pytest.mark.parametrize(
    "line",
    [
        "#-- a --",
        "#--- a",
        "# a ---",
        "#--- two words ---",
        "#--- ---",
        "#--- .a ---",
        "#--- a. ---",
        "x #--- a ---",
        " #--- a ---",
        "#--- é ---",
    ],
)
def test_these_lines_are_comments(line):
    assert not is_header(line)


def test_a_header_inside_raw_is_text():
    text = "{% raw %}\n#--- a ---\n{% endraw %}\n#--- b ---\nx"
    assert [None, "b"] == [part.name for part in split(text)]
