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
        name: name of the config's template.
        file: absolute path of the config, or a pseudo name.
        text: the YAML text.
        source_map: origins of `text`.
        templates: every template that was loaded, in order of loading; `templates[0]` is the config.
        sources: every file that was read, by absolute path.
        diagnostics: warnings and lints of the rendering.
        env_reads: environment variables that templates read, with their values.
        reads: names that the templates contain, also in branches that did not run.
        budget: limits for loading.
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
        """Names of the templates that the config extends, nearest first, without the config itself."""
        chain: list[str] = []
        current = 0
        for position, use in enumerate(self.templates):
            if use.why == "extends" and use.parent == current:
                chain.append(use.name)
                current = position
        return tuple(chain)
