"""The rules about a constructor, whichever of its names a config writes.

Takes the name of a constructor; gives the rules about the class or function behind it. Rules are listed by the names
that configs usually write. A module that only imports a class of this library gives it a further name, which is
followed to the module that defines the class, from source: nothing is imported.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from forgather.errors import ForgatherError
from forgather.project.locations import cache_dir
from forgather.rules import Rules, shipped_rules
from forgather.signatures.results import Callee

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader

_PACKAGE = "forgather."


def rules_of(constructor: str) -> tuple[Rules, ...]:
    """Returns the rules about a constructor; an empty tuple if there are none.

    Args:
        constructor: the constructor as a config writes it.
    """
    return shipped_rules().get(home_of(constructor), ())


def home_of(constructor: str) -> str:
    """Returns a name of a constructor that rules know; the name itself if no rules are about it.

    Args:
        constructor: the constructor as a config writes it.

    Example:
        >>> home_of("forgather.ml.trainer.accel:AccelTrainingArguments")
        'forgather.ml.trainer.parallel_arguments:AccelTrainingArguments'
    """
    if constructor in shipped_rules() or not constructor.startswith(_PACKAGE):
        return constructor
    found = _home(constructor)
    return found if found in shipped_rules() else constructor


@cache
def _home(constructor: str) -> str:
    # Reading source takes milliseconds, and most constructors have a name of no rules.
    if constructor.rpartition(":")[2].rpartition(".")[2] not in _names():
        return constructor
    try:
        callee = _reader().read(constructor)
    except ForgatherError:
        return constructor
    return callee.defined_as or constructor if isinstance(callee, Callee) else constructor


@cache
def _names() -> frozenset[str]:
    return frozenset(name.rpartition(":")[2].rpartition(".")[2] for name in shipped_rules())


@cache
def _reader() -> Reader:
    # Imported where it is needed: most commands read no source.
    from forgather.signatures.reader import Reader

    return Reader(str(Path(__file__).parents[2]), cache_dir=cache_dir("signatures"))
