"""Which names a module has.

Takes a module's source, gives what its statements and its `__all__` say. Keeps true: a module that may make names in
another way than by its statements says so.
"""

from __future__ import annotations

import ast
import re

from forgather.signatures.lazy import hands_out_its_name
from forgather.signatures.things import Module

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
