"""`fault_tolerance` of a config: what it may be, and what it changes."""

import pytest

from forgather.errors import ProjectError
from forgather.project.fault_tolerance import FaultTolerance, fault_tolerance, restart_assignments
from forgather.project.project import Project
from tests.project.workbench import fgcli, make_project

CONFIG = """\
meta: {{output_dir: out, fault_tolerance: {tolerance}}}
main: !singleton:forgather.ml:Trainer
  model: ~
  args: !singleton:forgather.ml:TrainingArguments
    output_dir: out
{saves}
"""


def graph(tmp_path, tolerance, saves=""):
    text = CONFIG.format(tolerance=tolerance, saves=saves and f"    {saves}")
    return Project("a", str(make_project(tmp_path / "bench", {"templates/configs/a.yaml": text}))).graph


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("~", None),
        ("{}", FaultTolerance()),
        ("{auto_resume: false, max_retry_attempts: 0}", FaultTolerance(auto_resume=False, max_retry_attempts=0)),
        ("{checkpoint_interval: 500}", FaultTolerance(checkpoint_interval=500)),
    ],
)
def test_what_a_config_says_is_read(tmp_path, text, expected):
    assert expected == fault_tolerance(graph(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("3", "is 3"),
        ("{retries: 3}", "has no setting 'retries'"),
        ("{max_retry_attempts: often}", "has max_retry_attempts: 'often'"),
        ("{max_retry_attempts: -1}", "has max_retry_attempts: -1"),
        ("{max_retry_attempts: true}", "has max_retry_attempts: True"),
        ("{auto_resume: 1}", "has auto_resume: 1"),
        ("{checkpoint_interval: 0}", "has checkpoint_interval: 0"),
    ],
)
def test_what_makes_no_sense_is_refused_by_the_run_and_by_the_check(tmp_path, text, told):
    with pytest.raises(ProjectError, match="FG640") as caught:
        fault_tolerance(graph(tmp_path, text))
    assert told in caught.value.message
    checked = fgcli("-t", "a", "check", cwd=tmp_path / "bench")
    assert 1 == checked.returncode and "FG640" in checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("{auto_resume: 1}", "write true or false"),
        ("{max_retry_attempts: 1001}", "write a whole number from 0 to 1000"),
        ("{checkpoint_interval: 0}", "write a whole number from 1"),
        ("{max_retry_attempts: [3]}", "write a whole number from 0 to 1000"),
    ],
)
def test_what_may_be_written_is_reported(tmp_path, text, hint):
    with pytest.raises(ProjectError) as caught:
        fault_tolerance(graph(tmp_path, text))
    assert hint == caught.value.hint


@pytest.mark.parametrize(
    ("saves", "expected"),
    [
        ("", [("+main.args.save_strategy", '"steps"'), ("+main.args.save_steps", "5")]),
        ('save_strategy: "no"', [("main.args.save_strategy", '"steps"'), ("+main.args.save_steps", "5")]),
        ("save_strategy: steps", [("+main.args.save_steps", "5")]),
        ("save_strategy: epoch", []),
        ("{save_strategy: steps, save_steps: 9}"[1:-1].replace(", ", "\n    "), []),
    ],
)
def test_the_interval_holds_where_the_config_saves_nothing(tmp_path, saves, expected):
    found = graph(tmp_path, "{checkpoint_interval: 5}", saves)
    assert expected == list(restart_assignments(found, fault_tolerance(found), resumes=False))


def test_a_further_attempt_resumes(tmp_path):
    found = graph(tmp_path, "{}")
    expected = (("+main.args.resume_from_checkpoint", '"auto"'),)
    assert expected == restart_assignments(found, fault_tolerance(found), resumes=True)
    assert () == restart_assignments(found, fault_tolerance(found), resumes=False)


def test_a_job_that_was_queued_again_resumes_without_further_words(tmp_path):
    found = graph(tmp_path, "")
    assert fault_tolerance(found) is None
    assert "resume_from_checkpoint" in restart_assignments(found, None, resumes=True)[0][0]
    assert () == restart_assignments(found, None, resumes=False)
