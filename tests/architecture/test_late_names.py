"""Names that are read from a module of Forgather which `import_module` imports exist there.

No type checker sees these reads: they are how the configuration tower uses a module of the training tower.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _constants(tree):
    """Returns the strings that a module binds to names."""
    return {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _text(node, constants, given):
    """Returns the string that an expression makes of constants and the given names; None for any other expression."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name):
        return given.get(node.id, constants.get(node.id))
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants, given)
    if isinstance(node, ast.JoinedStr):
        parts = [_text(part, constants, given) for part in node.values]
        return None if None in parts else "".join(parts)
    return None


def _imported(node, constants, importers):
    """Returns the module that a call imports; None if it imports none, or one that is known at run time only."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args):
        return None
    if node.func.id == "import_module":
        return _text(node.args[0], constants, {})
    if node.func.id in importers:
        parameter, name = importers[node.func.id]
        return _text(name, constants, {parameter: _text(node.args[0], constants, {})})
    return None


def _importers(tree):
    """Returns the functions that return the module `import_module` gives for their parameter."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and isinstance(node.body[-1], ast.Return) and node.args.args:
            call = node.body[-1].value
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "import_module":
                found[node.name] = (node.args.args[0].arg, call.args[0])
    return found


def reads(source):
    """Returns the (line, module, name) of each attribute of a module of Forgather that is imported late."""
    if "import_module" not in source:
        return []
    tree = ast.parse(source)
    constants, importers = _constants(tree), _importers(tree)
    found = []
    for scope in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        bound = {}
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                module = _imported(node.value, constants, importers)
                if module and isinstance(target, ast.Name):
                    bound[target.id] = module
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute):
                module = _imported(node.value, constants, importers)
                if isinstance(node.value, ast.Name):
                    module = bound.get(node.value.id)
                if module and module.startswith("forgather."):
                    found.append((node.lineno, module, node.attr))
    return sorted(set(found))


@functools.cache
def _names(module):
    """Returns the names that the body of a module binds; none for a module that does not exist."""
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    words = {alias.asname or alias.name for node in tree.body for alias in getattr(node, "names", ())}
    words |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    words |= {
        node.id
        for statement in tree.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return frozenset(words)


def _exists(module, name):
    return name in _names(module)


def test_names_of_modules_that_are_imported_late_exist():
    every = [
        (f"{path.relative_to(ROOT)}:{line}", module, name)
        for path in sorted(ROOT.glob("forgather/**/*.py"))
        for line, module, name in reads(path.read_text(encoding="utf-8"))
    ]
    assert [] == [read for read in every if not _exists(*read[1:])]
    # Reads by a function of its own, by a variable, and of the result at once are all found.
    found = {(module, name) for _, module, name in every}
    assert {
        ("forgather.ml.checkpoint.export", "export_checkpoint"),
        ("forgather.ml.random_state", "seeded_random"),
        ("forgather.ml.number_format", "format_bytes"),
    } <= found
    assert not _exists("forgather.ml.number_format", "size")
