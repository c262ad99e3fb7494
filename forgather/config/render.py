"""Templates to YAML text, each character with its origin.

Takes a `ConfigEnvironment` and the name of a template (or a text), gives `RenderedText`. Keeps true: a
result or a located `ForgatherError`, whatever the input; two renders share nothing but compiled code;
Jinja is imported by the first call, not by this module.
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
    """Returns the text of a config, and where each part of it was written.

    Args:
        environment: search path, variables, clock and budgets of this load.
        name: name of a template on the search path, as in "configs/tiny.yaml".
        variables: variables of this render, on top of `environment.variables`; the config and the
            templates it extends or includes see them, imported macros do not.

    Raises:
        SyntaxFault: a template cannot be read.
        RenderError: a template is missing, or fails while it runs.
        BudgetError: a template loops, grows or nests too far.
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
    """Returns the rendering of a text that is not in a file; arguments and errors as for `render`."""
    return _start(environment).string(text, name, file, variables)


def _start(environment: ConfigEnvironment) -> Render:
    # The lazy edge to Jinja: an import here costs the commands that render nothing else 40 ms.
    from forgather.config._jinja.renderer import Render

    return Render(environment)
