"""Compiled templates, kept in memory and on disk by content.

Takes the text of a template, gives its code. Keeps true: equal text gives equal code, under one Python,
one Jinja and one version of this front end; an entry on disk is used only when it is ours, private and
whole; a folder that cannot be written changes nothing but speed.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from types import CodeType

import jinja2

_MAGIC = b"forgather template 1\n"
_MAX_ENTRIES = 512
_MAX_BYTES = 50_000_000
_memory: dict[str, CodeType] = {}


def code_of(text: str, build: Callable[[str], CodeType], folder: str | None) -> CodeType:
    """Returns the code of a template's text, from memory, from `folder`, or from `build`."""
    code = _memory.get(text)
    if code is None:
        path = os.path.join(folder, _key(text)) if folder and _is_private_folder(folder) else None
        code = _read(path) if path else None
        if code is None:
            code = build(text)
            if path and folder:
                _write(folder, path, code)
        if len(_memory) >= _MAX_ENTRIES:
            _memory.pop(next(iter(_memory)))
        _memory[text] = code
    return code


def forget() -> None:
    """Empties the memory; the next render reads the disk again."""
    _memory.clear()


_COMPILING = (
    "block_override_check",
    "cache",
    "charged",
    "compiler",
    "filters",
    "parser",
    "seams",
    "static_analysis",
)
"""The modules next to this one that decide what a template compiles to."""


@cache
def _fingerprint() -> bytes:
    """Returns what compiled code depends on besides the text: Python, Jinja, and our own source."""
    digest = hashlib.sha256(sys.version.encode())
    digest.update(str(jinja2.__dict__.get("__version__")).encode())
    here = os.path.dirname(os.path.abspath(__file__))
    for path in (
        *(os.path.join(here, f"{name}.py") for name in _COMPILING),
        os.path.join(os.path.dirname(here), "syntax.py"),
        os.path.join(os.path.dirname(here), "split.py"),
        os.path.join(os.path.dirname(jinja2.__file__), "compiler.py"),
    ):
        with open(path, "rb") as source:
            digest.update(hashlib.sha256(source.read()).digest())
    return digest.digest()


def _key(text: str) -> str:
    return hashlib.sha256(_fingerprint() + text.encode("utf-8", "surrogatepass")).hexdigest() + ".template"


def _is_private_folder(folder: str) -> bool:
    """Makes the folder where it is missing; says whether it is ours alone."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and _is_ours(facts)


def _is_ours(facts: os.stat_result) -> bool:
    owner = os.getuid() if hasattr(os, "getuid") else facts.st_uid
    return facts.st_uid == owner and not facts.st_mode & 0o022


def _read(path: str) -> CodeType | None:
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode) or not _is_ours(facts) or facts.st_size > _MAX_BYTES:
            return None
        with os.fdopen(handle, "rb", closefd=False) as stream:
            data = stream.read()
    except OSError:
        return None
    finally:
        os.close(handle)
    head, digest, body = data[: len(_MAGIC)], data[len(_MAGIC) : len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
    if head != _MAGIC or hashlib.sha256(os.path.basename(path).encode() + body).digest() != digest:
        return None
    try:
        code = marshal.loads(body)
    except (EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


def _write(folder: str, path: str, code: CodeType) -> None:
    body = marshal.dumps(code)
    digest = hashlib.sha256(os.path.basename(path).encode() + body).digest()
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
        with os.fdopen(handle, "wb") as stream:
            stream.write(_MAGIC + digest + body)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            _remove(temporary)


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return
