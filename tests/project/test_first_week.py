"""The mistakes of a first week, and configs that are right: found at their line, with what to write; nothing found."""

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from forgather.cli.options import OWN_NAMES
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

pytestmark = pytest.mark.usefixtures("warm_cache")

HERE = Path(__file__).with_name("first_week")
CONFIG = "templates/configs/main.yaml"
SEVERITIES = ("lint", "note", "warning", "error")


def records(name):
    read = YAML(typ="safe").load((HERE / name).read_text(encoding="utf-8"))
    return [pytest.param(one, id=one["id"]) for one in read]


MISTAKES = records("mistakes.yaml")
RIGHT = records("right.yaml") + records("foreign.yaml")


@pytest.fixture
def findings(tmp_path, monkeypatch):
    def check(record):
        folder = make_project(tmp_path / "first", {CONFIG: record["config"], **record.get("files", {})})
        monkeypatch.chdir(folder)
        return folder, check_project(Project("main", folder), reserved=OWN_NAMES).findings

    return check


def shown(found, folder):
    place = f"{found.span.file}:{found.span.line}".replace(f"{folder}/", "") if found.span else "nowhere"
    return f"{found.severity}[{found.code}] {place} {found.message} ({found.hint})"


def line_of(expect, folder):
    if "line" in expect:
        return expect["line"]
    lines = (folder / expect.get("file", CONFIG)).read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if expect["mark"] in line]
    assert 1 == len(marked)
    return marked[0]


def is_met(expect, found, folder, line):
    file = str(folder / expect.get("file", CONFIG))
    return (
        found.span is not None
        and (file, line) == (found.span.file, found.span.line)
        and found.code == expect.get("code", found.code)
        and SEVERITIES.index(found.severity) >= SEVERITIES.index(expect.get("severity", "error"))
        and all(word in f"{found.message} {found.hint}" for word in expect["words"])
    )


@pytest.mark.parametrize("record", MISTAKES)
def test_a_mistake_is_found_at_its_line_with_what_to_write(record, findings):
    folder, found = findings(record)
    line = line_of(record["expect"], folder)
    said = [shown(one, folder) for one in found]
    assert [] != [one for one in found if is_met(record["expect"], one, folder, line)], "\n".join(said)


@pytest.mark.parametrize("record", RIGHT)
def test_nothing_is_found_in_what_is_right(record, findings):
    folder, found = findings(record)
    # A note says that nothing is wrong.
    assert [] == [shown(one, folder) for one in found if one.severity != "note"]


def test_there_are_as_many_as_the_table_of_reach_says():
    assert (75, 63) == (len(MISTAKES), len(RIGHT))
    assert 138 == len({param.id for param in MISTAKES}) + len({param.id for param in RIGHT})
