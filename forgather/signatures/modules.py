"""The table of modules, each read once, and the names that a module defines at run time.

The table returns modules by name; the functions below it find the targets of lazily imported names, star imports and
`__all__`. The table records every module that a result depends on, so that a cached result becomes stale when one of
their files changes. Lazily imported names are understood only if they are listed in literal tables.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from forgather.bounded import MAX_CODE_BYTES, read_bytes
from forgather.errors import SyntaxFault
from forgather.signatures.lazy_ast import Text, TooDeepError, parse
from forgather.signatures.module_finder import FOLDER, Finder, Found
from forgather.signatures.symbols import Doubt, Module
from forgather.source import Span

_MAKES_MODULES = re.compile(r"\bsys\.modules(?!\[__name__\])|\b__path__\b|\bmeta_path\b")
Use = tuple[str, str | None]
"""The name of a module that was looked up, and the path of its file; the path is None if the module does not exist."""
T = TypeVar("T")
S = TypeVar("S")


class ModuleTable:
    """The modules on one search path, each read once, and memoized results about them.

    Args:
        finder: the finder of the files of modules.
        ours: the folders with the user's own files.
    """

    def __init__(self, finder: Finder, ours: Sequence[str] = ()) -> None:
        self.finder = finder
        self._ours = tuple(os.path.join(os.path.realpath(folder), "") for folder in ours)
        self._modules: dict[str, Module | Doubt | None] = {}
        self._used: list[set[Use]] = [set()]
        self._memo: dict[Any, tuple[Any, frozenset[Use]]] = {}
        self.active: set[Any] = set()

    def memoized(self, key: Any, make: Callable[[], T], meanwhile: S) -> T | S:
        """Returns the result of `make`, which is computed once for each key.

        Args:
            key: the key of the result.
            make: the function that computes the result; the modules that it reads are recorded with the result.
            meanwhile: the value to return if `make` calls this method again with the same key before `make` has
                returned.
        """
        if key in self._memo:
            value, used = self._memo[key]
            # A result that uses a memoized one depends on the same modules.
            self._used[-1] |= used
            return value  # type: ignore[no-any-return]
        if key in self.active:
            return meanwhile
        self.active.add(key)
        self._used.append(set())
        try:
            value = make()
        finally:
            self.active.discard(key)
            used_now = self._used.pop()
            self._used[-1] |= used_now
        self._memo[key] = value, frozenset(used_now)
        return value

    def with_uses(self, action: Callable[[], T]) -> tuple[T, set[Use]]:
        """Returns the result of a function, and the modules that the function used."""
        self._used.append(set())
        try:
            return action(), self._used[-1]
        finally:
            self._used.pop()

    def record_use(self, module: Module) -> None:
        """Records that the result of the current computation depends on a module."""
        self._used[-1].add((module.name, module.file))

    def module(self, name: str) -> Module | Doubt | None:
        """Returns a module by its dotted name; None if it certainly does not exist, a `Doubt` if that is unknown."""
        if name not in self._modules:
            found = self.finder.find(name)
            self._modules[name] = self._load(found) if found else self._missing(name)
        module = self._modules[name]
        found = self.finder.find(name)
        self._used[-1].add((name, found.read if found else None))
        return module

    def _missing(self, name: str) -> Doubt | None:
        if self.finder.may_be_hooked(name) and "." not in name:
            return Doubt(f"{name!r} is found by an import hook")
        parent_name, _, leaf = name.rpartition(".")
        if not parent_name:
            return None
        parent = self.module(parent_name)
        if not isinstance(parent, Module):
            return parent
        if parent.text is None or parent.is_stub:
            return None if parent.found.closed else Doubt(f"{parent_name!r} is not written in Python")
        # A package may put modules without a file into `sys.modules`, as `six.moves` does.
        makes = bool(_MAKES_MODULES.search(parent.text.text))
        return Doubt(f"{parent_name!r} creates modules at import") if makes and parent.has(leaf) else None

    def in_folders(self, name: str, folders: Sequence[str]) -> Module | Doubt | None:
        """Returns a module from folders that are treated as one package.

        Args:
            name: the name of the module, relative to the package.
            folders: the folders, with symbolic links resolved.
        """
        return self.module(f"{self.finder.package(folders)}.{name}")

    def _load(self, found: Found) -> Module | Doubt:
        if found.file is None:
            try:
                text = self._read_text(found.stub) if found.stub else None
            except SyntaxError:
                text = None
            return Module(found, text, is_stub=text is not None)
        is_ours = found.name.startswith(FOLDER) or self._is_ours(found.file)
        try:
            text = self._read_text(found.file)
            if text is None:
                return Doubt(f"{found.file} cannot be read, or is too large")
            if is_ours:
                # A file of the user is parsed completely: a syntax error anywhere in it makes the import fail.
                parse(text.text)
        except TooDeepError:
            return Doubt(f"{found.file} is nested too deeply")
        except SyntaxError as error:
            if not is_ours:
                return Doubt(f"{found.file} is not valid Python")
            raise _fault(found.file, error) from None
        return Module(found, text)

    def _is_ours(self, file: str) -> bool:
        real = os.path.realpath(file)
        # A virtual environment may be in the folder of the project.
        return bool(self._ours) and real.startswith(self._ours) and "site-packages" not in real

    def stub_of(self, module: Module) -> Module | None:
        """Returns the stub of a module that has both a source file and a stub file; None for other modules."""
        if module.is_stub or module.found.stub is None:
            return None
        key = f"{module.name} (stub)"
        if key not in self._modules:
            try:
                text = self._read_text(module.found.stub)
            except SyntaxError:
                text = None
            self._modules[key] = Module(module.found, text, is_stub=True) if text else None
        stub = self._modules[key]
        if isinstance(stub, Module):
            self.record_use(stub)
            return stub
        return None

    def _read_text(self, file: str) -> Text | None:
        try:
            return decode(read_bytes(file, MAX_CODE_BYTES))
        except OSError:
            return None


def decode(content: bytes) -> Text:
    """Returns the text of a Python file.

    Raises:
        SyntaxError: if the content is not text in the declared encoding.
    """
    encoding = "utf-8-sig"
    # Few files declare an encoding, and `tokenize` is slow to import.
    if b"coding" in content[:200]:
        import io
        import tokenize

        encoding = tokenize.detect_encoding(io.BytesIO(content).readline)[0]
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SyntaxError(f"it is not text in {error.encoding}", ("<source>", line, 0, None)) from None
    return Text(text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text)


def _fault(file: str, error: SyntaxError) -> SyntaxFault:
    return SyntaxFault(
        f"{os.path.basename(file)} is not valid Python: {error.msg}",
        code="FG326",
        span=Span(file, error.lineno or 1, error.offset or 0),
        hint="correct the line; Python could not import the file either",
    )


_MANY_STARS = 12


def lazy_target(module: Module, name: str) -> tuple[str, str] | Doubt | None:
    """Returns the module and the attribute that a lazily imported name refers to; None if there is no such name.

    Args:
        module: the module with a `__getattr__` or a lazy loader.
        name: the lazily imported name.

    Returns:
        The module and the attribute, which is "" if the name refers to the module itself; a `Doubt` if the target of
        the name is computed at run time.
    """
    if module.has("_LazyModule(") and (name.endswith("Fast") or name.startswith("_")):
        return Doubt(f"{module.name!r} computes {name!r} in code")
    if not module.has(f'"{name}"') and not module.has(f"'{name}'"):
        return None if _is_closed(module) else Doubt(f"{module.name!r} computes names in code")
    for table in _tables(module, name):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == name:
                target = _literal_target(value, name)
                if target is not None:
                    return target
            elif isinstance(key, ast.Constant) and isinstance(key.value, str) and _lists(value, name):
                return key.value, name
    return Doubt(f"{module.name!r} computes {name!r} in code")


def _tables(module: Module, name: str) -> Iterator[ast.Dict]:
    for statement in module.block.plain(name):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Dict):
            yield statement.value


def _literal_target(value: ast.expr, name: str) -> tuple[str, str] | None:
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
    """Returns whether a module's `__getattr__` raises for every name that is not in a literal table."""
    if module.has("_LazyModule("):
        return True
    for statement in module.block.binding("__getattr__"):
        if isinstance(statement, ast.FunctionDef) and statement.name == "__getattr__":
            return _refuses(statement, module)
    return False


def passes_module_name(statement: ast.stmt) -> bool:
    """Returns whether a statement passes `__name__` to a call, which may use it to set names on the module."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and any(isinstance(a, ast.Name) and a.id == "__name__" for a in node.args):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            # `getLogger(__name__)` only reads the name.
            if "logger" not in called.lower():
                return True
    return False


def _refuses(function: ast.FunctionDef, module: Module) -> bool:
    """Returns whether a function begins with `if name not in TABLE: raise ...`, where `TABLE` is a literal."""
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
    """Returns statements reordered so that the most probable binding of a name comes last.

    Explicit imports come after star imports. If there are many star imports, a module whose name is part of the
    looked-up name comes later, so that fewer modules have to be read.

    Args:
        statements: the statements of a module.
        name: the name that is looked up.
    """
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


# `globals()` used for anything else than listing or reading names.
_WRITES_GLOBALS = re.compile(
    r"(?<!\*)(?<!\bin )(?<!sorted\()(?<!list\()(?<!set\()\bglobals\(\)(?!\[[^\]\n]*\](?!\s*=[^=]))(?!\.get\b)"
)
# `global_enum` and `_convert_` put the members of an enum into its module.
_OPEN_MARKS = ("setattr(sys.modules", "sys.modules[__name__]", "global_enum", "._convert_(")
_OPEN_MARKS_AT_MARGIN = ("vars()", "exec(", "__dict__", "setattr(")


def may_create_names(module: Module, is_lazy: bool = False) -> bool:
    """Returns whether a module may define names that none of its statements binds.

    Args:
        module: the module.
        is_lazy: whether the module imports names lazily.
    """
    if module.has("globals()") and module.text and _WRITES_GLOBALS.search(module.text.text):
        return True
    if is_lazy:
        return False
    if any(module.has(mark) for mark in _OPEN_MARKS):
        return True
    if any(module.has(mark) and bool(module.block.plain(mark)) for mark in _OPEN_MARKS_AT_MARGIN):
        return True
    return module.has("(__name__") and any(passes_module_name(s) for s in module.block.plain("(__name__"))


def set_by_functions(module: Module, name: str) -> bool:
    """Returns whether a function in the module declares a name as `global`, and so may change the value of the name."""
    if not module.has("global ") or module.text is None:
        return False
    return re.search(rf"\n[ \t]+global [^\n]*\b{re.escape(name)}\b", module.text.text) is not None


def has_stars(module: Module) -> bool:
    """Returns whether a module has a star import."""
    return module.has("import *") or module.has("import (*")


def read_all_list(module: Module) -> frozenset[str] | None:
    """Returns the names in the `__all__` of a module; None if the module has no `__all__`, or it is not a literal."""
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


def may_be_in_all(module: Module, name: str) -> bool:
    """Returns whether the `__all__` of a lazily imported module may contain a name."""
    return any(module.has(text) for text in (f'"{name}"', f"'{name}'", "import *"))
