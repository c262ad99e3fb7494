"""The flowchart in docs/graph_page.md is what the command prints for the config beside it."""

import re
from pathlib import Path

from forgather.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "graph_page.md"


def test_the_flowchart_is_what_the_command_writes(tmp_path, monkeypatch, capsys):
    fenced = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.S))
    (tmp_path / "meta.yaml").write_text("name: Example\n")
    (tmp_path / "templates/configs").mkdir(parents=True)
    (tmp_path / "templates/configs/a.yaml").write_text(fenced["yaml"])
    monkeypatch.chdir(tmp_path)
    assert 0 == main(["graph", "--format", "mermaid"])
    assert fenced["mermaid"] == capsys.readouterr().out
