"""The work of `check` and `code` grows with a config as its size does, whatever it is made of, and whatever is wrong."""

import contextlib
import cProfile
import io

import pytest

from forgather.cli.main import main
from forgather.codegen.python.names import Names
from tests.project.workbench import make_project

SMALL, LARGE = 25, 100
# Four times the size is four times the work; the rest is for what is sorted. A square would make it sixteen.
MOST = 6.5


def items(line):
    return lambda count: "main:\n" + "".join(line.format(n=n) for n in range(count))


def lines(line, last="main: 1\n"):
    return lambda count: "".join(line.format(n=n) for n in range(count)) + last


KINDS = {
    "unknown keywords": lambda n: "main: !call:json:dumps\n" + "".join(f"  k{i}: {i}\n" for i in range(n)),
    "unknown settings": lambda n: (
        "main: !call:forgather.ml:TrainingArguments\n" + "".join(f"  k{i}: {i}\n" for i in range(n))
    ),
    "misspelt symbols": items("- !call:json:dupms{n} [1]\n"),
    "misspelt modules": items("- !call:jsno{n}:dumps [1]\n"),
    "missing files": items("- !call:d{n}/f.py:g [1]\n"),
    "wrong values": items("- !call:textwrap:wrap [a, {{width: w{n}}}]\n"),
    "empty lists": items("- []\n"),
    "repeated keys": lambda n: "main: {" + "a: 1, " * n + "}\n",
    "anchors": lambda n: (
        "".join(f"k{i}: &a{i} [1]\n" for i in range(n)) + "main: [" + ", ".join(f"*a{i}" for i in range(n)) + "]\n"
    ),
    "anchors used again": lines("k{n}: &a [{n}]\n", "main: *a\n"),
    "one name for all": items("- !call:dict@n {{a: {n}}}\n"),
    "variables": items("- !var a{n}\n"),
    "calculations": lines("k{n}: !calc 'a{n} + 1'\n"),
    "secrets": items("- {{api_key: abcdefgh{n}}}\n"),
    "targets of calls": lines("k{n}: !call:dict {{a: 1}}\n"),
}


def work_of(folder, command, text):
    """Returns how many calls, of Python's and of C's functions, a command makes for a config."""
    (folder / "templates/configs/plain.yaml").write_text(text)
    calls, said = cProfile.Profile(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), calls:
        main(["-t", "plain", command])
    return sum(entry.callcount for entry in calls.getstats())


@pytest.mark.parametrize("command", ["check", "code"])
@pytest.mark.parametrize("kind", KINDS)
def test_work_grows_as_the_config_does(tmp_path, monkeypatch, kind, command):
    folder = make_project(tmp_path / "p")
    monkeypatch.chdir(folder)
    text = KINDS[kind]
    # What is read once (rules, source) is no work of the config.
    work_of(folder, command, text(3))
    none, small, large = (work_of(folder, command, text(count)) for count in (1, SMALL, LARGE))

    assert large - none <= MOST * (small - none)


def test_a_free_name_is_found_without_asking_for_all_before_it():
    asked = 0

    class Taken(set):
        def __contains__(self, name):
            nonlocal asked
            asked += 1
            return super().__contains__(name)

    names = Names(Taken())
    assert ["dumps", *(f"dumps_{number}" for number in range(2, 301))] == [names.free("dumps") for _ in range(300)]
    assert asked <= 3 * 300
