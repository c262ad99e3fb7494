"""Formatting of numbers, times and memory sizes as text for the terminal, the log and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

# Larger than any vocabulary, so it is not a meaningful perplexity.
_LARGEST_PERPLEXITY = 1e6


def format_number(value: Any) -> str:
    """Returns a number as text with four significant digits, in the shortest readable notation.

    Example:
        >>> [format_number(value) for value in (8.31234, 3e-4, 12345678.0, 12, "x")]
        ['8.312', '3.00e-04', '12.35M', '12', 'x']
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) and abs(value) < 100_000:
        return str(value)
    if abs(value) >= 10_000:
        return format_count(value)
    if value and abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4g}"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Returns a number with its noun.

    Args:
        count: the number.
        one: the noun for one thing.
        many: the noun for other numbers; `one` with an "s" by default.

    Example:
        >>> plural(1, "row"), plural(2, "row")
        ('1 row', '2 rows')
    """
    return f"{count} {one if count == 1 else many or one + 's'}"


def format_count(value: float) -> str:
    """Returns a count as text, with a suffix for thousands, millions or billions.

    Example:
        >>> format_count(950), format_count(12345), format_count(2.5e6)
        ('950', '12.35k', '2.50M')
    """
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f}{unit}"
    return f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Returns a duration as text.

    Args:
        seconds: the duration in seconds.

    Units:
        seconds.

    Example:
        >>> format_duration(5.2), format_duration(75), format_duration(3723)
        ('5.2 s', '1:15', '1:02:03')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_bytes(num_bytes: float) -> str:
    """Returns an amount of memory as text, with binary units.

    Units:
        bytes.

    Example:
        >>> format_bytes(512), format_bytes(3 * 2**20), format_bytes(5.5 * 2**30)
        ('512 B', '3.0 MiB', '5.5 GiB')
    """
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if num_bytes >= 2**bits:
            return f"{num_bytes / 2**bits:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_perplexity(loss: Any) -> str | None:
    """Returns exp(loss) as text, or None if exp(loss) is not finite or is larger than any vocabulary.

    Args:
        loss: the mean token cross entropy.

    Units:
        loss: nats per token.

    Example:
        >>> format_perplexity(2.0), format_perplexity(670.0), format_perplexity(float("nan"))
        ('7.389', None, None)
    """
    # `not ... <=` instead of `>`, so that NaN is refused too.
    if not isinstance(loss, int | float) or not loss <= math.log(_LARGEST_PERPLEXITY):
        return None
    return format_number(math.exp(loss))


def evaluation_loss_titles(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns a title for each evaluation loss in a log record, by the name of the loss.

    Args:
        values: the log record, whose keys are names of metrics.

    Example:
        >>> evaluation_loss_titles({"loss": 2.0, "eval_loss": 3.0, "eval_code_loss": 1.0, "eval_code_runtime": 9.0})
        {'eval_loss': 'eval loss', 'eval_code_loss': 'eval loss (code)'}
    """
    found = {}
    for name in values:
        stem = name.removesuffix("_loss")
        # An evaluation with a prefix such as "test" is recognized by its runtime. A training logs a runtime too.
        if stem == name or stem == "train" or not (stem.startswith("eval") or f"{stem}_runtime" in values):
            continue
        prefix, _, of = stem.partition("_")
        found[name] = f"{prefix} loss ({of})" if of else f"{prefix} loss"
    return found


_TIMES = ("_runtime", "_per_second")


def evaluation_titles(values: Mapping[str, Any]) -> dict[str, str]:
    """Returns a title for each loss and each other metric of the evaluations in a log record, the losses first.

    Args:
        values: the log record, whose keys are names of metrics.

    Example:
        >>> evaluation_titles({"eval_few_f1": 0.5, "eval_few_loss": 3.0, "eval_few_runtime": 1.0, "loss": 2.0})
        {'eval_few_loss': 'eval loss (few)', 'eval_few_f1': 'eval f1 (few)'}
    """
    found = evaluation_loss_titles(values)
    # The longest first: the name of a set can be the beginning of another one's.
    stems = sorted((name.removesuffix("_loss") for name in found), key=len, reverse=True)
    for name in values:
        stem = next((stem for stem in stems if name.startswith(f"{stem}_")), None)
        if stem is None or name in found or name.endswith(_TIMES):
            continue
        prefix, _, of = stem.partition("_")
        metric = name.removeprefix(f"{stem}_").replace("_", " ")
        found[name] = f"{prefix} {metric} ({of})" if of else f"{prefix} {metric}"
    return found


def format_share(part: int, whole: int) -> str:
    """Returns a text with the number of trainable parameters, the number of all parameters, and their ratio.

    Example:
        >>> format_share(4096, 1204096)
        '4,096 of 1,204,096 parameters (0.34 %)'
    """
    return f"{part:,} of {whole:,} parameters ({100 * part / whole:.2g} %)"
