"""One render, from a definition to `RenderedText`.

Takes a load's environment and the template to begin with. Keeps true: a render raises located errors
only, and leaves nothing behind but compiled code.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

from forgather.config._jinja.assignments import given_places
from forgather.config._jinja.budget import Account
from forgather.config._jinja.cache import code_of
from forgather.config._jinja.compiler import CompilerEnvironment
from forgather.config._jinja.environment import RunEnvironment
from forgather.config._jinja.filters import FILTERS, TESTS
from forgather.config._jinja.globals import Globals
from forgather.config._jinja.loader import Definition, Library
from forgather.config._jinja.origins import Place, Traced, Trail
from forgather.config._jinja.template_errors import RENDER_FAULTS, render_fault, syntax_fault
from forgather.config._jinja.template_lint import findings
from forgather.config._jinja.unused_names import reads
from forgather.config.environment import ConfigEnvironment
from forgather.config.rendered import RenderedText
from forgather.config.syntax import desugar
from forgather.errors import ForgatherError, RenderError, SyntaxFault
from forgather.source import Origin, Site, SourceMap, Span

_MAX_TAGS = 10_000
_MAX_TAG_CHARS = 150_000


class Render:
    """One load."""

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
        """Renders a template of the search path."""
        found = self.library.find(name)
        if found is None:
            raise self.library.missing(name, None)
        return self._text(found, variables)

    def string(self, text: str, name: str, file: str, variables: Mapping[str, object]) -> RenderedText:
        """Renders a text that no file holds."""
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
            raise fault from (None if isinstance(error, ForgatherError) else error)
        return RenderedText(
            name=found.name,
            file=found.file,
            text=str(text),
            source_map=source_map(text),
            templates=tuple(self.library.uses),
            sources=self.library.sources,
            diagnostics=findings(self.run, variables),
            reads=reads(self.run),
            env_reads=dict(self.functions.env_reads),
            budget=self.environment.budget,
        )

    def _compiled(self, found: Definition) -> CodeType:
        return code_of(found.text, lambda text: _build(found), self.environment.cache_dir)


@cache
def _compiler() -> CompilerEnvironment:
    environment = CompilerEnvironment(trim_blocks=True, optimized=False, cache_size=0)
    environment.filters, environment.tests = FILTERS, TESTS
    return environment


def _build(found: Definition) -> CodeType:
    # The end of a block that a header began stands behind the last line: that line ends first.
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
            line = found.line + source.count("\n", 0, begin)
            raise SyntaxFault(
                f"the template holds more than {_MAX_TAGS:,} statements and expressions, or too much text in them",
                code="FG124",
                span=Span(found.file, line),
                hint="a config is a few hundred lines; keep data in files of its own",
            )


def source_map(text: Traced) -> SourceMap:
    """Returns the map of a rendered text."""
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
