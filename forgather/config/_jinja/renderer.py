"""Renders one config: compiles its templates, with a cache of compiled code, and runs them.

The inputs are the environment of a load and the name or text of a config; the output is a `RenderedText`. Invariants:
every error of a render has a place in the user's files; a render leaves nothing behind except compiled code. Equal
template text gives equal code for one version each of Python, Jinja and this package. A cache entry on disk is used
only if this user owns it, nobody else can write it, and its digest matches. If the cache folder cannot be written, only
speed is lost.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from types import CodeType
from typing import Any

import jinja2

from forgather.config._jinja.assignments import given_places
from forgather.config._jinja.budget import Account
from forgather.config._jinja.compiler import CompilerEnvironment
from forgather.config._jinja.environment import RunEnvironment
from forgather.config._jinja.filters import FILTERS, TESTS
from forgather.config._jinja.globals import Globals
from forgather.config._jinja.loader import Definition, Library, too_large
from forgather.config._jinja.origins import Place, Traced, Trail
from forgather.config._jinja.template_errors import RENDER_FAULTS, render_fault, syntax_fault
from forgather.config._jinja.template_lint import findings
from forgather.config._jinja.unused_names import names_read
from forgather.config.environment import ConfigEnvironment
from forgather.config.rendered import RenderedText
from forgather.config.syntax import desugar
from forgather.errors import ForgatherError, RenderError
from forgather.source import Origin, Site, SourceMap, Span

_MAGIC = b"forgather template 1\n"
_MAX_ENTRIES = 512
# A digest can be checked only after the whole entry is in memory.
_MAX_BYTES = 50_000_000
_memory: dict[str, CodeType] = {}


def cached_code(text: str, build: Callable[[str], CodeType], folder: str | None) -> CodeType:
    """Returns the code of a template's text, from memory, from the disk, or newly compiled.

    Args:
        text: the text of the template.
        build: a function that compiles the text.
        folder: the cache folder; if it is None, code is cached in memory only.
    """
    code = _memory.get(text)
    if code is None:
        path = os.path.join(folder, _entry_name(text)) if folder and _is_private_folder(folder) else None
        code = _read_entry(path) if path else None
        if code is None:
            code = build(text)
            if path and folder:
                _write_entry(folder, path, code)
        if len(_memory) >= _MAX_ENTRIES:
            # A dict keeps the order of insertion: the oldest entry goes.
            _memory.pop(next(iter(_memory)))
        _memory[text] = code
    return code


def clear_memory() -> None:
    """Empties the cache in memory; the next render reads compiled code from the disk."""
    _memory.clear()


_COMPILING = (
    "charged",
    "compiler",
    "filters",
    "parser",
    "renderer",
    "seams",
    "static_analysis",
)
"""The modules of this package that decide what a template compiles to."""


# Marshalled code is valid only for the Python that made it, and its helpers only for the same release of this package.
@cache
def _fingerprint() -> bytes:
    """Returns a digest of what compiled code depends on besides the text: Python, Jinja and this package's source."""
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


def _entry_name(text: str) -> str:
    return hashlib.sha256(_fingerprint() + text.encode("utf-8", "surrogatepass")).hexdigest() + ".template"


def _is_private_folder(folder: str) -> bool:
    """Returns whether only this user can write to a folder, which is created if it does not exist."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        facts = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and _is_ours(facts)


def _is_ours(facts: os.stat_result) -> bool:
    owner = os.getuid() if hasattr(os, "getuid") else facts.st_uid
    return facts.st_uid == owner and not facts.st_mode & 0o022


def _read_entry(path: str) -> CodeType | None:
    # `marshal` trusts its input, so the file must be one of ours: no link, no pipe that blocks, not writable by others.
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
    # With the name in the digest, an entry that was copied to another name is refused too.
    if head != _MAGIC or hashlib.sha256(os.path.basename(path).encode() + body).digest() != digest:
        return None
    try:
        code = marshal.loads(body)
    except (EOFError, ValueError, TypeError):
        return None
    return code if isinstance(code, CodeType) else None


def _write_entry(folder: str, path: str, code: CodeType) -> None:
    body = marshal.dumps(code)
    digest = hashlib.sha256(os.path.basename(path).encode() + body).digest()
    temporary: str | None = None
    try:
        # Several processes of one run write the same entry; a rename makes each of them whole.
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


# Compiling has no budget account that could stop it, so the size of its input is limited.
_MAX_TAGS = 10_000
_MAX_TAG_CHARS = 150_000


class Render:
    """One load of a config.

    Args:
        environment: the search path, the variables and the limits of the load.
    """

    def __init__(self, environment: ConfigEnvironment) -> None:
        self.environment = environment
        self.library = Library(environment)
        self.functions = Globals(environment.now, environment.allowed_env)
        self.run = RunEnvironment(
            self.library,
            Account(environment.budget),
            self._compiled,
            {**self.functions.table(), **environment.variables},
        )

    def file(self, name: str, variables: Mapping[str, object]) -> RenderedText:
        """Returns the rendered text of a template on the search path.

        Args:
            name: the name of the template.
            variables: the values of variables that the templates read, by name.

        Raises:
            ForgatherError: if the template does not exist, cannot be compiled, or fails; its span is the user's line.
        """
        found = self.library.find(name)
        if found is None:
            raise self.library.missing(name, None)
        return self._text(found, variables)

    def string(self, text: str, name: str, file: str, variables: Mapping[str, object]) -> RenderedText:
        """Returns the rendered text of a config that is not on the search path.

        Args:
            text: the text of the config.
            name: the name of the config in messages.
            file: the path of the config's file, or a pseudo name, for origins.
            variables: the values of variables that the templates read, by name.

        Raises:
            ForgatherError: if the text or a template that it uses cannot be compiled, or fails.
        """
        return self._text(self.library.add_text(name, file, text), variables)

    def _text(self, found: Definition, variables: Mapping[str, object]) -> RenderedText:
        source = self.library.sources[found.file].text
        if not source.strip():
            raise RenderError(
                f"the config '{found.name}' is empty",
                code="FG107",
                span=Span(found.file, 1),
                hint="a config extends a template, or is a mapping of targets",
            )
        try:
            template = self.run.instance(found, None)
            context: Any = template.new_context(dict(variables))
            context.fg_sets.update(given_places(variables))
            text = self.run.concat(template.root_render_func(context))
        except RENDER_FAULTS as error:
            fault = render_fault(error, self.library)
            # An error of ours is complete; one of Jinja's keeps its cause for a bug report.
            raise fault from (None if isinstance(error, ForgatherError) else error)
        return RenderedText(
            name=found.name,
            file=found.file,
            text=str(text),
            source_map=source_map(text),
            templates=tuple(self.library.uses),
            sources=self.library.sources,
            diagnostics=findings(self.run, variables),
            reads=names_read(self.run),
            env_reads=dict(self.functions.env_reads),
            budget=self.environment.budget,
        )

    def _compiled(self, found: Definition) -> CodeType:
        return cached_code(found.text, lambda text: _build(found), self.environment.cache_dir)


@cache
def _compiler() -> CompilerEnvironment:
    # Not optimized: Jinja would compute constant expressions while compiling, without a budget.
    environment = CompilerEnvironment(trim_blocks=True, optimized=False, cache_size=0)
    environment.filters, environment.tests = FILTERS, TESTS
    return environment


def _build(found: Definition) -> CodeType:
    # The end of a bracket block is added after the last line, which must be complete before it.
    source = desugar(found.text if found.text.endswith("\n") else found.text + "\n")
    _refuse_huge(source, found)
    try:
        return _compiler().code(source)
    except RENDER_FAULTS as error:
        raise syntax_fault(error, found) from None


def _refuse_huge(source: str, found: Definition) -> None:
    count, chars, position = 0, 0, 0
    while (begin := source.find("{", position)) >= 0:
        position = begin + 1
        mark = source[begin : begin + 2]
        if mark not in ("{{", "{%"):
            continue
        end = source.find("}}" if mark == "{{" else "%}", begin)
        end = len(source) if end < 0 else end
        count, chars, position = count + 1, chars + end - begin, end
        if count > _MAX_TAGS or chars > _MAX_TAG_CHARS:
            message = (
                f"the template contains more than {_MAX_TAGS:,} statements and expressions, or too much text in them"
            )
            raise too_large(message, found.span(source.count("\n", 0, begin) + 1))


def source_map(text: Traced) -> SourceMap:
    """Returns the source map of a rendered text, which has one `Origin` for each part."""
    sites: dict[Place, Site] = {}
    origins: dict[Trail, Origin] = {}
    starts: list[int] = []
    found: list[Origin] = []
    last: Any = None

    def site(place: Place) -> Site:
        made = sites.get(place)
        if made is None:
            owner, line, block = place
            made = sites[place] = Site(owner.span(line), owner.name, block)
        return made

    for start, trail in zip(text.starts, text.trails, strict=True):
        # Neighbouring parts of one line share the trail object, and the map needs one entry for them.
        if trail is last:
            continue
        last = trail
        origin = origins.get(trail)
        if origin is None:
            origin = origins[trail] = Origin(
                tuple([site(place) for place in trail[0]]), tuple([site(place) for place in trail[1]]), trail[2]
            )
        starts.append(start)
        found.append(origin)
    return SourceMap(str(text), starts, found)
