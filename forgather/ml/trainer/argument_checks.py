"""Checks of training arguments: names, values, and conflicts between settings.

Takes settings as the user wrote them and the rules about them; gives settings under their current names, or a
`SettingError`. No setting is dropped silently: an old name is translated with one warning, and a setting of
transformers that this trainer lacks is refused by name, unless its value asks for the default behaviour. All trainers
check arguments here and nowhere else.
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
    """An unknown training argument, or one with a value that is not allowed."""

    code = "FG810"


# Read from transformers itself: a setting that a new release adds is then refused by name, and not as a misspelling.
TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(TransformersArguments)
}


def rules(file: str, constructor: str) -> Rules:
    """Returns the rules about a constructor from a file of `forgather/ml/rules/`.

    Args:
        file: name of the JSON file, without its suffix.
        constructor: the `"module:attr"` string that the rules are about.
    """
    return next(found for found in read_rules(str(_FOLDER / f"{file}.json")) if constructor in found.about)


def current_names(known: Rules, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `given` with every setting under its current name.

    Args:
        known: the existing names, and the fate of renamed or removed ones.
        given: settings as the user wrote them.

    Raises:
        SettingError: FG810 for an unknown name, FG811 for a setting that is not available here, FG812 for one setting
            given under two names.
    """
    # A setting that only transformers has is accepted with its default value: configs often spell defaults out.
    settings, found = known.names(given, TRANSFORMERS_DEFAULTS)
    for breach in found:
        if breach.severity is not Severity.ERROR:
            _log.warning("%s", breach.message)
    raise_first_error(found)
    return settings


def raise_first_error(found: Iterable[Violation]) -> None:
    """Raises the first violation that is an error; ignores warnings.

    Raises:
        SettingError: FG810 to FG814.
    """
    for breach in found:
        if breach.severity is Severity.ERROR:
            raise SettingError(
                breach.message, code=breach.code, hint=breach.hint, expected=breach.expected, found=breach.found
            ).about(breach.argument)


@contextlib.contextmanager
def errors_under_args(args: Any) -> Iterator[None]:
    """Prefixes the argument name of an error with `args.`, as a caller of the trainer writes it.

    A strategy reports errors by the name of a setting; a diagnostic is located by the path of the trainer's argument.
    """
    try:
        yield
    except ForgatherError as error:
        # The first part only: an error may name an entry of a nested setting, such as `fsdp_config.shard_size`.
        name = (error.argument or "").partition(".")[0]
        if name != "args" and name in {field.name for field in dataclasses.fields(args)}:
            error.argument = f"args.{error.argument}"
        raise
