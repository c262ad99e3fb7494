"""Every mistake in `cases/*.txt` gives the report that stands beside it.

A case is a title, the files that are written into a copy of the demo project, a command, and what it answers:

    === title
    +++ templates/configs/a.yaml
    main: *undefined
    $ fgcli -t a graph
    error[FG203]: ...
    exit status 1

`+++ FILE as an escaped text` takes the file with Python's escapes (`\\t`, `\\r`), so that odd bytes stay visible.
In `warnings.txt` stand mistakes that are told and do not stop. FORGATHER_UPDATE_GOLDEN=1 rewrites what stands behind each command.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgather.cli.main import main
from tests.golden import check_golden
from tests.project.workbench import ROOT

pytestmark = pytest.mark.usefixtures("warm_cache")

CASES = Path(__file__).with_name("cases")
ESCAPED = " as an escaped text"


@dataclass(frozen=True)
class Case:
    """One mistake: how to make it, and what its maker is told."""

    topic: str
    title: str
    made: str
    command: str

    @property
    def files(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for part in re.split(r"^\+\+\+ ", self.made, flags=re.MULTILINE)[1:]:
            name, _, text = part.partition("\n")
            if name.endswith(ESCAPED):
                found[name.removesuffix(ESCAPED)] = (
                    text.strip("\n").encode("ascii").decode("unicode_escape").encode("latin-1")
                )
            else:
                found[name] = text.encode()
        return found


def read_cases(file: Path) -> list[Case]:
    found = []
    for part in re.split(r"^=== ", file.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        made, _, rest = ("\n" + body).partition("\n$ fgcli")
        found.append(Case(file.stem, title, made[1:] + "\n" if made else "", rest.partition("\n")[0].strip()))
    return found


ALL = [case for file in sorted(CASES.glob("*.txt")) for case in read_cases(file)]


@pytest.fixture(scope="module")
def answers():
    return {}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "p"
    shutil.copytree(
        ROOT / "projects/tiny_llama", folder, ignore=shutil.ignore_patterns("output_models", "runs", "README.md")
    )
    return folder


@pytest.fixture
def project(original, tmp_path, monkeypatch):
    folder = tmp_path / "p"
    shutil.copytree(original, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("DATA_PATH", "postgres://reader:hunter2@example.org/data")
    for name in ("HF_TOKEN", "UNSET_DIR"):
        monkeypatch.delenv(name, raising=False)
    return folder


def calls_left() -> int:
    try:
        return 1 + calls_left()
    except RecursionError:
        return 0


def answer(case: Case, folder: Path, capsys) -> str:
    for name, content in case.files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(usual + 900 - calls_left())  # what has no end goes as deep, whoever runs the tests
    try:
        status = main(shlex.split(case.command))
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.setrecursionlimit(usual)
    printed = capsys.readouterr()
    # What `check` finds is what it gives.
    told = printed.out + printed.err if "check" in shlex.split(case.command) else printed.err
    text = f"{told}exit status {status}\n".replace(str(folder.parent) + os.sep, "<tmp>/")
    text = re.sub(r"\d{8}T\d{6}Z", "<time>", text.replace(str(ROOT) + os.sep, "<root>/"))
    return text.replace(os.path.dirname(os.__file__), "<python>").replace(tempfile.gettempdir() + os.sep, "<temp>/")


@pytest.mark.parametrize("case", ALL, ids=lambda case: f"{case.topic}: {case.title}")
def test_a_mistake_is_told_to_its_maker(case, project, capsys, answers):
    report = answer(case, project, capsys)

    answers[case] = report
    assert ("exit status 0" in report) is (case.topic == "warnings")
    assert 16 >= report.count("\n"), report
    assert "Traceback" not in report


@pytest.mark.parametrize("topic", sorted({case.topic for case in ALL}))
def test_the_reports_of_a_topic(topic, answers):
    of_topic = [case for case in ALL if case.topic == topic]
    if any(case not in answers for case in of_topic):
        pytest.skip("needs the reports of all cases of the topic")
    text = "\n".join(f"=== {case.title}\n{case.made}$ fgcli {case.command}\n{answers[case]}" for case in of_topic)
    check_golden(CASES / f"{topic}.txt", text)
