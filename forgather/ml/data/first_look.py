"""A first look at a user's data file and base model, before a project for them is written.

Takes the kind of a project (`chat`, `classify`, `preferences`, `tag` or `seq2seq`), a data file and the folder or name
of a base model. Gives the settings that a config for them needs, and one line that says what was recognised. The file
is read by the function that the config calls, so a row that cannot be used is reported now, with its place.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from datasets import Dataset

from forgather.errors import TrainingError
from forgather.ml.data.chat_rows import Conversation, form_of
from forgather.ml.data.chat_template import check_marks, packaged_twin, read_template, turn_end
from forgather.ml.data.conversations import CONVERSATION, chats
from forgather.ml.data.data_errors import DataError, DataFileError
from forgather.ml.data.file_rows import class_names, file_rows
from forgather.ml.data.json_rows import json_rows
from forgather.ml.data.labelled import labelled_rows
from forgather.ml.data.preference_rows import preference_pairs
from forgather.ml.data.seq2seq import seq2seq_rows
from forgather.ml.data.tagged import is_entity_tag, tagged_rows
from forgather.ml.data.tokenizer import load_tokenizer
from forgather.ml.data.usual_columns import USUAL, chosen_columns, column_value, other_names, role_of
from forgather.ml.number_format import plural
from forgather.stored_model import missing_model, other_kind

_ENCODER_DECODERS = {"chat": False, "preferences": False, "seq2seq": True}
_SHOWN_CLASSES = 6
# In the order of choice; `alpaca` needs no token that a vocabulary may lack.
_TEMPLATES = ("chatml", "llama3", "gemma3", "phi3", "alpaca")


class StarterError(TrainingError, ValueError):
    """Raised if a data file or a base model does not fit the kind of a project."""

    code = "FG491"


@dataclass(slots=True)
class FirstLook:
    """What a config for a data file and a base model needs.

    Args:
        summary: what was recognised, for the user.
        rows: settings of the block [raw_dataset].
        facts: names that the block [config_metadata] sets, such as `task` or `chat_template`.
    """

    summary: str
    rows: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


def first_look(
    kind: str, file: str | None, model: str | None = None, columns: Mapping[str, str] | None = None
) -> FirstLook:
    """Returns the settings for a data file and a base model.

    Args:
        kind: "chat", "classify", "preferences", "tag" or "seq2seq".
        file: the data file; None for the rows that a new project of this kind begins with.
        model: the folder of a base model or its name on the Hub; None for a new model.
        columns: the names of columns in the file, by what they hold, such as "text". Others are found by usual names.

    Raises:
        StarterError: FG491 if the file does not have the columns of the kind, FG492 if there is no model that fits.
        DataError: if a row cannot be used, as the reader of the kind reports it.
        DataFileError: FG830 if there is no such file, FG834 if it cannot be read.
    """
    if file is None:
        found = FirstLook("", facts={"is_chat": True} if kind == "preferences" else {})
    elif os.path.isfile(file):
        if not columns:
            _refuse_another_kind(kind, file)
        found = _look(kind, file, columns or {})
    else:
        hint = "name a file; a config may also name a folder or a glob as paths"
        raise DataFileError(f"there is no data file {file!r}", code="FG830", hint=hint)
    if model is not None:
        _refuse_other_model(kind, model)
    # A new model for conversations gets `chatml` without being told.
    is_chat = found.facts.pop("is_chat", False) or (kind == "chat" and model is not None)
    if is_chat and (template := _template_for(model)):
        found.facts["chat_template"] = template
    return found


def _chats(file: str, names: Mapping[str, str]) -> FirstLook:
    rows: Dataset = chats(file)
    conversations = map(Conversation.from_json, rows[CONVERSATION])
    if not any(message["role"] == "assistant" for one in conversations for message in one.messages):
        raise StarterError(
            f"no conversation in {file!r} has an answer: there is nothing to learn",
            hint="give messages with the role assistant",
        )
    first = next(json_rows(file)).value
    return FirstLook(f"{plural(len(rows), 'conversation')} in the form {form_of(first)!r}")


def _pairs(file: str, names: Mapping[str, str]) -> FirstLook:
    first = next((row.value for row in json_rows(file)), None)
    if isinstance(first, Mapping) and {"prompt", "completion", "label"} <= first.keys() and "chosen" not in first:
        raise StarterError(
            f"the rows of {file!r} are single answers that were judged",
            hint="write a config with 'datasets/feedback.yaml' in [raw_dataset] and KTOLoss in [loss_fn]: "
            "docs/how-to/preferences.md",
        )
    rows: Dataset = preference_pairs(file)
    is_chat = CONVERSATION in rows.column_names
    what = "messages of a chat" if is_chat else "texts, which are used as they are"
    return FirstLook(f"{plural(len(rows), 'pair')} of {what}", facts={"is_chat": is_chat})


def _labelled(file: str, names: Mapping[str, str]) -> FirstLook:
    task = _task([column_value(row, names["label_column"]) for row in _first_rows(file)])
    rows = labelled_rows(file, task=task, **names)
    facts = {} if task == "classification" else {"task": task}
    return FirstLook(f"{plural(len(rows), 'row')}, {_labels_text(task, class_names(rows))}", facts=facts)


def _tagged(file: str, names: Mapping[str, str]) -> FirstLook:
    rows = tagged_rows(file, **names)
    tags = class_names(rows) or []
    facts = {} if all(is_entity_tag(name) for name in tags) else {"tags": "words"}
    return FirstLook(f"{plural(len(rows), 'row')}, each word with one of {_classes_text(tags)}", facts=facts)


def _seq2seq(file: str, names: Mapping[str, str]) -> FirstLook:
    return FirstLook(f"{plural(len(seq2seq_rows(file, **names)), 'row')} of a source and a target")


_LOOKS = {"chat": _chats, "classify": _labelled, "preferences": _pairs, "tag": _tagged, "seq2seq": _seq2seq}
_JSON = (".jsonl", ".json")
_FILES = {
    "chat": (_JSON, "conversations"),
    "classify": ((*_JSON, ".csv"), "rows with labels"),
    "preferences": (_JSON, "preferences"),
    "tag": (_JSON, "words with tags"),
    "seq2seq": ((*_JSON, ".csv"), "sources and targets"),
}
COLUMNS = {"classify": ("text", "label"), "tag": ("tokens", "tags"), "seq2seq": ("source", "target")}
"""What the columns of a file hold that may have names of the user's own, by the kind of the project."""


def _look(kind: str, file: str, given: Mapping[str, str]) -> FirstLook:
    _refuse_suffix(file, *_FILES[kind])
    names = _named_columns(kind, file, given) if kind in COLUMNS else {}
    try:
        found = _LOOKS[kind](file, names)
    except DataError as error:
        if error.code == "FG831":
            error.hint = f"there are: {', '.join(error.expected)}"
        raise
    others = {argument: name for argument, name in names.items() if name != role_of(argument)}
    found.rows |= others
    found.summary += f"; columns: {other_names(names)}" if others else ""
    return found


def _named_columns(kind: str, file: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the name of each column that the kind needs, by the argument of the reader."""
    first = next(iter(_first_rows(file, 1)), None)
    if first is None:
        raise DataError(f"{file!r} has no rows", code="FG832", hint="a data set needs at least one row")
    asked = {f"{name}_column": given.get(name) for name in COLUMNS[kind]}
    label = next((name for name in first if name in USUAL["label"]), None)
    # Of two columns, the one that is not the label can only be the text.
    if kind == "classify" and len(first) == 2 and label and asked == dict.fromkeys(asked):
        asked["text_column"] = next(name for name in first if name != label)
    try:
        return chosen_columns(first, asked)
    except DataError as error:
        # There is no config yet in which an argument could name the column.
        example = next(iter(error.expected), "COLUMN")
        error.hint = f"name it: --columns {error.found}={example}"
        error.message = f"{file!r}: {error.message}"
        raise


def _refuse_another_kind(kind: str, file: str) -> None:
    """Raises FG491 if the keys of the first row of a JSON file are those of another kind of project."""
    if not file.lower().endswith((".jsonl", ".json")):
        return
    row = next((row.value for row in json_rows(file)), None)
    keys = frozenset(row) if isinstance(row, Mapping) else frozenset()
    found = next((name for name, (needed, _) in _KEYS.items() if any(one <= keys for one in needed)), kind)
    if found != kind:
        shown = next(one for one in _KEYS[found][0] if one <= keys)
        raise StarterError(
            f"the rows of {file!r} are {_KEYS[found][1]}: they have {' and '.join(map(repr, sorted(shown)))}",
            hint=f"--kind {found} makes a project for them",
        )


# Keys that only the rows of one kind have, in this order, and what the rows are.
_KEYS: Mapping[str, tuple[tuple[frozenset[str], ...], str]] = {
    "preferences": ((frozenset({"chosen", "rejected"}),), "preference pairs"),
    "chat": ((frozenset({"messages"}), frozenset({"conversations"})), "conversations"),
    "classify": ((frozenset({"text", "label"}),), "texts with labels"),
    "tag": (tuple(frozenset({"tokens", name}) for name in USUAL["tags"]), "words with tags"),
    "seq2seq": ((frozenset({"source", "target"}),), "sources and targets"),
}


def _refuse_suffix(file: str, suffixes: Sequence[str], what: str) -> None:
    if not file.lower().endswith(tuple(suffixes)):
        raise StarterError(
            f"{file!r} is not one of the files from which {what} are read",
            hint=f"write the rows to a file whose name ends in {' or '.join(suffixes)}",
        )


def _first_rows(file: str, count: int = 200) -> list[Mapping[str, Any]]:
    """Returns the first rows of a file of labelled rows."""
    return [row.values for row in islice(file_rows(file), count)]


def _task(labels: Sequence[Any]) -> str:
    """Returns the task that the labels of the first rows need."""
    if any(isinstance(label, list) for label in labels):
        is_number = all(isinstance(part, float) for label in labels if isinstance(label, list) for part in label)
        return "regression" if is_number and any(labels) else "multi_label"
    is_regression = labels and all(map(_is_number, labels)) and not all(map(_is_whole, labels))
    return "regression" if is_regression else "classification"


def _is_number(label: Any) -> bool:
    try:
        return not isinstance(label, bool) and label is not None and math.isfinite(float(label))
    except (ValueError, TypeError, OverflowError):
        return False


def _is_whole(label: Any) -> bool:
    # 1.0 is written by a program that means numbers, 1 may be the number of a class.
    return isinstance(label, int) or (isinstance(label, str) and label.strip().lstrip("+-").isdigit())


def _labels_text(task: str, names: Sequence[str] | None) -> str:
    if names is None:
        return "each with a number (regression)"
    return f"{'each with a list of' if task == 'multi_label' else 'each with one of'} {_classes_text(names)}"


def _classes_text(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_CLASSES])
    more = f" and {len(names) - _SHOWN_CLASSES} more" if len(names) > _SHOWN_CLASSES else ""
    return f"{len(names)} classes: {shown}{more}"


def _refuse_other_model(kind: str, model: str) -> None:
    folder = os.path.expanduser(model)
    hint = "name the folder of a model that save_pretrained wrote, or a name on the Hub (owner/name)"
    problem = missing_model(model)
    if problem is None and os.path.isdir(folder) and not os.path.isfile(os.path.join(folder, "config.json")):
        problem = f"the folder {model!r} has no 'config.json'"
    if problem is None and kind in _ENCODER_DECODERS:
        problem = other_kind(model, is_encoder_decoder=_ENCODER_DECODERS[kind])
        hint = "--kind seq2seq takes an encoder-decoder such as T5; --kind chat and preferences take a decoder"
    if problem is not None:
        raise StarterError(problem, code="FG492", hint=hint)


def _template_for(model: str | None) -> str | None:
    """Returns the chat template that a config has to name; None if that of the tokenizer is usable or not known."""
    if model is None:
        return "chatml"
    if not os.path.isdir(os.path.expanduser(model)):
        return None
    tokenizer = load_tokenizer(model)
    if tokenizer.chat_template:
        try:
            check_marks(tokenizer)
        except DataError:
            # Without a packaged template that renders the same text, `fgcli data show` reports what is to be done.
            return packaged_twin(tokenizer)
        return None
    for name in _TEMPLATES:
        tokenizer.chat_template = read_template(name)
        try:
            turn_end(tokenizer)
        except DataError:
            continue
        return name
    return None
