"""The door of `TrainingArguments`: names and values are checked here, and nowhere else.

Takes what the user wrote and the rules about it; gives settings under their present names, or a `SettingError`. Keeps
true: nothing is dropped in silence. An old spelling is translated with one warning line; a setting of transformers that
this trainer does not have is refused by name, unless it asks for what happens anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers.training_args import TrainingArguments as TransformersArguments

from forgather.errors import ForgatherError, Severity, TrainingError
from forgather.ml.log import get_logger
from forgather.rules import Rules, Violation, read_rules

_log = get_logger(__name__)
_FOLDER = Path(__file__).parents[1] / "rules"


class SettingError(TrainingError, ValueError):
    """A training argument that does not exist, or that cannot have this value."""

    code = "FG810"


TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(TransformersArguments)
}


def rules(file: str, constructor: str) -> Rules:
    """Returns the rules about a constructor out of a file of `forgather/ml/rules/`."""
    return next(found for found in read_rules(str(_FOLDER / f"{file}.json")) if constructor in found.about)


def present_names(known: Rules, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `given` under present names.

    Args:
        known: names that exist, and what became of others.
        given: settings as the user wrote them.

    Raises:
        SettingError: FG810 for an unknown name, FG811 for a setting that is not available here, FG812
            for one setting given under two names.
    """
    settings, found = known.names(given, TRANSFORMERS_DEFAULTS)
    for breach in found:
        if breach.severity is not Severity.ERROR:
            _log.warning("%s", breach.message)
    refuse(found)
    return settings


def refuse(found: Iterable[Violation]) -> None:
    """Raises the first breach that is an error.

    Raises:
        SettingError: FG810 to FG814.
    """
    for breach in found:
        if breach.severity is Severity.ERROR:
            raise SettingError(
                breach.message, code=breach.code, hint=breach.hint, expected=breach.expected, found=breach.found
            ).about(breach.argument)


@contextlib.contextmanager
def about_settings(args: Any) -> Iterator[None]:
    """Lets errors about a setting of `args` name it as a caller of the trainer does, which is where it is looked up."""
    try:
        yield
    except ForgatherError as error:
        name = (error.argument or "").partition(".")[0]
        if name != "args" and name in {field.name for field in dataclasses.fields(args)}:
            error.argument = f"args.{error.argument}"
        raise
