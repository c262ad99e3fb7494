import pytest
from documents import graph_of

from forgather.codegen.emit_yaml import emit_yaml
from forgather.config.equality import same_graph
from forgather.config.graph import Graph
from forgather.config.yaml.scalar_text import key_text, quoted, scalar_text

CONFIG = """
.base: &base {eps: 1e-8, betas: [0.9, 0.95]}
main: &trainer !singleton:trainers:Trainer@trainer
  args: !call:args:Args { lr: 1e-3 }
  model: !factory:torch:nn.Linear [2, 2]
  text: "two\\nlines\\n"
opt: !partial:torch:optim.AdamW {<<: *base, lr: !var {name: lr, default: ~}}
both: [*trainer, *trainer, [], {}, [[1]], {a: {b: c}}]
explicit: !call:m:f {kwargs: {args: 1}}
mixed: !call:m:f {arg0: 1, x: 2, latent_args: {y: 3}, submodule_searchpath: [lib]}
parts: !dlist:@parts {a: !tuple [1], ~: ~}
odd: {[a, 1]: x, 1: y, "yes": no, "1": z}
token: !env TOKEN
steps: !calc "2 * 3"
"""


def test_the_text_of_every_kind_of_node():
    assert """\
.base:
  eps: 1e-08
  betas: &betas
    - 0.9
    - 0.95
main: &trainer !singleton:trainers:Trainer@trainer
  args: !singleton:args:Args
    lr: 0.001
  model: !factory:torch:nn.Linear
    - 2
    - 2
  text: |
    two
    lines
opt: !partial:torch:optim.AdamW
  eps: 1e-08
  betas: *betas
  lr: !var
    name: lr
    default: ~
both:
  - *trainer
  - *trainer
  - []
  - {}
  - - - 1
  - a:
      b: c
explicit: !singleton:m:f
  kwargs:
    args: 1
mixed: !singleton:m:f
  args:
    - 1
  kwargs:
    x: 2
  submodule_searchpath:
    - lib
  latent_args:
    y: 3
parts: !dlist:@parts
  a: !tuple
    - 1
  ~: ~
odd:
  ? [a, 1]
  : x
  1: y
  "yes": "no"
  "1": z
token: !env TOKEN
steps: !calc "2 * 3"
""" == emit_yaml(graph_of(CONFIG))


def test_it_reads_back_to_an_equal_graph_and_writes_the_same_text_again():
    graph = graph_of(CONFIG)
    text = emit_yaml(graph)
    assert same_graph(graph, graph_of(text))
    assert text == emit_yaml(graph_of(text))


def test_two_anchors_of_one_name_get_two_names():
    text = emit_yaml(graph_of("a: &x [1]\nb: *x\nc: &x [2]\nd: *x\n"))
    assert "a: &x\n  - 1\nb: *x\nc: &x_2\n  - 2\nd: *x_2\n" == text


def test_an_empty_graph_is_an_empty_mapping():
    assert "{}\n" == emit_yaml(Graph(targets={}))


def test_the_environment_stays_symbolic(monkeypatch):
    monkeypatch.setenv("TOKEN", "planted-secret")
    assert "a: !env TOKEN\n" == emit_yaml(graph_of("a: !env TOKEN\n"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("a", "a"), ("a b", "a b"), ("torch:nn", "torch:nn"), ("a: b", '"a: b"'), ("", '""'), ("~", '"~"'), ("1", '"1"'),
        ("true", '"true"'), ("yes", '"yes"'), ("no", '"no"'), ("none", '"none"'),
        (" a", '" a"'), ("a ", '"a "'), ("-", '"-"'), ("a#", '"a#"'),
        ("2001-01-01", '"2001-01-01"'), ("=", '"="'), ("é", '"é"'), ("\x85", '"\\u0085"'), ("\\", '"\\\\"'), (1.5, "1.5"),
        (10**20, "100000000000000000000"), (float("-inf"), "-.inf"), (float("nan"), ".nan"), (False, "false"),
    ],
)  # fmt: skip
def test_plain_values(value, expected):
    assert expected == scalar_text(value)


def test_keys_and_quotes():
    assert '["a,b", 1]' == key_text(("a,b", 1))
    assert '"a\\nb"' == quoted("a\nb")


@pytest.mark.parametrize("late", ["!var late", "!var {name: late, default: {x: 1}}"])
def test_latent_arguments_of_a_variable_are_written_as_such(late):
    graph = graph_of(f"main: !partial:m:f {{y: 2, latent_args: {late}}}\n")
    assert "latent_args: !var" in emit_yaml(graph)
    assert same_graph(graph, graph_of(emit_yaml(graph)))
