"""The columns of a file that hold what a task needs, under the names that are usual in the field.

Takes the columns of a row and the names that the user gave; gives a name for each argument. A name is only taken if no
other column could be meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forgather.ml.data.data_errors import DataError

USUAL: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "review", "document", "content", "message", "body", "input", "question", "title"),
    "label": ("label", "labels", "class", "category", "sentiment", "target", "topic", "intent", "score", "rating"),
    "tokens": ("tokens", "words"),
    "tags": ("tags", "ner_tags", "labels", "pos_tags", "chunk_tags", "upos"),
    "source": ("source", "article", "document", "dialogue", "text", "input", "question", "prompt"),
    "target": ("target", "summary", "highlights", "output", "answer", "response", "completion", "label"),
}
"""The usual names of columns, by what they hold. The first is taken even if others are there."""
# Many data sets have a column `source` that says where a row is from, so it counts only with its partner.
_PARTNERS = {"source": "target", "target": "source"}
_TRANSLATION = "translation"


def column_value(values: Mapping[str, Any], column: str) -> Any:
    """Returns the value of a column; `translation.en` is the key `en` of the mapping in the column `translation`.

    Raises:
        KeyError: if there is no such column.

    Example:
        >>> column_value({"translation": {"en": "Hello"}}, "translation.en")
        'Hello'
    """
    first, _, key = column.partition(".")
    if column not in values and key and isinstance(values.get(first), Mapping):
        return values[first][key]
    return values[column]


def chosen_columns(values: Mapping[str, Any], given: Mapping[str, str | None]) -> dict[str, str]:
    """Returns the name of the column for each argument.

    Args:
        values: the first row.
        given: the names by argument, such as `source_column`; None for a column that has to be found.

    Raises:
        DataError: FG831 if no column has a usual name; FG975 if several have one.

    Example:
        >>> chosen_columns({"id": 1, "question": "a", "answer": "b"}, {"source_column": None, "target_column": None})
        {'source_column': 'question', 'target_column': 'answer'}
    """
    taken = {argument: name for argument, name in given.items() if name is not None}
    asked = [argument for argument, name in given.items() if name is None]
    for argument in asked:
        taken[argument] = _found(argument, list(taken.values()), values)
    return {argument: taken[argument] for argument in given}


def other_names(names: Mapping[str, str]) -> str:
    """Returns a text about the columns whose name is not the first of the usual ones; "" if there is none.

    Args:
        names: the names by argument.

    Example:
        >>> other_names({"source_column": "article", "target_column": "target"})
        "source = 'article'"
    """
    others = {role_of(argument): name for argument, name in names.items()}
    return ", ".join(f"{role} = {name!r}" for role, name in others.items() if name != role)


def role_of(argument: str) -> str:
    """Returns what a column holds, by the name of the argument that names the column."""
    return argument.removesuffix("_column")


def _found(argument: str, taken: Sequence[str], values: Mapping[str, Any]) -> str:
    role, columns = role_of(argument), [name for name in values if name not in taken]
    names = USUAL[role]
    partner = _PARTNERS.get(role)
    if names[0] in columns and (partner is None or USUAL[partner][0] in values):
        return names[0]
    found = [name for name in names if name in columns]
    languages = values.get(_TRANSLATION)
    if not found and partner and isinstance(languages, Mapping) and languages:
        found = [name for language in languages if (name := f"{_TRANSLATION}.{language}") not in taken]
    if len(found) == 1:
        return found[0]
    if found:
        raise DataError(
            f"{' and '.join(map(repr, found))} could all be the {role}" if len(found) > 2 else
            f"{found[0]!r} and {found[1]!r} could both be the {role}",
            code="FG975",
            hint=f"name one of them, as {argument}: {found[0]}",
            expected=found,
            found=role,
        ).about(argument)  # fmt: skip
    raise DataError(
        f"no column is known to hold the {role}; there are: {', '.join(list(values)[:12])}",
        code="FG831",
        hint=f"name it, as {argument}: {next(iter(columns), names[0])}; known are: {', '.join(names)}",
        expected=columns,
        found=role,
    ).about(argument)
