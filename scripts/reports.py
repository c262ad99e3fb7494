"""What the writers of tables share: reports of pytest in JUnit's format, and the part of a page between two marks."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

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
