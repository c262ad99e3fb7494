"""The table of what words reach: its tests exist and are in a piece, and a row shows what they recorded."""

import re
import xml.etree.ElementTree as ElementTree

from scripts import write_word_reach
from tests.project.workbench import ROOT


def case(test, **recorded):
    file, _, name = test.partition("::")
    found = ElementTree.Element("testcase", classname=file.removesuffix(".py").replace("/", "."), name=name)
    properties = ElementTree.SubElement(found, "properties")
    for key, value in recorded.items():
        ElementTree.SubElement(properties, "property", name=key, value=str(value))
    return found


def test_every_test_of_a_row_exists_and_is_in_a_piece():
    words = " ".join(write_word_reach.PIECES.values()).split()
    assert len(words) == len(set(words)) and all((ROOT / word).is_file() for word in words)
    for row in write_word_reach.ROWS:
        for test in row.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name or 'test_'}", text, re.MULTILINE), test
            assert file in words


def test_every_file_of_the_tests_of_words_is_in_a_piece():
    words = " ".join(write_word_reach.PIECES.values()).split()
    files = {f"tests/{folder}/{file.name}" for folder in ("words", "lightning") for file in (ROOT / "tests" / folder).glob("test_*.py")}  # fmt: skip
    assert set() == files - set(words)


def test_a_row_shows_what_its_tests_recorded_and_says_what_did_not_run():
    names = ("test_every_word_of_a_place_is_answered[a]", "test_explain_knows_every_word")
    cases = [case(f"tests/words/test_word_pages.py::{name}", words=count) for name, count in zip(names, (631, 0), strict=True)]  # fmt: skip
    shown = write_word_reach.table(cases)
    assert "| 100 % | 631 words, all answered | 2 | `words/test_word_pages.py` |" in shown
    assert "not measured in this run" in write_word_reach.table(cases[:1])
    assert all(f"| {row.what} | {row.reach} |" in shown for row in write_word_reach.ROWS)
