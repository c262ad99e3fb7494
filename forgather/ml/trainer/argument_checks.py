"""Checks of training arguments: names, values, and conflicts between settings.

Input: the settings as the user wrote them, and the rules about these settings. Output: the settings under their
current names, or a `SettingError`. No setting is dropped silently: a renamed setting is translated with one warning,
and a setting of transformers that this trainer does not support is an error that names the setting, unless the setting
has the default value of transformers. All trainers check arguments with this module only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
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
    """An error about a training argument: the name is unknown, or the value is not allowed."""

    code = "FG810"


# Read from transformers itself: a setting that a new release adds is then refused by name, and not as a misspelling.
TRANSFORMERS_DEFAULTS: dict[str, Any] = {
    field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    for field in dataclasses.fields(TransformersArguments)
}


def rules(file: str, constructor: str) -> Rules:
    """Returns the rules about the arguments of one constructor, read from a file in `forgather/ml/rules/`.

    Args:
        file: the name of the JSON file, without the suffix.
        constructor: the `"module:attr"` string of the constructor whose rules are returned.
    """
    return next(found for found in read_rules(str(_FOLDER / f"{file}.json")) if constructor in found.about)


def current_names(known: Rules, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in `given`, each under its current name.

    Args:
        known: the rules, which list the current names and what became of renamed and removed settings.
        given: the settings as the user wrote them.

    Raises:
        SettingError: FG810 if a name is unknown; FG811 if the trainer does not support a setting; FG812 if one setting
            is given under two names.
    """
    # A setting that only transformers has is accepted with its default value: configs often spell defaults out.
    settings, found = known.names(given, TRANSFORMERS_DEFAULTS)
    for breach in found:
        if breach.severity is not Severity.ERROR:
            _log.warning("%s", breach.message)
    raise_first_error(found)
    return settings


def raise_first_error(found: Iterable[Violation]) -> None:
    """Raises a `SettingError` for the first violation of severity "error"; ignores warnings.

    Raises:
        SettingError: FG810 to FG814, the code of that violation.
    """
    for breach in found:
        if breach.severity is Severity.ERROR:
            raise SettingError(
                breach.message, code=breach.code, hint=breach.hint, expected=breach.expected, found=breach.found
            ).about(breach.argument)


@contextlib.contextmanager
def errors_under_args(args: Any) -> Iterator[None]:
    """Context manager that prefixes the argument name of a raised error with `args.`.

    A strategy reports an error under the name of the setting. The trainer's caller gave the setting as `args.<name>`,
    and the line of the config in which the error is shown is found by this longer name.
    """
    try:
        yield
    except ForgatherError as error:
        # The first part only: an error may name an entry of a nested setting, such as `fsdp_config.shard_size`.
        name = (error.argument or "").partition(".")[0]
        if name != "args" and name in {field.name for field in dataclasses.fields(args)}:
            error.argument = f"args.{error.argument}"
        raise


def signature_of(arguments: type[Any]) -> inspect.Signature:
    """Returns the signature that `help()` and editors show for a class of training arguments.

    The signature lists every setting by name, and `**older_names` for settings that were renamed.
    """
    named = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if field.name == "output_dir" else inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=field.type,
        )
        for field in dataclasses.fields(arguments)
    ]
    return inspect.Signature([*named, inspect.Parameter("older_names", inspect.Parameter.VAR_KEYWORD)])
