"""Every project and config has goldens: a change of a template shows here what it does to all of them."""

import os
from datetime import datetime
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.config.environment import ConfigEnvironment
from forgather.config.lint.graph_check import check_graph
from forgather.config.load import load
from forgather.config.render import render
from forgather.project.metadata_file import read_meta
from tests.golden import check_golden

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "cases"
PROJECTS = sorted(file.parent for file in (ROOT / "projects").glob("*/meta.yaml"))
CONFIGS = sorted((ROOT / "projects").glob("*/templates/configs/*.yaml"))


def label(file):
    path = Path(file)
    if path.is_relative_to(ROOT / "templatelib"):
        return "lib:" + str(path.relative_to(ROOT / "templatelib"))
    return str(path.relative_to(ROOT / "projects"))


def rendered(config):
    project = config.parents[2]
    environment = ConfigEnvironment(
        searchpath=read_meta(str(project)).searchpath,
        variables={"project_dir": "/project", "workspace_root": "/workspace", "hostname": "host"},
        now=datetime(2026, 1, 2, 3, 4, 5),
    )
    return render(environment, f"configs/{config.name}")


def name(config):
    return f"{config.parents[2].name}-{config.stem}"


@pytest.mark.parametrize("config", CONFIGS, ids=name)
def test_a_config_renders_as_before_and_has_no_finding(config):
    made = rendered(config)
    lines = []
    for text, origin in made.source_map.lines():
        place = f"{label(origin.span.file)}:{origin.span.line}" if origin else ""
        lines.append(f"{text:<88} | {place}".rstrip() if text.strip() else "")
    check_golden(CASES / f"{name(config)}.map.txt", "\n".join(lines))
    graph = load(made)
    assert [] == [str(finding) for finding in (*made.diagnostics, *graph.diagnostics, *check_graph(graph))]


@pytest.mark.parametrize("project", PROJECTS, ids=lambda p: p.name)
def test_the_graphs_of_a_project_are_what_its_goldens_hold(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    if os.environ.get("FORGATHER_UPDATE_GOLDEN") == "1":
        main(["golden", "--update"])
    assert 0 == main(["golden"]), capsys.readouterr().out


def test_there_are_configs_to_compare():
    assert {"tiny_llama-tiny", "tiny_llama-hf_trainer", "optimizers-muon"} <= {name(config) for config in CONFIGS}
