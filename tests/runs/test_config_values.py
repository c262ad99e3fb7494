"""Values that are found in the text of a graph are those that loading the graph gives."""

import math
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "codegen"))

from random_graphs import GraphMaker  # noqa: E402

from forgather.codegen.emit_yaml import emit_yaml  # noqa: E402
from forgather.config.graph import Scalar  # noqa: E402
from forgather.config.insight.path_lookup import path_text  # noqa: E402
from forgather.config.traverse import walk_places  # noqa: E402
from forgather.runs.config_values import ConfigText, plain_value  # noqa: E402
from tests.runs.corpus import GRAPH  # noqa: E402


def same(left, right):
    both_nan = isinstance(left, float) and isinstance(right, float) and math.isnan(left) and math.isnan(right)
    return both_nan or (type(left) is type(right) and left == right)


def test_the_plain_values_of_random_graphs_are_found_at_their_paths_and_never_another_value():
    num_right = num_missing = 0
    for seed in range(150):
        graph = GraphMaker(seed).graph()
        text = ConfigText(emit_yaml(graph))
        count = Counter(path for path, _ in walk_places(graph))
        for path, node in walk_places(graph):
            name = path_text(path)
            if not isinstance(node, Scalar) or "submodule_searchpath" in name or not all(map(is_name, path)):
                continue
            # A call whose keywords have the names of its latent arguments has two values at one path.
            if any(count[path[:length]] > 1 for length in range(1, len(path) + 1)):
                continue
            # A number that no float can hold is a text here.
            is_huge = isinstance(node.value, int) and abs(node.value) > 10**300
            expected = str(node.value) if is_huge else node.value
            value = text.get(name)
            assert value is None or same(expected, value[0]), (seed, name, expected, value)
            num_right += value is not None
            num_missing += value is None
    assert num_right > 500
    assert num_missing < 0.05 * num_right


def is_name(step):
    """Whether a step is a position or a plain name: other keys are written in more ways than a look-up covers."""
    name = getattr(step, "name", "position")
    return isinstance(name, str) and name.isidentifier()


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("optimizer.lr", (0.5,)),
        ("main.optimizer_factory.lr", (0.5,)),
        ("optimizer", ("torch.optim:AdamW",)),
        ("optimizer.betas", ("[0.9, 0.95]",)),
        ("optimizer.betas[1]", (0.95,)),
        ("meta.config_description", ("A description: with a colon",)),
        (".run_dir.name", ("run_dir",)),
        ("dataset.folder", (None,)),
        ("meta", ("{...}",)),
        ("optimizer.lrr", None),
        ("optimizer.lr.x", None),
        ("optimizer.betas[7]", None),
        ("nothing", None),
        ("][", None),
        ("", None),
    ],
)
def test_a_value_is_found_by_its_path_also_through_aliases(path, expected):
    text = GRAPH.format(lr=0.5, optimizer="AdamW", output_dir="/out", model="~", resume="~")
    assert expected == ConfigText(text).get(path)


def test_the_paths_of_a_graph_lead_to_its_values():
    text = ConfigText(GRAPH.format(lr=0.5, optimizer="AdamW", output_dir="/out", model="~", resume="~"))
    paths = text.paths()
    assert {"optimizer.lr", "optimizer.betas[0]", "trainer_args.max_steps", ".run_dir.name"} <= set(paths)
    assert all(text.get(path) is not None for path in paths)


def test_an_alias_of_itself_ends():
    assert ConfigText("a: &a *a\nb: *b\n").get("a.x") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("-2", -2), ("+.5", 0.5), ("true", True), ("Null", None), ("", None), ("'it''s'", "it's"),
        ('"a\\nb"', "a\nb"), ("adamw", "adamw"), (".inf", math.inf), ("1_000", "1_000"), ("0x10", "0x10"), ('"', '"'),
    ],
)  # fmt: skip
def test_a_text_has_the_value_that_yaml_gives_it(text, value):
    assert same(value, plain_value(text))
