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
from forgather.ml.number_format import plural
from forgather.rules import is_path

_TEXTS = ("text", "sentence", "review", "document", "content", "message", "body", "input", "question", "title")
_LABELS = ("label", "labels", "class", "category", "sentiment", "target", "topic", "intent", "score", "rating")
_TAGS = ("tags", "ner_tags", "pos_tags")
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


def first_look(kind: str, file: str | None, model: str | None = None) -> FirstLook:
    """Returns the settings for a data file and a base model.

    Args:
        kind: "chat", "classify", "preferences", "tag" or "seq2seq".
        file: the data file; None for the rows that a new project of this kind begins with.
        model: the folder of a base model or its name on the Hub; None for a new model.

    Raises:
        StarterError: FG491 if the file does not have the columns of the kind, FG492 if the folder has no model.
        DataError: if a row cannot be used, as the reader of the kind reports it.
        DataFileError: FG830 if there is no such file, FG834 if it cannot be read.
    """
    if file is None:
        found = FirstLook("", facts={"is_chat": True} if kind == "preferences" else {})
    elif os.path.isfile(file):
        _refuse_another_kind(kind, file)
        found = _look(kind, file)
    else:
        hint = "name a file; a config may also name a folder or a glob as paths"
        raise DataFileError(f"there is no data file {file!r}", code="FG830", hint=hint)
    if model is not None:
        _refuse_no_model(model)
    # A new model for conversations gets `chatml` without being told.
    is_chat = found.facts.pop("is_chat", False) or (kind == "chat" and model is not None)
    if is_chat and (template := _template_for(model)):
        found.facts["chat_template"] = template
    return found


def _chats(file: str) -> FirstLook:
    _refuse_suffix(file, (".jsonl", ".json"), "conversations")
    rows = chats(file)
    conversations = map(Conversation.from_json, rows[CONVERSATION])
    if not any(message["role"] == "assistant" for one in conversations for message in one.messages):
        raise StarterError(
            f"no conversation in {file!r} has an answer: there is nothing to learn",
            hint="give messages with the role assistant",
        )
    first = next(json_rows(file)).value
    return FirstLook(f"{plural(len(rows), 'conversation')} in the form {form_of(first)!r}")


def _pairs(file: str) -> FirstLook:
    _refuse_suffix(file, (".jsonl", ".json"), "preferences")
    first = next((row.value for row in json_rows(file)), None)
    if isinstance(first, Mapping) and {"prompt", "completion", "label"} <= first.keys() and "chosen" not in first:
        raise StarterError(
            f"the rows of {file!r} are single answers that were judged",
            hint="write a config with 'datasets/feedback.yaml' in [raw_dataset] and KTOLoss in [loss_fn]: "
            "docs/how-to/preferences.md",
        )
    rows = preference_pairs(file)
    is_chat = CONVERSATION in rows.column_names
    what = "messages of a chat" if is_chat else "texts, which are used as they are"
    return FirstLook(f"{plural(len(rows), 'pair')} of {what}", facts={"is_chat": is_chat})


def _labelled(file: str) -> FirstLook:
    _refuse_suffix(file, (".jsonl", ".json", ".csv"), "rows with labels")
    first = _first_rows(file)
    text, label = _columns(file, list(first[0]) if first else [])
    task = _task([row.get(label) for row in first])
    rows = labelled_rows(file, task=task, text_column=text, label_column=label)
    named = {"text_column": (text, "text"), "label_column": (label, "label")}
    settings = {name: value for name, (value, usual) in named.items() if value != usual}
    facts = {} if task == "classification" else {"task": task}
    return FirstLook(f"{plural(len(rows), 'row')}, {_labels_text(task, class_names(rows))}", settings, facts)


def _tagged(file: str) -> FirstLook:
    _refuse_suffix(file, (".jsonl", ".json"), "words with tags")
    first = next((row.value for row in json_rows(file)), None)
    # The data sets of the Hub call them `ner_tags` or `pos_tags`, and have numbers there.
    column = next((name for name in _TAGS if isinstance(first, Mapping) and name in first), "tags")
    rows = tagged_rows(file, tags_column=column)
    names = class_names(rows) or []
    facts = {} if all(is_entity_tag(name) for name in names) else {"tags": "words"}
    settings = {} if column == "tags" else {"tags_column": column}
    return FirstLook(f"{plural(len(rows), 'row')}, each word with one of {_classes_text(names)}", settings, facts)


def _seq2seq(file: str) -> FirstLook:
    _refuse_suffix(file, (".jsonl", ".json", ".csv"), "sources and targets")
    return FirstLook(f"{plural(len(seq2seq_rows(file)), 'row')} of a source and a target")


_LOOKS = {"chat": _chats, "classify": _labelled, "preferences": _pairs, "tag": _tagged, "seq2seq": _seq2seq}


def _look(kind: str, file: str) -> FirstLook:
    try:
        return _LOOKS[kind](file)
    except DataError as error:
        if error.code == "FG831":
            # There is no config yet in which an argument could name another column.
            error.hint = f"rename a column to {error.found!r}; there are: {', '.join(error.expected)}"
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
    "tag": (tuple(frozenset({"tokens", name}) for name in _TAGS), "words with tags"),
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
    return [values for _, values in islice(file_rows(file), count)]


def _columns(file: str, columns: list[str]) -> tuple[str, str]:
    """Returns the names of the columns with the text and with the label."""
    if not columns:
        raise DataError(f"{file!r} has no rows", code="FG832", hint="a data set needs at least one row")
    label = next((name for name in _LABELS if name in columns), None)
    text = next((name for name in _TEXTS if name in columns and name != label), None)
    others = [name for name in columns if name != label]
    # Of two columns, the one that is not the label can only be the text.
    if text is None and label is not None and len(others) == 1:
        text = others[0]
    if text is None or label is None:
        what, known = ("text", _TEXTS) if text is None else ("label", _LABELS)
        raise StarterError(
            f"no column of {file!r} is known to hold the {what}; there are: {', '.join(columns[:12])}",
            hint=f"rename the column to {what!r} (also known: {', '.join(known[1:6])})",
            expected=list(known),
        )
    return text, label


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


def _refuse_no_model(model: str) -> None:
    folder = os.path.expanduser(model)
    if os.path.isfile(os.path.join(folder, "config.json")):
        return
    if os.path.exists(folder) or is_path(model):
        what = "has no 'config.json'" if os.path.isdir(folder) else "does not exist"
        hint = "name the folder of a model that save_pretrained wrote, or a name on the Hub (owner/name)"
        raise StarterError(f"the folder {model!r} {what}", code="FG492", hint=hint)


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
