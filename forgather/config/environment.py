"""The inputs of one load: search path, variables, time, budgets.

The caller of `render` makes one for each load. Invariant: it is plain frozen data, so two loads share nothing except
compiled code of templates.
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

    # Far above any real config, and reached within a second: a hostile template fails at once.
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
        searchpath: absolute folders, in the order of precedence; `..` and links to other places are refused.
        variables: global variables of every template; values may be lazy mappings.
        now: the time that all clock functions of the load return; None for the time of the render.
        budget: limits.
        cache_dir: private folder for compiled templates; None for no cache on disk.
        allowed_env: returns patterns (`*` as in file names) of further environment variables that templates may read.
            A function, because the list is read only if a template uses a variable that is not allowed to all.
    """

    searchpath: tuple[str, ...] = ()
    variables: Mapping[str, object] = field(default_factory=dict)
    now: datetime | None = None
    budget: Budget = Budget()
    cache_dir: str | None = None
    allowed_env: Callable[[], Sequence[str]] = tuple


@dataclass(frozen=True, slots=True)
class TemplateUse:
    """One template that was loaded.

    Args:
        name: the name in the statement that loaded it.
        file: absolute path of the file that contains it.
        line: first line of the template in `file`, counted from 1; above 1 for inline sub-templates.
        why: "config", "extends", "include" or "import".
        by: place of the statement that loaded it; None for the config itself.
        parent: index in `RenderedText.templates` of the template with that statement; None for the config.
    """

    name: str
    file: str
    line: int
    why: str
    by: Span | None = None
    parent: int | None = None
