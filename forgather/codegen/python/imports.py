"""The imports of a generated module, and the expressions that refer to the imported objects.

The input is constructors; the output is expressions, and the import lines of the module. Nothing is imported during
generation. The expression of a constructor has the same meaning as in `config.resolve`. Each imported object has one
name, and no two imported objects have the same name.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder

from forgather.codegen.python.ir import Expression, bracketed, broken, call, name, quoted
from forgather.codegen.python.names import Names, is_identifier
from forgather.config.graph import Call, Scalar, Sequence

# Imports that the generated code itself needs, by their names.
_OWN = {
    "math": ("math", None), "os": ("os", None), "sys": ("sys", None), "hashlib": ("hashlib", None),
    "importlib": ("importlib", None), "importlib.machinery": ("importlib.machinery", None),
    "importlib.util": ("importlib.util", None), "cache": ("functools", "cache"), "partial": ("functools", "partial"),
    "wraps": ("functools", "wraps"), "seed_everything": ("forgather.ml.checkpoint.rng", "seed_everything"),
}  # fmt: skip
OWN_NAMES = frozenset((*_OWN, "PROJECT_DIR", "UNSET", "import_file", "given", "build", "args", "kwargs"))
_PLAIN_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_DIGITS = re.compile(r"(\d+)")


Source = tuple[str, tuple[str, ...]]


@dataclass(slots=True)
class Imports:
    """The imports of one module.

    Args:
        names: the names that are already used in the module.
        system_path: the folders that the project adds to `sys.path`; modules in these folders are imported last.
        own: the names of the imports and constants that the generated code needs for itself.
        short: the names of generated functions, by built-in function of the config language; only a built-in function
            that is passed as an object needs one.
    """

    names: Names
    system_path: tuple[str, ...] = ()
    own: set[str] = field(default_factory=set)
    short: dict[str, str] = field(default_factory=dict)
    _names: dict[tuple[str, str | None], str] = field(default_factory=dict)
    _used: set[tuple[str, str | None]] = field(default_factory=set)
    _files: dict[Source, str] = field(default_factory=dict)
    _used_files: set[Source] = field(default_factory=set)

    def reserve(self, nodes: Iterable[Call]) -> None:
        """Reserves a name for the import of each constructor; must be called before variables get names."""
        for node in nodes:
            source, symbol = split(node.constructor)
            if source is None:
                continue
            folders = static_folders(node)
            if is_file(source) or source.startswith("."):
                if folders is not None and (source, folders) not in self._files:
                    stem = os.path.basename(source).removesuffix(".py").rpartition(".")[2]
                    self._files[source, folders] = self.names.free(stem)
                continue
            key = _imported(source, symbol)
            if key is not None and key not in self._names and key[0] != "builtins":
                # If the generated code imports the same object for itself, one import serves both.
                own = next((word for word, what in _OWN.items() if what == key), None)
                self._names[key] = own or _name_of(key, self.names)

    def use(self, word: str) -> Expression:
        """Returns a name that the generated code needs for itself, and records that the name is used."""
        self.own.add(word)
        return name(word)

    def function(self, node: Call, folders: Expression | None = None) -> Expression:
        """Returns the expression of the object that a call calls.

        Args:
            node: the call.
            folders: the expression of the call's `submodule_searchpath`; None if the folders are known without
                construction.
        """
        source, symbol = split(node.constructor)
        if source is None:
            return name(symbol)
        if is_file(source) or source.startswith("."):
            if folders is not None:
                items = [("", name(quoted(source))), ("", folders)]
                return _attributes(call(self.use("import_file"), items), symbol)
            file = (source, static_folders(node) or ())
            self._used_files.add(file)
            return _attributes(name(self._files[file]), symbol)
        key = _imported(source, symbol)
        # A module whose name is not an identifier can only be imported by a call.
        if key is None:
            module = call(name("importlib.import_module"), [("", name(quoted(source)))], pure=True)
            self.use("importlib")
            return _attributes(module, symbol)
        if key[0] == "builtins":
            return _attributes(name(str(key[1])), _rest(source, symbol, key))
        self._used.add(key)
        return _attributes(name(self._names[key]), _rest(source, symbol, key))

    def short_function(self, word: str) -> Expression:
        """Returns the name of the generated function for a built-in function of the config language."""
        if word not in self.short:
            self.short[word] = self.names.free(f"get_{word}" if word in ("items", "keys", "values") else word)
        return name(self.short[word])

    def drop_unused(self, words: set[str]) -> None:
        """Removes the imports that the generated code does not use; `words` is the set of names that the code reads."""
        self.own = {word for word in self.own if word.partition(".")[0] in words}
        self._used = {key for key in self._used if self._names[key] in words}

    def named_imports(self) -> list[str]:
        """Returns the imports that the config names, as "module:symbol" or as the path of a file."""
        found = [f"{module}:{symbol}" if symbol else module for module, symbol in self._used]
        return sorted([*found, *(source for source, _ in self._used_files)])

    def lines(self, system_path: list[str]) -> list[str]:
        """Returns the import lines of the module.

        Args:
            system_path: the expressions of the folders that are added to `sys.path`.
        """
        if system_path:
            self.own.add("sys")
        found = {key: self._names[key] for key in self._used}
        found |= {_OWN[word]: word for word in self.own if word in _OWN}
        last = {key: word for key, word in found.items() if system_path and self._is_first_party(key[0])}
        first = {key: word for key, word in found.items() if key not in last}
        standard = {key: word for key, word in first.items() if key[0].partition(".")[0] in sys.stdlib_module_names}
        others = {key: word for key, word in first.items() if key not in standard}
        lines: list[str] = []
        for group in (standard, others):
            lines += ["", *_sorted(group)] if lines and group else _sorted(group)
        if system_path:
            lines += ["", *(f"sys.path.append({folder})" for folder in system_path)]
        return [*lines, "", *_sorted(last)] if last else lines

    def file_lines(self) -> list[str]:
        """Returns the lines that import the project's files."""
        lines = []
        for (source, folders), word in self._files.items():
            if (source, folders) in self._used_files:
                items = [("", name(quoted(source)))]
                if folders:
                    texts = [("", name(quoted(folder))) for folder in folders]
                    items.append(("", bracketed("[", texts, "]", pure=True)))
                lines += broken(call(self.use("import_file"), items), "", f"{word} = ", "")
        return lines

    def _is_first_party(self, module: str) -> bool:
        top = module.partition(".")[0]
        places = [os.path.join(folder, top) for folder in self.system_path]
        return any(os.path.isdir(place) or os.path.isfile(f"{place}.py") for place in places)


def split(constructor: str) -> tuple[str | None, str]:
    """Returns the two parts of a constructor: its module or file (None for a builtin), and its symbol."""
    source, colon, symbol = constructor.rpartition(":")
    return (source if colon else None), symbol


def static_folders(node: Call) -> tuple[str, ...] | None:
    """Returns the folders in the `submodule_searchpath` of a call; None if they are known only after construction."""
    search = node.submodule_searchpath
    if search is None:
        return ()
    nodes = search.items if isinstance(search, Sequence) else (search,)
    folders = tuple(part.value for part in nodes if isinstance(part, Scalar) and isinstance(part.value, str))
    return folders if len(folders) == len(nodes) else None


def is_file(source: str) -> bool:
    """Returns whether the part of a constructor before the colon is a file."""
    return source.endswith(".py") or "/" in source


def _name_of(key: tuple[str, str | None], names: Names) -> str:
    module, symbol = key
    wish = symbol or module
    # The module says more about a second object of the same name than a number.
    taken = names.free(wish)
    if taken == wish:
        return taken
    return names.free(f"{module.rpartition('.')[2]}_{wish}")


def _imported(source: str, symbol: str) -> tuple[str, str | None] | None:
    """Returns the module and the name for a `from` import; None if they are not valid identifiers."""
    if not _PLAIN_MODULE.fullmatch(source) or not all(is_identifier(part) for part in source.split(".")):
        return None
    parts = symbol.split(".")
    if source == "builtins":
        return (source, parts[0]) if is_identifier(parts[0]) and hasattr(builtins, parts[0]) else None
    inner = len(parts) - 2
    # `from a import b` finds the attribute, else the submodule, as resolving a constructor does. For a longer symbol,
    # only the files show which of its parts are modules.
    while inner > 0 and not _is_module(".".join((source, *parts[:inner]))):
        inner -= 1
    module, first = ".".join((source, *parts[: max(inner, 0)])), parts[max(inner, 0)]
    return (module, first) if all(is_identifier(part) for part in (*module.split("."), first)) else None


def _rest(source: str, symbol: str, key: tuple[str, str | None]) -> str:
    whole = f"{source}.{symbol}"
    return whole[len(f"{key[0]}.{key[1]}") :].removeprefix(".")


def _is_module(dotted: str) -> bool:
    top, *rest = dotted.split(".")
    # Only the top-level package is looked up: for a dotted name, Python would import the parents.
    try:
        spec = PathFinder.find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    for folder in spec.submodule_search_locations or () if spec else ():
        place = os.path.join(folder, *rest)
        if os.path.isfile(f"{place}.py") or os.path.isfile(os.path.join(place, "__init__.py")):
            return True
    return False


def _attributes(owner: Expression, symbol: str) -> Expression:
    text = owner.text
    for part in symbol.split(".") if symbol else ():
        text = f"{text}.{part}" if is_identifier(part) else f"getattr({text}, {quoted(part)})"
    return Expression(text, pure=owner.pure, constant=owner.constant)


def _sorted(names: dict[tuple[str, str | None], str]) -> list[str]:
    """Returns import lines in the order of isort: plain imports, then `from` imports, each sorted by module."""
    plain = sorted((module for module, symbol in names if symbol is None), key=_order)
    lines = [f"import {module}" for module in plain]
    modules: dict[str, list[tuple[str, str]]] = {}
    for (module, symbol), word in names.items():
        if symbol is not None:
            modules.setdefault(module, []).append((symbol, word))
    for module in sorted(modules, key=_order):
        members = sorted(modules[module], key=_member_order)
        same = [symbol for symbol, word in members if symbol == word]
        others = [(symbol, f"{symbol} as {word}") for symbol, word in members if symbol != word]
        statements = [(symbol, [text]) for symbol, text in others] + ([(same[0], same)] if same else [])
        for _, texts in sorted(statements, key=_member_order):
            lines += _from(module, texts)
    return lines


def _member_order(member: tuple[str, object]) -> tuple[object, ...]:
    return _rank(member[0]), _order(member[0])


def _from(module: str, members: list[str]) -> list[str]:
    line = f"from {module} import {', '.join(members)}"
    return [line] if len(line) <= 120 else [f"from {module} import (", *(f"    {text}," for text in members), ")"]


def _rank(symbol: str) -> int:
    # isort puts constants first, then classes, then functions.
    if len(symbol) > 1 and symbol.isupper():
        return 0
    return 1 if symbol[:1].isupper() else 2


def _order(text: str) -> tuple[list[tuple[int, int, str]], list[tuple[int, int, str]]]:
    return _natural(text.lower()), _natural(text)


def _natural(text: str) -> list[tuple[int, int, str]]:
    parts = (part for part in _DIGITS.split(text) if part)
    return [(0, int(part), part) if part.isdigit() else (1, 0, part) for part in parts]
