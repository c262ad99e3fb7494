"""What runs for each commit is what the README tells a newcomer to run."""

import re
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def workflow():
    return YAML(typ="safe").load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def steps(workflow):
    (job,) = workflow["jobs"].values()
    return job["steps"]


def test_it_runs_the_commands_of_the_readme(steps):
    part = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Two commands\n")[2].partition("\n## ")[0]
    commands = re.findall(r"^    (make \w+)", part, re.M)
    assert 2 == len(commands)
    assert commands == [step["run"] for step in steps if "run" in step]


def test_its_commands_are_targets_of_the_makefile(steps):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {step["run"].split()[1] for step in steps if "run" in step} <= set(targets)


def test_it_takes_the_oldest_python_that_is_supported(steps):
    package = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (python,) = (step["with"] for step in steps if "setup-python" in step.get("uses", ""))
    assert package["requires-python"] == f">={python['python-version']}"
    assert all((ROOT / file).is_file() for file in python["cache-dependency-path"].split())


def test_it_may_only_read(workflow):
    assert {"contents": "read"} == workflow["permissions"]
    assert all("permissions" not in job for job in workflow["jobs"].values())


def test_a_new_commit_ends_the_run_of_the_one_before(workflow):
    assert workflow["concurrency"]["cancel-in-progress"] is True
    assert "github.ref" in workflow["concurrency"]["group"]
