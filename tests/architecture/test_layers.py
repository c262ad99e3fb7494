"""Who may import whom: the table of docs/architecture.md, checked on every import of the package."""

import ast
import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from sources import faults, sources  # noqa: E402

# Longest prefix wins. A module may import modules of ours whose level is lower, or of its own level where
# `same level` holds (parts of one stage).
LEVELS = {
    "forgather": 0,
    "forgather.source": 0,
    "forgather.spelling": 0,
    "forgather.errors": 1,
    "forgather.bounded": 0,
    "forgather.cache_file": 1,
    "forgather.secret_names": 0,
    "forgather.shown_secrets": 1,
    "forgather.redaction": 2,
    "forgather.aliases": 2,
    "forgather.trainer_hooks": 1,
    "forgather.rule_conditions": 2,
    "forgather.interrupt": 3,
    "forgather.process_limits": 2,
    "forgather.launcher_env": 2,
    "forgather.launcher_env": 3,
    "forgather.rule_conditions": 2,
    "forgather.parallel_sizes": 3,
    "forgather.compatibility": 4,
    "forgather.rules": 5,
    "forgather.config": 2,
    "forgather.config.graph": 10,
    "forgather.config.path": 11,
    "forgather.config.traverse": 12,
    "forgather.config.environment": 10,
    "forgather.config.rendered": 11,
    "forgather.config.split": 20,
    "forgather.config.syntax": 21,
    "forgather.config._jinja": 30,
    "forgather.config.render": 31,
    "forgather.config.tags": 30,
    "forgather.config.yaml.parser": 40,
    "forgather.config.load": 42,
    "forgather.signatures": 45,
    "forgather.codegen": 50,
    "forgather.config.materialize": 60,
    "forgather.proof": 65,
    "forgather.project": 70,
    "forgather.launch": 80,
    "forgather.cli": 90,
    "forgather.__main__": 99,
}
ML_LEVELS = {
    "forgather.ml": 0,
    "forgather.ml.types": 10,
    "forgather.ml.metrics": 10,
    "forgather.ml.distributed": 11,
    "forgather.ml.log": 12,
    "forgather.ml.library_progress": 12,
    "forgather.ml.hub": 12,
    "forgather.ml.random_state": 12,
    "forgather.ml.model_class": 12,
    "forgather.ml.data": 20,
    "forgather.ml.documents": 17,
    "forgather.ml.model_inputs": 18,
    "forgather.ml.loss_reduction": 18,
    "forgather.ml.loss_reduction": 19,
    "forgather.ml.losses": 20,
    "forgather.ml.optim": 20,
    "forgather.ml.models": 20,
    "forgather.ml.model_fingerprint": 21,
    "forgather.ml.task": 21,
    "forgather.ml.checkpoint": 30,
    "forgather.ml.report": 39,
    "forgather.ml.callbacks": 40,
    "forgather.ml.tb_logger": 41,
    "forgather.ml.json_logger": 41,
    "forgather.ml.strategy": 50,
    "forgather.ml.trainer": 60,
    "forgather.ml.dry_run": 70,
}
HEAVY = {"torch", "numpy", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "tensorboard"}
ONLY_IMPORTER = {
    "jinja2": "forgather.config._jinja",
    "markupsafe": "forgather.config._jinja",
    "ruamel": "forgather.config.yaml.parser",
}
# Facades whose whole job is to point upward, lazily.
FACADES = {
    "forgather",
    "forgather.ml",
    "forgather.ml.callbacks",
    "forgather.ml.data",
    "forgather.project",
    "forgather.config",
    "forgather.signatures",
}

# What both towers stand on.
SHARED = {
    "forgather.errors",
    "forgather.source",
    "forgather.aliases",
    "forgather.rule_conditions",
    "forgather.rules",
    "forgather.compatibility",
    "forgather.launcher_env",
    "forgather.interrupt",
    "forgather.redaction",
    "forgather.trainer_hooks",
}


@functools.cache
def modules():
    return {source.name: source for source in sources()}


def imports(source):
    for_types = {
        id(inner)
        for node in source.of(ast.If)
        if getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in source.of(ast.Import, ast.ImportFrom):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        else:
            assert node.level == 0, f"{source.path}:{node.lineno}: relative import"
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def level(name, table):
    matches = [key for key in table if name == key or name.startswith(key + ".")]
    return max(matches, key=len)


def is_ml(name):
    return name == "forgather.ml" or name.startswith("forgather.ml.")


def upward(source):
    name = source.name
    if name in FACADES:
        return []
    found = []
    for imported, line in imports(source):
        if imported not in modules() or imported in FACADES:
            continue
        if is_ml(name) != is_ml(imported):
            if not (is_ml(name) and imported in SHARED):
                found.append(f"line {line}: {imported} belongs to the other tower")
            continue
        table = ML_LEVELS if is_ml(name) else LEVELS
        mine, theirs = level(name, table), level(imported, table)
        if mine != theirs and table[theirs] >= table[mine] and not same_stage(name, imported):
            found.append(f"line {line}: {imported} is not below {name}")
    return found


def test_a_module_imports_lower_layers_only():
    assert {} == faults(upward)


def same_stage(name, imported):
    """Unlisted parts of the configuration tower that share a folder are ordered by the no-cycle test."""
    return level(name, LEVELS) == "forgather.config" or level(imported, LEVELS) == "forgather.config"


def test_no_two_modules_import_each_other():
    edges = {
        name: {imported for imported, _ in imports(source) if imported in modules() and imported != name}
        for name, source in modules().items()
        if name not in FACADES
    }
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done or name not in edges:
            return
        path.append(name)
        for other in sorted(edges[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in edges:
        visit(name)


def by_another_door(source):
    name, found = source.name, []
    for imported, line in imports(source):
        root = imported.split(".")[0]
        if root in HEAVY and not is_ml(name):
            found.append(f"line {line}: {imported} in the configuration tower")
        door = ONLY_IMPORTER.get(root)
        if door and not (name == door or name.startswith(door + ".")):
            found.append(f"line {line}: {imported} is imported by {door} alone")
    return found


def test_third_parties_enter_by_their_one_door():
    assert {} == faults(by_another_door)


def test_the_table_can_fail():
    assert "forgather.config.render" == level("forgather.config.render", LEVELS)
    assert "forgather.config._jinja" == level("forgather.config._jinja.loader", LEVELS)
    assert LEVELS[level("forgather.config._jinja.loader", LEVELS)] > LEVELS["forgather.config.graph"]


def test_a_fault_is_seen(monkeypatch):
    monkeypatch.setitem(LEVELS, "forgather.config.graph", 99)
    monkeypatch.setitem(ONLY_IMPORTER, "jinja2", "forgather.cli")
    assert any("config.graph is not below" in said for found in faults(upward).values() for said in found)
    assert any("by forgather.cli alone" in said for found in faults(by_another_door).values() for said in found)
