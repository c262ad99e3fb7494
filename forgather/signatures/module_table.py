"""The modules that are being read.

Takes a finder and the folders of a project, gives modules by name. Keeps true: what an answer was made from is
recorded, module by module, so that the answer can be kept as long as those stay as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from forgather.bounded import MAX_CODE_BYTES, read_bytes
from forgather.errors import SyntaxFault
from forgather.signatures.lazy_ast import Text, TooDeepError, parse
from forgather.signatures.module_finder import FOLDER, Finder, Found
from forgather.signatures.symbols import Doubt, Module
from forgather.source import Span

_MAKES_MODULES = re.compile(r"\bsys\.modules(?!\[__name__\])|\b__path__\b|\bmeta_path\b")
Use = tuple[str, str | None]
"""A module that was looked for, and the file that was read; None where there was none."""
T = TypeVar("T")
S = TypeVar("S")


class World:
    """Modules of one search path, each read once.

    Args:
        finder: finds them.
        ours: folders whose files are the user's.
    """

    def __init__(self, finder: Finder, ours: Sequence[str] = ()) -> None:
        self.finder = finder
        self._ours = tuple(os.path.join(os.path.realpath(folder), "") for folder in ours)
        self._modules: dict[str, Module | Doubt | None] = {}
        self._used: list[set[Use]] = [set()]
        self._memo: dict[Any, tuple[Any, frozenset[Use]]] = {}
        self.active: set[Any] = set()

    def remembered(self, key: Any, make: Callable[[], T], meanwhile: S) -> T | S:
        """Returns what `make` returns, made once; `meanwhile` where it asks for itself."""
        if key in self._memo:
            value, used = self._memo[key]
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

    def used(self, action: Callable[[], T]) -> tuple[T, set[Use]]:
        """Returns what an action returns, and the modules that decided it."""
        self._used.append(set())
        try:
            return action(), self._used[-1]
        finally:
            self._used.pop()

    def touch(self, module: Module) -> None:
        """Records that a module was read."""
        self._used[-1].add((module.name, module.file))

    def module(self, name: str) -> Module | Doubt | None:
        """Returns a module by its dotted name; None where there surely is none."""
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
        makes = bool(_MAKES_MODULES.search(parent.text.text))
        return Doubt(f"{parent_name!r} makes modules itself") if makes and parent.has(leaf) else None

    def in_folders(self, name: str, folders: Sequence[str]) -> Module | Doubt | None:
        """Returns a module of the package that is made of folders."""
        return self.module(f"{self.finder.package(folders)}.{name}")

    def _load(self, found: Found) -> Module | Doubt:
        if found.file is None:
            try:
                text = self._text(found.stub) if found.stub else None
            except SyntaxError:
                text = None
            return Module(found, text, is_stub=text is not None)
        is_ours = found.name.startswith(FOLDER) or self._is_ours(found.file)
        try:
            text = self._text(found.file)
            if text is None:
                return Doubt(f"{found.file} cannot be read, or is too large")
            if is_ours:
                # Whole, so that a mistake is found wherever it stands: Python could not import the file either.
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
        return bool(self._ours) and real.startswith(self._ours) and "site-packages" not in real

    def stub_of(self, module: Module) -> Module | None:
        """Returns what a module's stub says, where it has one beside its source."""
        if module.is_stub or module.found.stub is None:
            return None
        key = f"{module.name} (stub)"
        if key not in self._modules:
            try:
                text = self._text(module.found.stub)
            except SyntaxError:
                text = None
            self._modules[key] = Module(module.found, text, is_stub=True) if text else None
        stub = self._modules[key]
        if isinstance(stub, Module):
            self.touch(stub)
            return stub
        return None

    def _text(self, file: str) -> Text | None:
        try:
            return decode(read_bytes(file, MAX_CODE_BYTES))
        except OSError:
            return None


def decode(content: bytes) -> Text:
    """Returns the text of a Python file.

    Raises:
        SyntaxError: the content is not text in the encoding that it names.
    """
    encoding = "utf-8-sig"
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
