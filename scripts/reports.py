"""What the writers of tables share: reports of pytest in JUnit's format, and the part of a page between two marks."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

HEAD = "| what | reach | measured | cases | tests |\n|---|---|---|---|---|"
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def passed(folder):
    """Returns the test cases of all reports of a folder, in the order of the files' names.

    Args:
        folder: the folder with a report for each piece of the tests.

    Raises:
        SystemExit: if a test failed.
    """
    found = []
    for file in sorted(Path(folder).glob("*.xml")):
        # A test that was interrupted has no name.
        for case in ElementTree.parse(file).getroot().iterfind(".//testcase[@name]"):
            if case.find("failure") is not None or case.find("error") is not None:
                sys.exit(f"{file}: {case.get('name')} failed; nothing is written")
            found.append(case)
    return found


def function(case):
    """Returns the name of a test's function, without its parameters."""
    return case.get("name").partition("[")[0]


def parameters(case):
    """Returns the parameters of a test, as its name has them; "" without any."""
    return case.get("name").partition("[")[2][:-1]


def properties(case):
    """Returns what a test recorded."""
    return {one.get("name"): one.get("value") for one in case.iter("property")}


def replaced(page, content):
    """Returns the page with new content between its two marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def write(page, content):
    """Writes new content between the two marks of a page, and prints it."""
    page.write_text(replaced(page.read_text(encoding="utf-8"), content), encoding="utf-8")
    print(content)


def print_pieces(pieces):
    """Prints the name of each piece and the words for pytest, for the loop of a make target."""
    for name, words in pieces.items():
        print(name, words)


class Figure(NamedTuple):
    """What the table shows of the numbers that tests recorded under one name: their sum, or the largest one."""

    name: str
    text: str
    factor: float = 1
    of_all: object = max


class Row(NamedTuple):
    """A row of the table.

    Args:
        what: what is measured.
        reach: what is to be reached.
        tests: the beginnings of the names of its tests, as file::function.
        figures: the figures, in the order in which they are shown.
        is_by_kind: whether the first parameter of a test divides its figures.
    """

    what: str
    reach: str
    tests: tuple[str, ...]
    figures: tuple[Figure, ...] = ()
    is_by_kind: bool = False


def figures_table(rows, cases):
    """Returns the table of some rows for the test cases of all reports."""
    return "\n".join([HEAD, *(_line(row, cases) for row in rows)])


def _line(row, cases):
    own = [case for case in cases if _name(case).startswith(row.tests)]
    missing = [test for test in row.tests if not any(_name(case).startswith(test) for case in own)]
    if missing:
        return f"| {row.what} | {row.reach} | not measured in this run | | |"
    skipped = sum(case.find("skipped") is not None for case in own)
    count = f"{len(own) - skipped}" + (f" ({skipped} skipped)" if skipped else "")
    files = ", ".join(f"`{file}`" for file in dict.fromkeys(re.sub("^tests/|::.*$", "", test) for test in row.tests))
    measured = "; ".join(_by_kind(row, own) if row.is_by_kind else _texts(row, own))
    return f"| {row.what} | {row.reach} | {measured or 'all passed'} | {count} | {files} |"


def _name(case):
    return f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"


def _by_kind(row, cases):
    kinds = dict.fromkeys(parameters(case).partition("-")[0] for case in cases)
    for kind in kinds:
        texts = _texts(row, [case for case in cases if parameters(case).startswith(f"{kind}-")])
        yield f"{kind} {', '.join(texts)}"


def _texts(row, cases):
    for figure in row.figures:
        found = [float(known[figure.name]) for known in map(properties, cases) if figure.name in known]
        if found:
            yield figure.text.format(figure.of_all(found) * figure.factor)
