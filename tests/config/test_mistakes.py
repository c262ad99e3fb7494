"""The corpus of seeded mistakes, met by this project's own check."""

import shutil
import sys
from pathlib import Path

import pytest

from forgather.cli.options import OWN_NAMES
from forgather.errors import ForgatherError
from forgather.project.check import check_project
from forgather.project.project import Project

sys.path.insert(0, str(Path(__file__).parent / "mistakes"))

from corpus import PROJECT, Finding, describe, read_innocent, read_known_gaps, read_mistakes  # noqa: E402

MISTAKES = read_mistakes()
KNOWN_GAPS = read_known_gaps()
CONFIGS = ("baseline", "net", "distill")


def _findings(folder, config):
    """Returns what the check says about a config, with files relative to the project."""
    try:
        diagnostics = check_project(Project(config, folder), reserved=OWN_NAMES).findings
    except ForgatherError as error:
        diagnostics = [error.diagnostic, *error.others]
    return [
        Finding(
            file=_relative(found.span.file, folder) if found.span else None,
            line=found.span.line if found.span else None,
            code=found.code,
            severity=str(found.severity),
            message=found.message,
            hint=found.hint or "",
        )
        for found in diagnostics
    ]


def _relative(file, folder):
    return Path(file).relative_to(folder).as_posix() if Path(file).is_relative_to(folder) else file


def _cases():
    """Yields the mistakes; of those of one kind and code, every run of the suite has the first."""
    met = set()
    for mistake in MISTAKES:
        reason = KNOWN_GAPS.get(mistake.id)
        marks = [pytest.mark.xfail(reason=reason, strict=True)] if reason else []
        kind = (mistake.category, mistake.expect["code"])
        if kind in met:
            marks.append(pytest.mark.matrix)
        met.add(kind)
        yield pytest.param(mistake, id=mistake.id, marks=marks)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_project_itself_has_no_findings(config):
    assert [] == [describe(item) for item in _findings(PROJECT, config) if item.severity != "note"]


@pytest.mark.parametrize(
    ("edit", "places"),
    [
        (None, [("fragments/adam.yaml", 2)]),
        (("weight_decay: 0.05", "weight_decay: 0.0"), []),
        (("torch.optim:AdamW", "forgather.ml.optim:adamw"), []),
    ],
)
def test_an_optimizer_of_torch_that_decays_everything_is_a_note(edit, places, tmp_path):
    shutil.copytree(PROJECT, tmp_path / "project")
    if edit is not None:
        file = tmp_path / "project/templates/fragments/adam.yaml"
        file.write_text(file.read_text().replace(*edit))
    notes = [item for item in _findings(tmp_path / "project", "baseline") if item.severity == "note"]
    assert [(f"templates/{file}", line, "FG868") for file, line in places] == [(n.file, n.line, n.code) for n in notes]


@pytest.fixture
def folder(tmp_path_factory):
    """Always the same folder, empty: what was kept of a file that no edit touches still holds."""
    folder = tmp_path_factory.getbasetemp() / "mistakes"
    shutil.rmtree(folder, ignore_errors=True)
    return folder


@pytest.mark.parametrize("mistake", list(_cases()))
def test_a_mistake_is_found_where_it_was_made(mistake, folder):
    mistake.seed(folder)
    assert [] == mistake.shortfalls(_findings(folder, mistake.config), folder)


@pytest.mark.parametrize("edit", read_innocent(), ids=lambda edit: edit.id)
def test_what_is_right_is_not_called_a_mistake(edit, folder):
    edit.seed(folder)
    found = _findings(folder, edit.config)
    assert [] == [describe(item) for item in found if item.severity in ("error", "warning")]


TOGETHER = (
    "keyword-own-function",
    "keyword-own-package",
    "keyword-torch",
    "keyword-merged",
    "missing-required",
    "number-for-tuple",
    "strategy-choice",
    "calc-name",
    "option-never-read",
    "text-outside",
    "set-misspelt",
    "sub-template-unused",
    "override-changes-nothing",
    "unused-definition",
)


def test_all_mistakes_of_a_config_are_found_at_once(tmp_path):
    folder = tmp_path / "project"
    made = [mistake for mistake in MISTAKES if mistake.id in TOGETHER]
    made[0].seed(folder)
    for mistake in made[1:]:
        mistake.carry_out(folder)
    found = {(item.code, item.file, item.line) for item in _findings(folder, "baseline")}
    expected = {(mistake.expect["code"], *mistake.places(folder)[0]) for mistake in made}
    assert (len(TOGETHER), set()) == (len(made), expected - found)


def test_there_are_enough_mistakes_and_each_has_its_own_name():
    assert 60 <= len(MISTAKES)
    assert len(MISTAKES) == len({mistake.id for mistake in MISTAKES})


def test_nearly_all_are_met_exactly_and_the_others_have_a_reason():
    assert KNOWN_GAPS.keys() <= {mistake.id for mistake in MISTAKES}
    assert all(KNOWN_GAPS.values())
    assert 0.95 <= 1 - len(KNOWN_GAPS) / len(MISTAKES)
