"""Flowcharts for Mermaid and Graphviz: every box once, and no text of a config that acts as markup."""

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from forgather.codegen.diagram import boxes_of
from forgather.codegen.dot import dot
from forgather.codegen.mermaid import mermaid, too_large
from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.render import render_text
from forgather.project.project import Project

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "projects").glob("*/templates/configs/*.yaml"))
SMALL = """\
tokenizer: &tokenizer !singleton:app.text:Tokenizer
  size: 100
main: !singleton:app:Trainer@trainer
  tokenizer: *tokenizer
  model: !partial:app:Model {tokenizer: *tokenizer, betas: [0.9, 0.95]}
"""
HOSTILE = r"""
'a"]': &a !call:app:Thing
  "`x`": "\"] --> n1; click n1 javascript:x %% # ; | {b} <b>&amp;"
  bidi: "left \u202E thgir"
  control: "a\0b\x1b"
list: [*a, *a, "--> <table>]]>"]
end: {subgraph x: {"1. y": [*a]}}
"""
NODE = re.compile(r'  (n\d+)\["([^"\n]*)"\]:::(singleton|factory|partial|data)')
EDGE = re.compile(r'  (n\d+) (-->|-\.->)\|"([^"\n]*)"\| (n\d+)')
REST = re.compile(r"flowchart LR|  classDef \w+ [\w#:,-]+|  class n\d+(,n\d+)* shared")


def graph_of(text):
    return load(render_text(ConfigEnvironment(), text))


def chart(text):
    """Nodes and edges of a flowchart; every line must be one we know."""
    nodes, edges = {}, []
    for line in text.splitlines():
        if node := NODE.fullmatch(line):
            assert node[1] not in nodes
            nodes[node[1]] = node[2]
        elif edge := EDGE.fullmatch(line):
            edges.append(edge.groups())
        else:
            assert REST.fullmatch(line), line
    assert {name for edge in edges for name in (edge[0], edge[3])} <= set(nodes)
    return nodes, edges


def tables(text):
    """Labels of a graph of Graphviz, as XML, and its edges; every line must be one we know."""
    head, _, body = text.partition("arrowsize=0.6]\n")
    assert head.startswith("digraph config {")
    found, edges = {}, []
    for line in body.splitlines():
        if node := re.fullmatch(r"  (n\d+) \[label=<(.*)>\]", line):
            found[node[1]] = ElementTree.fromstring(node[2])
        elif edge := re.fullmatch(
            r"  (n\d+):(?:r\d+|more):e -> (n\d+):head:w(?: \[style=dashed, color=\"#\w+\"\])?", line
        ):
            edges.append(edge.groups())
        else:
            assert "}" == line
    return found, edges


def test_a_flowchart_has_each_box_once_and_scalars_in_its_label():
    nodes, edges = chart(mermaid(graph_of(SMALL)))
    assert {
        "n1": "Tokenizer (tokenizer)<br/>size: 100",
        "n2": "Trainer (trainer)",
        "n3": "Model<br/>betas: [0.9, 0.95]",
    } == nodes
    assert [
        ("n2", "-->", "tokenizer", "n1"),
        ("n2", "-->", "model", "n3"),
        ("n3", "-.->", "tokenizer", "n1"),
    ] == edges
    assert "  class n1 shared\n" in mermaid(graph_of(SMALL))


def test_a_long_box_is_cut_in_a_flowchart():
    text = "main: !call:a:b\n" + "".join(f"  k{number}: {'v' * 90}\n" for number in range(9))
    (label,) = chart(mermaid(graph_of(text)))[0].values()
    lines = label.split("<br/>")
    assert (8, "and 3 more") == (len(lines), lines[-1])
    assert all(len(line) <= 44 for line in lines)


def test_no_text_acts_in_a_flowchart():
    nodes, _ = chart(mermaid(graph_of(HOSTILE)))
    assert 5 == len(nodes)
    for label in nodes.values():
        rest = re.sub(r"#\d+;|<br/>", "", label)
        assert not re.search('[`"<>&|{};#\u202e\x00-\x1f]', rest), rest


def test_a_flowchart_that_is_too_large_says_so():
    assert too_large(mermaid(graph_of(SMALL))) is None
    many = "a: &a !call:x:y\nmain: [" + "*a, " * 501 + "]\n"
    assert "501 arrows" in too_large(mermaid(graph_of(many)))
    long = "main:\n" + "".join(
        f"  k{number}: !call:{'x' * 40}:y {{a: 1}}\n  j{number}: !call:z:{'x' * 40}\n" for number in range(400)
    )
    assert "maxTextSize" in too_large(mermaid(graph_of(long)))


def test_graphviz_gets_a_table_for_each_box():
    found, edges = tables(dot(graph_of(SMALL)))
    texts = {name: [cell for cell in table.itertext() if cell.strip()] for name, table in found.items()}
    assert ["Trainer", " &trainer", "app:Trainer", "tokenizer", "→", "model", "→"] == texts["n2"]
    assert [("n2", "n1"), ("n2", "n3"), ("n3", "n1")] == edges


def test_no_text_acts_in_graphviz():
    found, _ = tables(dot(graph_of(HOSTILE)))
    assert {"table", "tr", "td", "b", "br", "font"} == {part.tag for table in found.values() for part in table.iter()}
    text = "".join("".join(table.itertext()) for table in found.values())
    assert "--> <table>]]>" in text
    assert "left \\u202e thgir" in text


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: f"{file.parents[2].name}-{file.stem}")
def test_every_shipped_config_can_be_drawn(config):
    graph = Project(config.name, str(config.parents[2])).graph
    calls = len(boxes_of(graph)) - 1
    text = mermaid(graph)
    assert calls == len(chart(text)[0])
    assert too_large(text) is None
    assert calls == len(tables(dot(graph))[0])


def test_graphviz_draws_what_it_gets():
    program = shutil.which("dot")
    if program is None:
        pytest.skip("no Graphviz: apt-get install graphviz")
    for text in (SMALL, HOSTILE):
        done = subprocess.run(
            [program, "-Tsvg"], input=dot(graph_of(text)), capture_output=True, text=True, check=False
        )
        assert (0, "") == (done.returncode, done.stderr)
