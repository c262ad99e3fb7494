"""What runs the pages notices when a page is wrong."""

import pytest

from tests.docs.lessons import follow

FENCE = "```"


def page(*lines):
    return "\n".join([FENCE + "console", *lines, FENCE, ""])


@pytest.mark.parametrize(
    "lines",
    [
        ("$ echo one two", "one two"),
        ("$ echo one two", "one ..."),
        ("$ printf 'one\\ntwo\\nthree\\n'", "one", "...", "three"),
        ("$ mkdir a", "$ cd a", "$ pwd", ".../a"),
        ("$ echo ready; sleep 60", "ready", "^C"),
        ("$ echo run a/runs/20260101T120000Z-own-config-2/x.json", "run a/runs/...-own-config/x.json"),
    ],
    ids=str,
)
def test_what_a_page_shows_is_accepted(lines, tmp_path):
    follow(page(*lines), tmp_path)


@pytest.mark.parametrize(
    "lines",
    [
        ("$ echo one two", "one"),
        ("$ echo one", "two"),
        ("$ echo one",),
        ("$ true", "one"),
        ("$ printf 'one\\ntwo\\n'", "one"),
        ("$ exit 3",),
        ("$ echo run a/runs/20260101T120000Z-default-long", "run a/runs/...-default"),
        ("$ echo too early", "ready", "^C"),
    ],
    ids=str,
)
def test_anything_else_is_a_failure(lines, tmp_path):
    with pytest.raises(AssertionError):
        follow(page(*lines), tmp_path)


def test_a_file_is_written_and_used(tmp_path):
    follow(f"Write `a/b.txt`:\n\n{FENCE}text a/b.txt\nhello\n{FENCE}\n\n" + page("$ cat a/b.txt", "hello"), tmp_path)


def test_a_file_that_the_reader_is_not_told_of_is_a_failure(tmp_path):
    with pytest.raises(AssertionError, match="is not announced"):
        follow(f"Write this:\n\n{FENCE}text b.txt\nhello\n{FENCE}\n", tmp_path)
