"""Names that a package fetches when they are asked for.

Takes a module with `__getattr__`, gives where a name comes from. Keeps true: only literal tables are believed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from forgather.signatures.symbols import Doubt, Module

_MANY_STARS = 12


def lazy_target(module: Module, name: str) -> tuple[str, str] | Doubt | None:
    """Returns the module and the attribute that a lazy name stands for; None where it surely is no such name.

    The attribute is "" where the name is that of the module itself.
    """
    if module.has("_LazyModule(") and (name.endswith("Fast") or name.startswith("_")):
        return Doubt(f"{module.name!r} answers for {name!r} by code")
    if not module.has(f'"{name}"') and not module.has(f"'{name}'"):
        return None if _is_closed(module) else Doubt(f"{module.name!r} answers for names by code")
    for table in _tables(module, name):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                target = _place(value, name)
                if target is not None:
                    return target
            elif isinstance(key, ast.Constant) and isinstance(key.value, str) and _lists(value, name):
                return key.value, name
    return Doubt(f"{module.name!r} answers for {name!r} by code")


def _tables(module: Module, name: str) -> Iterator[ast.Dict]:
    for statement in module.block.plain(name):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            yield statement.value


def _place(value: ast.expr, name: str) -> tuple[str, str] | None:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        place, _, attribute = value.value.partition(":")
        return place, attribute or name
    if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == 2:
        parts = [e.value for e in value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
        if len(parts) == 2:
            return parts[0], parts[1]
    return None


def _lists(value: ast.expr, name: str) -> bool:
    items = value.elts if isinstance(value, ast.List | ast.Tuple | ast.Set) else ()
    return any(isinstance(item, ast.Constant) and item.value == name for item in items)


def _is_closed(module: Module) -> bool:
    """Returns whether a module's `__getattr__` refuses every name outside a literal table."""
    if module.has("_LazyModule("):
        return True
    for statement in module.block.binding("__getattr__"):
        if isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__":
            return _refuses(statement, module)
    return False


def hands_out_its_name(statement: ast.stmt) -> bool:
    """Returns whether a statement gives the module's name to a call that may set names on the module."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and any(isinstance(a, ast.Name) and a.id == "__name__" for a in node.args):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if "logger" not in called.lower():
                return True
    return False


def _refuses(function: ast.FunctionDef, module: Module) -> bool:
    first = next((s for s in function.body if not isinstance(s, ast.Expr | ast.Import | ast.ImportFrom)), None)
    if not isinstance(first, ast.If) or not isinstance(first.body[-1], ast.Raise):
        return False
    test = first.test
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.NotIn):
        return False
    table = test.comparators[0]
    if not isinstance(table, ast.Name):
        return False
    literal = [
        s.value
        for s in module.block.plain(table.id)
        if isinstance(s, ast.Assign | ast.AnnAssign)
        and table.id
        in [t.id for t in (s.targets if isinstance(s, ast.Assign) else [s.target]) if isinstance(t, ast.Name)]
    ]
    return len(literal) == 1 and isinstance(literal[0], ast.Dict | ast.Set | ast.List | ast.Tuple)


def stars_last(statements: Sequence[ast.stmt], name: str) -> Sequence[ast.stmt]:
    """Returns statements so that explicit imports count before stars, and stars by likeness to the name."""
    stars = [s for s in statements if isinstance(s, ast.ImportFrom) and s.names[0].name == "*"]
    if not stars:
        return statements
    others = [s for s in statements if s not in stars]
    if len(stars) >= _MANY_STARS:
        wanted = name.lower()
        stars.sort(key=lambda s: _likeness((s.module or "").rpartition(".")[2], wanted))
    return [*stars, *others]


def _likeness(module: str, wanted: str) -> int:
    bare = module.replace("_", "").lower()
    return len(bare) if bare and bare in wanted else 0


# `globals()` for anything but listing the names, or looking one up.
_WRITES_GLOBALS = re.compile(
    r"(?<!\*)(?<!\bin )(?<!sorted\()(?<!list\()(?<!set\()\bglobals\(\)(?!\[[^\]\n]*\](?!\s*=[^=]))(?!\.get\b)"
)
_OPEN_MARKS = ("setattr(sys.modules", "sys.modules[__name__]", "global_enum", "._convert_(")
_OPEN_MARKS_AT_MARGIN = ("vars()", "exec(", "__dict__", "setattr(")


def makes_names(module: Module, is_lazy: bool = False) -> bool:
    """Returns whether a module may have names that no statement of it binds."""
    if module.has("globals()") and module.text and _WRITES_GLOBALS.search(module.text.text):
        return True
    if is_lazy:
        return False
    if any(module.has(mark) for mark in _OPEN_MARKS):
        return True
    if any(module.has(mark) and bool(module.block.plain(mark)) for mark in _OPEN_MARKS_AT_MARGIN):
        return True
    return module.has("(__name__") and any(hands_out_its_name(s) for s in module.block.plain("(__name__"))


def set_by_functions(module: Module, name: str) -> bool:
    """Returns whether a function of the module declares a name as global, to set it."""
    if not module.has("global ") or module.text is None:
        return False
    return re.search(rf"\n[ \t]+global [^\n]*\b{re.escape(name)}\b", module.text.text) is not None


def has_stars(module: Module) -> bool:
    """Returns whether a module imports all names of another one."""
    return module.has("import *") or module.has("import (*")


def read_listed(module: Module) -> frozenset[str] | None:
    """Returns the literal `__all__` of a module; None where it has none, or not as a literal."""
    if not module.has("__all__"):
        return None
    names: set[str] | None = None
    for statement in module.block.plain("__all__"):
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            return None
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if not isinstance(target, ast.Name) or target.id != "__all__":
            continue
        if not isinstance(statement.value, ast.List | ast.Tuple):
            return None
        for item in statement.value.elts:
            if not isinstance(item, ast.Constant) or not isinstance(item.value, str):
                return None
            names = {item.value} if names is None else names | {item.value}
    return None if names is None else frozenset(names)


def may_list(module: Module, name: str) -> bool:
    """Returns whether a module that is imported lazily, by its literal `__all__`, may list a name there."""
    return any(module.has(text) for text in (f'"{name}"', f"'{name}'", "import *"))
