"""Errors about constructors that do not exist, in the words of `config/resolve.py`.

Takes what was looked for, raises a `ResolveError` with the nearest names. Keeps true: the names come from source;
nothing is imported to list them.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from forgather.config.lint.file_suggestions import near_file, near_module, near_symbol, own_module
from forgather.errors import ResolveError, nearest
from forgather.signatures.lazy_ast import Block, Parsed
from forgather.signatures.module_finder import FOLDER, Finder
from forgather.signatures.name_resolution import Names
from forgather.signatures.symbols import Class, Module, Thing


def refuse_file(name: str, file: str, project_dir: str) -> NoReturn:
    """Refuses a file that does not exist, or is no Python file."""
    if os.path.isfile(file):
        raise ResolveError(f"{name!r} is not a Python file", code="FG322", hint="name a .py file")
    raise ResolveError(f"no file {name!r} in {project_dir}", code="FG322", hint=near_file(name, file, project_dir))


def refuse_folders(name: str) -> NoReturn:
    """Refuses a relative module without folders."""
    raise ResolveError(
        f"the relative module {name!r} has no folders to be looked for in",
        code="FG325",
        hint="add submodule_searchpath: [FOLDER] to the call",
    )


def refuse_module(
    name: str, folders: Sequence[str] | None, finder: Finder, *, symbol: str = "", project_dir: str = ""
) -> NoReturn:
    """Refuses a module that does not exist."""
    if folders is not None:
        hint = nearest(name.lstrip("."), finder.listing(folders))
        raise ResolveError(f"no module {name!r} in {', '.join(folders)}", code="FG320", hint=hint)
    parts = name.split(".")
    missing = next(".".join(parts[: i + 1]) for i in range(len(parts)) if not finder.find(".".join(parts[: i + 1])))
    parent, _, leaf = missing.rpartition(".")
    above = finder.find(parent) if parent else None
    inside = finder.listing(above.folders) if above and above.folders is not None else []
    known = inside if parent else sorted({*finder.listing(None), *sys.stdlib_module_names})
    hint = own_module(name, symbol, project_dir) or near_module(name, symbol, missing, known)
    if hint is None and parent and not inside:
        hint = f"{parent!r} is a module, not a package"
    raise ResolveError(f"no module named {missing!r}", code="FG320", hint=hint)


def refuse_symbol(shown: str, part: str, names: Names, things: Sequence[Thing]) -> NoReturn:
    """Refuses a symbol that does not exist."""
    key = tuple(map(id, things))
    if key not in names.spelled:
        # With the things, so that their ids stay theirs.
        names.spelled[key] = (tuple(things), *_symbols(names, things))
    _, known, own = names.spelled[key]
    hint = near_symbol(shown, part, known, own)
    raise ResolveError(f"{shown!r} has no symbol {part!r}", code="FG321", hint=hint)


def _symbols(names: Names, things: Sequence[Thing]) -> tuple[list[str], list[str]]:
    """Returns the symbols of things, and those that files of the project define."""
    known: set[str] = set()
    own: set[str] = set()
    for thing in things:
        if isinstance(thing, Module):
            if thing.name.startswith(FOLDER):
                own.update(thing.block.defined())
            known.update(_exported(thing, names, {thing.name}))
            if thing.found.folders is not None:
                known.update(names.world.finder.listing(thing.found.folders))
        elif isinstance(thing, Class):
            for base in names.mro(thing):
                if isinstance(base, Class):
                    known.update(_bound(base.body))
    return sorted(name for name in known if not name.startswith("__")), sorted(own)


def refuse_value(constructor: str, nodes: Sequence[ast.expr]) -> NoReturn:
    """Refuses a literal, which cannot be called."""
    node = nodes[0]
    kind = type(node.value).__name__ if isinstance(node, ast.Constant) else _KINDS[type(node)]
    shown = str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)
    message = f"{constructor!r} is {kind} {shown[:60]!r}, which cannot be called"
    raise ResolveError(message, code="FG323", hint="name a class or function")


_KINDS = {ast.JoinedStr: "str", ast.List: "list", ast.Tuple: "tuple", ast.Dict: "dict", ast.Set: "set"}


def _bound(block: Block | Parsed) -> Iterator[str]:
    yield from block.defined()
    for statement in block.plain():
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias) and node.name != "*":
                yield node.asname or node.name.partition(".")[0]


def _exported(module: Module, names: Names, seen: set[str], *, by_star: bool = False) -> Iterator[str]:
    """Yields the names of a module, with those of the modules that it imports stars from."""
    if module.text is None:
        return
    listed = names.listed(module)
    if listed is not None:
        yield from listed
        if by_star:
            return
    yield from _bound(module.block)
    for statement in module.block.plain():
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                source = names.star_source(module, node)
                if isinstance(source, Module) and source.name not in seen:
                    seen.add(source.name)
                    inside = _exported(source, names, seen, by_star=True)
                    yield from (name for name in inside if not name.startswith("_"))
            elif isinstance(node, ast.Dict):
                for key in node.keys:
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and key.value.isidentifier():
                        yield key.value
