"""Who may import whom: the table in layers.py, checked on every import of the package."""

import ast
import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from layers import CONFIGURATION, FACADES, SCRIPTS, TRAINING  # noqa: E402
from sources import faults, sources  # noqa: E402

HEAVY = {"torch", "numpy", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "tensorboard"}
# The curves of a comparison are arrays: fifty long runs are read in three seconds, and without arrays in seven.
ARRAYS = {"curve", "curve_cache", "curves", "metric_columns", "comparison_page.page"}
ONLY_IMPORTER = {
    "jinja2": "forgather.config._jinja",
    "markupsafe": "forgather.config._jinja",
    "ruamel": "forgather.config.yaml",
}


def layers_of(table, prefix):
    """Returns {module: (stage, layer)}."""
    found, stage = {}, None
    for layer, line in enumerate(table.strip().splitlines()):
        if not line.startswith(" "):
            stage = line.rstrip(":")
            continue
        for name in line.split():
            assert prefix + name not in found, f"{name} is listed twice"
            found[prefix + name] = (stage, layer)
    return found


CONFIGURATION_LAYERS = layers_of(CONFIGURATION, "forgather.")
TRAINING_LAYERS = layers_of(TRAINING, "forgather.ml.")
SCRIPT_LAYERS = layers_of(SCRIPTS, "forgather.")
TABLES = (CONFIGURATION_LAYERS, TRAINING_LAYERS, SCRIPT_LAYERS)


@functools.cache
def modules():
    return {source.name: source for source in sources()}


@functools.cache
def imports(name):
    """Returns [(what a module imports, line)], with every form of import: at the top, in functions, for types."""
    found, source = [], modules()[name]
    for node in source.of(ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
            continue
        assert node.level == 0, f"{source.path}:{node.lineno}: relative import"
        submodules = [f"{node.module}.{alias.name}" for alias in node.names]
        named = [submodule for submodule in submodules if submodule in modules()]
        found += [(submodule, node.lineno) for submodule in named]
        if len(named) < len(submodules):
            found.append((node.module, node.lineno))
    return found


def loaded_with(name, found):
    """Adds to `found` the names of all modules that importing a module imports: at the top, and of ours recursively."""
    top = {node.lineno for node in modules()[name].tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
    for imported, line in imports(name):
        if line in top and imported not in found:
            found.add(imported)
            if imported in modules():
                loaded_with(imported, found)
    return found


def unlisted(source):
    return source.name not in {*CONFIGURATION_LAYERS, *TRAINING_LAYERS, *SCRIPT_LAYERS, *FACADES}


def upward(source):
    name = source.name
    if name in FACADES:
        return []
    table = next(table for table in TABLES if name in table)
    found = []
    for imported, line in imports(name):
        if imported not in modules() or imported == "forgather":
            continue
        if imported in FACADES:
            found.append(f"line {line}: {imported} is a facade; import from the module that defines the name")
        elif imported in table:
            if table[imported][1] >= table[name][1]:
                found.append(f"line {line}: {imported} is not in a layer below")
        elif table is SCRIPT_LAYERS and imported in TRAINING_LAYERS:
            continue
        elif table is CONFIGURATION_LAYERS or CONFIGURATION_LAYERS.get(imported, ("", 0))[0] != "foundation":
            found.append(f"line {line}: {imported} belongs to the other tower")
    return found


def eager(source):
    """Returns imports of ours that a facade makes when it is imported."""
    if source.name not in FACADES:
        return []
    at_import = [node for node in source.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return [ast.unparse(node) for node in at_import if "forgather" in ast.unparse(node)]


def by_another_door(source):
    name, found = source.name, []
    for imported, line in imports(name):
        root = imported.split(".")[0]
        is_array = root == "numpy" and name.removeprefix("forgather.runs.") in ARRAYS
        if root in HEAVY and name in CONFIGURATION_LAYERS and not is_array:
            found.append(f"line {line}: {imported} in the configuration tower")
        door = ONLY_IMPORTER.get(root)
        if door and not (name == door or name.startswith(door + ".")):
            found.append(f"line {line}: {imported} is imported by {door} alone")
    return found


def test_a_trainer_does_not_wait_for_the_import_of_datasets():
    found = loaded_with("forgather.ml.trainer.trainer", set())
    assert {"torch", "forgather.ml.trainer.data_loader", "forgather.ml.data.answer_rows"} <= found
    assert set() == {name.split(".")[0] for name in found} & {"datasets", "pyarrow", "pandas", "peft"}


def test_every_module_has_a_layer():
    assert {} == faults(unlisted)


def test_every_layer_is_that_of_a_module():
    assert set() == {*CONFIGURATION_LAYERS, *TRAINING_LAYERS, *SCRIPT_LAYERS, *FACADES} - set(modules())


def test_a_module_imports_lower_layers_only():
    assert {} == faults(upward)


def test_a_facade_imports_nothing_of_ours():
    assert {} == faults(eager)


def test_third_parties_enter_by_their_one_door():
    assert {} == faults(by_another_door)


@pytest.mark.parametrize(
    ("name", "imported", "fault"),
    [
        ("forgather.config.syntax", "forgather.config.insight.blame", "not in a layer below"),
        ("forgather.config.graph", "forgather.config.graph", "not in a layer below"),
        ("forgather.config.graph", "forgather.ml.types", "the other tower"),
        ("forgather.ml.types", "forgather.config.graph", "the other tower"),
        ("forgather.ml.types", "forgather.lightning.words", "the other tower"),
        ("forgather.lightning.words", "forgather.config.graph", "the other tower"),
        ("forgather.cli.main", "forgather.signatures", "is a facade"),
    ],
)
def test_an_import_that_points_up_is_seen(monkeypatch, name, imported, fault):
    monkeypatch.setitem(globals(), "imports", lambda _: [(imported, 1)])
    assert [True] == [fault in said for said in upward(modules()[name])]


def test_a_library_behind_another_door_is_seen(monkeypatch):
    monkeypatch.setitem(ONLY_IMPORTER, "jinja2", "forgather.cli")
    assert any("by forgather.cli alone" in said for found in faults(by_another_door).values() for said in found)


def test_a_module_without_a_layer_is_seen(monkeypatch):
    monkeypatch.delitem(CONFIGURATION_LAYERS, "forgather.config.graph")
    assert ["forgather/config/graph.py"] == list(faults(unlisted))
