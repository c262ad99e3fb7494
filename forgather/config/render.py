"""Renders templates to YAML text with the origin of each character.

The inputs are a `ConfigEnvironment` and the name or the text of a template; the output is a `RenderedText`. Invariants:
any input gives a result or a `ForgatherError` with a place; two renders share nothing except compiled code; Jinja is
imported by the first render, not by the import of this module.
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
        environment: the search path, the variables, the time and the limits of this load.
        name: the name of a template on the search path, such as "configs/tiny.yaml".
        variables: the variables of this render, by name, in addition to `environment.variables`. The config and the
            templates that it extends or includes can read them, imported macros cannot.

    Raises:
        SyntaxFault: FG101 to FG106 or FG124 if a template cannot be parsed.
        RenderError: FG107 to FG119 or FG446 if a template is missing, or fails when it runs.
        BudgetError: FG120 to FG123 if a template runs too many loop iterations, writes too much or nests too deeply.
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
    """Returns the rendered text of a config that is not in a file.

    Args:
        environment: the search path, the variables, the time and the limits of this load.
        text: the text of the config.
        name: the name of the config in messages.
        file: the pseudo file of the config in origins.
        variables: the variables of this render, by name, in addition to `environment.variables`.

    Raises:
        ForgatherError: the errors that `render` raises.
    """
    return _start(environment).string(text, name, file, variables)


def _start(environment: ConfigEnvironment) -> Render:
    # Importing Jinja takes 40 ms, which commands that do not render should not pay.
    from forgather.config._jinja.renderer import Render

    return Render(environment)
