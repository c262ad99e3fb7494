"""`RenderedText`: the result of rendering and the input of loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from forgather.config.environment import Budget, TemplateUse
from forgather.errors import Diagnostic
from forgather.source import SourceFile, SourceMap


@dataclass(frozen=True)
class RenderedText:
    """A rendered config, with the origin of every character.

    Args:
        name: the name of the config's template.
        file: the absolute path of the config, or a pseudo name.
        text: the YAML text.
        source_map: the origins of `text`.
        templates: the templates that were loaded, in order of loading; `templates[0]` is the config.
        sources: the files that were read, by absolute path.
        diagnostics: the warnings and lints of the rendering.
        env_reads: the environment variables that templates read, with their values.
        reads: the names that the templates read, also in branches that did not run.
        budget: the limits for loading.
    """

    name: str
    file: str
    text: str
    source_map: SourceMap
    templates: tuple[TemplateUse, ...] = ()
    sources: Mapping[str, SourceFile] = field(default_factory=dict)
    diagnostics: tuple[Diagnostic, ...] = ()
    env_reads: Mapping[str, str] = field(default_factory=dict)
    reads: frozenset[str] = frozenset()
    budget: Budget = Budget()

    @property
    def extends_chain(self) -> tuple[str, ...]:
        """The names of the templates that the config extends, nearest first."""
        chain: list[str] = []
        current = 0
        for position, use in enumerate(self.templates):
            if use.why == "extends" and use.parent == current:
                chain.append(use.name)
                current = position
        return tuple(chain)
