"""The inputs of one load: search path, variables, time, budgets.

The caller of `render` makes one `ConfigEnvironment` for each load. Invariant: it is plain frozen data, so two loads
share nothing except the compiled code of templates.
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
        The limits of output and values are numbers of characters; the other limits are counts.
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
        searchpath: the absolute paths of the folders with templates, in the order of precedence. A template name that
            leads outside them, by `..` or a symbolic link, is refused.
        variables: the global variables of every template, by name; values may be lazy mappings.
        now: the time that all clock functions of the load return; if it is None, the time of the render.
        budget: the limits of the load.
        cache_dir: a private folder for compiled templates; if it is None, nothing is cached on disk.
        allowed_env: a function that returns the names of further environment variables that templates may read. A `*`
            in a name works as in file names. The function is called only if a template reads a variable that is not
            allowed to every config.
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
        name: the name of the template in the statement that loaded it.
        file: the absolute path of the file that contains the template.
        line: the first line of the template in `file`, counted from 1; above 1 for an inline sub-template.
        why: the kind of the statement ("extends", "include" or "import"), or "config" for the config itself.
        by: the place of the statement that loaded the template; None for the config itself.
        parent: the template that contains the statement, as an index into `RenderedText.templates`; None for the config
            itself.
    """

    name: str
    file: str
    line: int
    why: str
    by: Span | None = None
    parent: int | None = None
