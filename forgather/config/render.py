"""Renders templates to YAML text with the origin of each character.

Takes a `ConfigEnvironment` and the name of a template (or a text); gives a `RenderedText`. Invariants: any input gives
a result or a located `ForgatherError`; two renders share nothing except compiled code; the first call imports Jinja,
not this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forgather.config.environment import ConfigEnvironment
from forgather.config.rendered import RenderedText

if TYPE_CHECKING:
    from forgather.config._jinja.renderer import Render

_NONE: Mapping[str, object] = {}


def render(environment: ConfigEnvironment, name: str, variables: Mapping[str, object] = _NONE) -> RenderedText:
    """Returns the rendered text of a config with its origins.

    Args:
        environment: search path, variables, time and budgets of this load.
        name: name of a template on the search path, such as "configs/tiny.yaml".
        variables: variables of this render, in addition to `environment.variables`; visible in the config and the
            templates that it extends or includes, but not in imported macros.

    Raises:
        SyntaxFault: FG101 to FG106, FG124: a template cannot be parsed.
        RenderError: FG107 to FG119, FG446: a template is missing, or fails when it runs.
        BudgetError: FG120 to FG123: a template loops, grows or nests too much.
    """
    return _start(environment).file(name, variables)


def render_text(
    environment: ConfigEnvironment,
    text: str,
    *,
    name: str = "<string>",
    file: str = "<string>",
    variables: Mapping[str, object] = _NONE,
) -> RenderedText:
    """Returns the rendered text of a config that is not in a file; other arguments and errors as for `render`.

    Args:
        environment: search path, variables, time and budgets of this load.
        text: the text of the config.
        name: its name in messages.
        file: the pseudo file of its origins.
        variables: variables of this render.
    """
    return _start(environment).string(text, name, file, variables)


def _start(environment: ConfigEnvironment) -> Render:
    # Importing Jinja takes 40 ms, which commands that do not render should not pay.
    from forgather.config._jinja.renderer import Render

    return Render(environment)
