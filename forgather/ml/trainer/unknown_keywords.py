"""Keywords that a trainer's constructor lacks, each with the name to write in its place.

The input is a constructor; the output is the same constructor, which raises an error with a hint for a keyword that it
does not have, where Python would only say that the keyword is unexpected.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec

from forgather.aliases import alias_of, suggest
from forgather.errors import TrainingError

P = ParamSpec("P")


class KeywordError(TrainingError, TypeError):
    """An error about a keyword that a constructor does not have."""

    code = "FG204"


def answers_unknown_keywords(constructor: Callable[P, None]) -> Callable[P, None]:
    """Returns the constructor, with an error that names what to write for a keyword that it does not have.

    Args:
        constructor: an `__init__` without `**kwargs`.

    Raises:
        KeywordError: FG204, when the constructor is called with a keyword that it does not have.
    """
    known = list(inspect.signature(constructor).parameters)

    # The wrapper passes its arguments on and does nothing else with them: `fgcli check` then knows the signature.
    @functools.wraps(constructor)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        _refuse_unknown(known, **kwargs)
        constructor(*args, **kwargs)

    return checked


def _refuse_unknown(known: Sequence[str], /, **keywords: object) -> None:
    for name in keywords:
        if name not in known:
            hint = suggest("keyword", name, known, owner="forgather.ml:Trainer")
            alias = alias_of("setting", name)
            hint = alias.why if hint is None and alias is not None else hint
            raise KeywordError(f"the trainer has no argument {name!r}", hint=hint).about(name)
