"""What a render may see and spend: search path, variables, clock, budgets.

Takes nothing; made anew for each load by whoever starts one. Keeps true: plain frozen data, so that two
loads can share nothing but compiled template code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from forgather.source import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of one load.

    Units:
        output and values in characters, the others in counts.
    """

    max_loop_turns: int = 200_000
    max_output_chars: int = 5_000_000
    max_value_chars: int = 5_000_000
    max_depth: int = 100
    max_nodes: int = 100_000
    max_integer_digits: int = 4_300


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigEnvironment:
    """Everything outside the templates that one load depends on.

    Args:
        searchpath: absolute folders, first match wins; `..` and links that lead out of them are refused.
        variables: global variables of every template; values may be lazy mappings.
        now: the one instant that all clock functions of the load see; None takes the time of the render.
        budget: limits.
        cache_dir: private folder for compiled templates; None switches the cache off.
        allowed_env: tells the names of environment variables that the user lets templates read, `*` as in file names;
            asked for a name that is not one of the usual ones.
    """

    searchpath: tuple[str, ...] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    now: datetime | None = None
    budget: Budget = Budget()
    cache_dir: str | None = None
    allowed_env: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """One template as it was really loaded.

    Args:
        name: name it was asked for.
        file: absolute path of the file that holds it.
        line: first line of the template inside `file` (above 1 for inline sub-templates), 1-based.
        why: "config", "extends", "include" or "import".
        by: place of the statement that asked for it; None for the config itself.
        parent: position in `RenderedText.templates` of the template that asked; None for the config.
    """

    name: str
    file: str
    line: int
    why: str
    by: Span | None = None
    parent: int | None = None
