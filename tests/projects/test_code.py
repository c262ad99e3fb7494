"""Every shipped config as Python makes the calls of the config, is laid out as ruff would, and reads back from YAML."""

import subprocess
import sys
from pathlib import Path

import pytest

from forgather.codegen.emit_python import Setting, emit_python
from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.environment import ConfigEnvironment
from forgather.config.equality import same_graph
from forgather.config.load import load
from forgather.config.render import render_text
from forgather.project.project import Project
from forgather.verification.prove import prove

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "projects").glob("*/templates/configs/**/*.yaml"))


def name(config):
    return f"{config.parents[2].name}-{config.stem}"


def project_of(config):
    folder = config.parents[2]
    return Project(str(config.relative_to(folder / "templates/configs")), str(folder))


def code_of(project, targets):
    setting = Setting(
        config=project.config_name,
        project=project.meta.name,
        project_dir=project.meta.project_dir,
        folder=project.meta.project_dir,
        system_path=tuple(project.meta.system_path),
    )
    return emit_python(project.graph, targets, setting)


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_a_config_as_python_makes_its_calls_and_as_yaml_reads_back_equal(config):
    project = project_of(config)
    for targets in (["main"], list(project.targets)):
        code = code_of(project, targets)
        calls = prove(
            project.graph,
            code.text,
            targets,
            code.parameters,
            project_dir=project.meta.project_dir,
            file=str(Path(project.meta.project_dir, "generated.py")),
        )
        assert calls > 10
    text = emit_yaml(project.graph)
    again = load(render_text(ConfigEnvironment(), text))
    assert same_graph(project.graph, again)
    assert text == emit_yaml(again)


def test_the_code_of_all_configs_is_laid_out_as_ruff_would(tmp_path):
    for config in CONFIGS:
        project = project_of(config)
        for targets in (["main"], list(project.targets)):
            file = tmp_path / f"{config.parents[2].name}_{config.stem}_{len(targets)}_targets.py"
            file.write_text(code_of(project, targets).text, encoding="utf-8")
    ruff = [sys.executable, "-m", "ruff"]
    options = ["--isolated", "--line-length", "120", "--no-cache", "."]
    for command in (["format", "--diff"], ["check", "--select", "E,F,I,B"]):
        done = subprocess.run([*ruff, *command, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert 0 == done.returncode, done.stdout


def test_there_are_configs():
    assert len(CONFIGS) >= 9
