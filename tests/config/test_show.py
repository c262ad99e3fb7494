import json

import pytest
from documents import graph_of

from forgather.config.insight.show import to_json, tree
from forgather.errors import UnknownTargetError

CONFIG = """
.d: &sizes [1, 2]
main: &main !singleton:trainers:Trainer@trainer
  args: [*sizes]
  kwargs: {model: !factory:torch:nn.Linear , path: a long text, latent_args: 1}
  latent_args: {late: ~}
  submodule_searchpath: lib
again: *main
opt: !partial:torch:optim.AdamW {lr: 1e-3}
parts: !dlist:@parts {a: 1, ~: .inf}
pair: !tuple [true, x]
odd: {kind: 1, [a, 1]: 2}
keyed: {1: one}
seed: !var {name: seed, default: 3}
token: !env TOKEN
steps: !calc "2 * 3"
meta: !meta:m:f
"""

TREE = """\
main: &main !singleton:trainers:Trainer@trainer
├─ [0]: list (2)
│  ├─ [0]: 1
│  └─ [1]: 2
├─ model: !factory:torch:nn.Linear
├─ path: 'a long text'
├─ latent_args: 1
├─ late: None
└─ submodule_searchpath: 'lib'
again: *main
opt: !partial:torch:optim.AdamW
└─ lr: 0.001
parts: !dlist:@parts (2)
├─ a: 1
└─ [key None]: inf
pair: !tuple (2)
├─ [0]: True
└─ [1]: 'x'
odd: dict (2)
├─ kind: 1
└─ [key ('a', 1)]: 2
keyed: dict (1)
└─ [key 1]: 'one'
seed: !var seed
└─ default: 3
token: !env TOKEN
steps: !calc '2 * 3'
meta: !meta:m:f
"""


def span(line):
    return {"file": "t.yaml", "line": line}


JSON = {
    "main": {
        "kind": "singleton",
        "id": 1,
        "constructor": "trainers:Trainer",
        "name": "trainer",
        "args": [[1, 2]],
        "kwargs": {
            "model": {"kind": "factory", "id": 2, "constructor": "torch:nn.Linear", "span": span(5)},
            "path": "a long text",
            "latent_args": 1,
        },
        "latent_args": {"late": None},
        "submodule_searchpath": "lib",
        "span": span(3),
    },
    "again": {"ref": 1},
    "opt": {"kind": "partial", "id": 3, "constructor": "torch:optim.AdamW", "kwargs": {"lr": 0.001}, "span": span(9)},
    "parts": {
        "kind": "dlist",
        "id": 4,
        "name": "parts",
        "items": [["a", 1], [None, {"kind": "scalar", "yaml": ".inf"}]],
        "span": span(10),
    },
    "pair": {"kind": "tuple", "id": 5, "items": [True, "x"], "span": span(11)},
    "odd": {
        "kind": "dict",
        "id": 6,
        "tag": False,
        "items": [["kind", 1], [{"kind": "tuple", "items": ["a", 1]}, 2]],
        "span": span(12),
    },
    "keyed": {"kind": "dict", "id": 7, "tag": False, "items": [[1, "one"]], "span": span(13)},
    "seed": {"kind": "var", "id": 8, "name": "seed", "default": 3, "span": span(14)},
    "token": {"kind": "env", "id": 9, "name": "TOKEN", "span": span(15)},
    "steps": {"kind": "calc", "id": 10, "expression": "2 * 3", "span": span(16)},
    "meta": {"kind": "meta", "id": 11, "constructor": "m:f", "span": span(17)},
}


def test_the_tree_shows_every_node_once():
    assert TREE == tree(graph_of(CONFIG))


def test_a_shared_container_is_marked_where_it_is_met_first():
    graph = graph_of(".d: &sizes [1]\na: [*sizes, *sizes]\n")
    assert "a: list (2)\n├─ [0]: &sizes list (1)\n│  └─ [0]: 1\n└─ [1]: *sizes\n" == tree(graph)


def test_the_tree_of_some_targets():
    assert "b: 2\n" == tree(graph_of("a: 1\nb: 2\n"), ["b"])
    with pytest.raises(UnknownTargetError, match=r"\[FG302\] no target 'c'"):
        tree(graph_of("a: 1\nb: 2\n"), ["c"])


def test_a_long_value_is_cut():
    assert f"a: '{'x' * 76}...\n" == tree(graph_of(f"a: {'x' * 200}\n"))


def test_the_json_of_every_kind_of_node():
    written = to_json(graph_of(CONFIG), label=lambda file: file.rpartition("/")[2], config="t.yaml")
    assert {"config": "t.yaml", "targets": JSON} == written
    json.dumps(written, allow_nan=False)


def test_a_shared_plain_container_is_written_once_without_a_tag():
    written = to_json(graph_of("a: &a {x: 1}\nb: [*a]\n"), label=lambda file: "f")["targets"]
    node = {"kind": "dict", "id": 1, "tag": False, "items": [["x", 1]], "span": {"file": "f", "line": 1}}
    assert {"a": node, "b": [{"ref": 1}]} == written


def test_secrets_of_the_environment_stay_symbolic(monkeypatch):
    monkeypatch.setenv("TOKEN", "planted-secret")
    graph = graph_of("a: !env TOKEN\n")
    assert "planted-secret" not in tree(graph) + json.dumps(to_json(graph))
