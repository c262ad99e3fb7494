"""The evaluation data of a past run, replaced by the rows of another file.

The input is the graph of the run and the path of a JSON lines or CSV file; the output is an override that gives the
rows of the file to the functions that prepare the rows of the run's evaluation set. So the rows are tokenized as those
of the run are, and labels have the same numbers. The file's columns have the names that the run's own files have.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forgather.config.graph import Call, Graph, Mapped, Node, Scalar
from forgather.config.insight.path_lookup import path_text
from forgather.config.path import GraphPath, Index, Key
from forgather.config.traverse import walk
from forgather.errors import ProjectError
from forgather.project.literal import plain_value
from forgather.project.trainer_arguments import keyword

SUFFIXES = {".jsonl": "json_lines", ".json": "json_lines", ".csv": "csv_files"}
"""The suffixes of the files that can be evaluated, with the functions that read them."""

_DATA = "forgather.ml.data:"
_PREPARE_COLUMNS = ("tokenize_examples", "tokenize_preferences", "tokenize_feedback", "as_chats")
_WITH_LABELS = {
    "labelled_rows": "labelled_rows",
    "tagged_rows": "tagged_rows",
    "image_rows": "image_rows",
    "image_arrays": "image_rows",
}
"""The readers whose labels are classes, with the one that reads such rows from a file."""
_PREPARE = (
    *("tokenize", "tokenize_labelled", "tokenize_tagged", "tokenize_seq2seq", "tokenize_chats", "ImageDataset"),
    *_PREPARE_COLUMNS,
)
"""The functions of `forgather.ml.data` that prepare rows; the first argument of each is the rows."""
_READ_THEMSELVES = (*_WITH_LABELS, "seq2seq_rows", "chats", "preference_pairs")
"""The readers whose rows only their own tokenization can prepare."""
_READ = ("json_lines", "csv_files", "parquet", "hub_dataset", *_READ_THEMSELVES)
_KEPT = {
    "labelled_rows": ("task", "text_column", "label_column", "label_separator"),
    "tagged_rows": ("tokens_column", "tags_column"),
    "seq2seq_rows": ("source_column", "target_column"),
    "image_rows": ("image_column", "label_column"),
    "image_arrays": (),
    "chats": ("form", "system", "before_input", "bad_rows"),
    "preference_pairs": ("as_turns", "bad_rows"),
}
"""The arguments of readers that say how rows are read."""
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "labelled_rows": ("text_column", "label_column"),
    "tagged_rows": ("tokens_column", "tags_column"),
    "seq2seq_rows": ("source_column", "target_column"),
    "image_rows": ("image_column", "label_column"),
    **dict.fromkeys(("json_lines", "csv_files", "parquet", "hub_dataset"), ("text_column",)),
    "tokenize_examples": ("prompt_column", "completion_column"),
    "tokenize_preferences": ("prompt_column", "chosen_column", "rejected_column"),
    "tokenize_feedback": ("prompt_column", "completion_column", "label_column"),
}
"""The arguments that name columns, of readers and of functions that prepare several columns."""
_OTHERS_KEPT = ("text_column",)
_USUAL = {"before_input": "\n\n", "text_column": "text"}
"""What some of these arguments are if they are not given."""


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """The rows of a file in place of those of an evaluation set.

    Args:
        overrides: the changes of the graph, as pairs of graph path and YAML text.
        like: the name of the evaluation set whose rows are prepared in the same way; None if it has no name.
    """

    overrides: tuple[tuple[str, str], ...]
    like: str | None


def named_sets(graph: Graph) -> tuple[str, ...]:
    """Returns the names of the evaluation sets of `main`; none if there is a single set without a name."""
    sets = _eval_dataset(graph)
    return tuple(str(entry.key) for entry in sets.entries) if isinstance(sets, Mapped) else ()


def is_file_name(text: str) -> bool:
    """Returns whether the value of `--data` is the path of a file and not the name of an evaluation set."""
    return os.sep in text or os.path.splitext(text)[1] != "" or os.path.exists(text)


def rows_of_file(
    graph: Graph, file: str, labels: Sequence[str] | None, columns: Mapping[str, str] | None = None
) -> FileRows:
    """Returns the overrides that evaluate the rows of a file.

    Args:
        graph: the graph of the run.
        file: the path of the file.
        labels: the names of the model's classes in the order of their numbers; None if the model has none.
        columns: the names of columns in the file, by what they hold, such as "text". Others have the names that they
            have in the run's own file.

    Raises:
        ProjectError: FG487 if the file does not exist or has another format, if the run's evaluation set is not
            prepared by functions that can prepare the rows of a file, or if its rows have no such column.
    """
    suffix = _suffix_of(file)
    like, function, rows, place = _prepared_set(graph)
    reader = _call_of_reader(rows)
    own = reader.constructor.removeprefix(_DATA) if reader is not None else ""
    name = _WITH_LABELS.get(own, own) if own in _READ_THEMSELVES else SUFFIXES[suffix]
    options = {key: value for key, value in _options(reader).items() if key in _KEPT.get(own, _OTHERS_KEPT)}
    if own in ("chats", "preference_pairs") and suffix == ".csv":
        raise ProjectError(
            f"{file!r} is a CSV file, and the rows of the run are conversations or pairs of answers",
            code="FG487",
            hint="give a file of JSON lines, as the run's own file is",
        )
    # A regression has no classes, although its model numbers the values.
    if own in _WITH_LABELS and options.get("task") != "regression":
        if labels is None:
            raise ProjectError(
                "the saved weights do not name the classes of the model, so labels in a file have no numbers",
                code="FG487",
                hint="evaluate the run's own rows: leave --data out",
            )
        options["labels"] = list(labels)
    is_of_function = function in _PREPARE_COLUMNS and own not in _READ_THEMSELVES
    by_function = _COLUMNS.get(function, ()) if is_of_function else ()
    asked = _arguments(columns or {}, by_function if is_of_function else _COLUMNS.get(own or "json_lines", ()))
    overrides = [
        (path_text((*place[:-1], Key(name))), json.dumps(asked[name])) for name in by_function if name in asked
    ]
    # A function that reads several columns finds them under the names in the file.
    options |= {"text_column": None} if is_of_function else asked
    text = f"!singleton:{_DATA}{name} {json.dumps({'paths': os.path.abspath(file), **options}, ensure_ascii=False)}"
    return FileRows(overrides=((path_text(place), text), *overrides), like=like)


def _arguments(columns: Mapping[str, str], known: Sequence[str]) -> dict[str, str]:
    """Returns the arguments that name columns; raises FG487 for one that is not known."""
    asked = {f"{column}_column": written for column, written in columns.items()}
    if unknown := [column for column in columns if f"{column}_column" not in known]:
        names = ", ".join(argument.removesuffix("_column") for argument in known)
        raise ProjectError(
            f"the rows of the run have no column {unknown[0]!r} that could have another name",
            code="FG487",
            hint=f"they have: {names}" if known else "their keys are those of the form of the rows",
        )
    return asked


def _suffix_of(file: str) -> str:
    """Returns the suffix of a file of rows; raises FG487 if it does not exist or has another format."""
    suffix = os.path.splitext(file)[1].lower()
    if suffix not in SUFFIXES:
        raise ProjectError(
            f"{file!r} is not a file of rows that can be evaluated",
            code="FG487",
            hint=f"give a file that ends in {', '.join(SUFFIXES)}: JSON lines, or CSV with a line of column names",
        )
    if not os.path.isfile(file):
        raise ProjectError(
            f"the data file {file!r} does not exist", code="FG487", hint=f"it is searched in {os.getcwd()!r}"
        )
    return suffix


def _eval_dataset(graph: Graph) -> Node | None:
    main = graph.targets.get("main")
    return keyword(main.value, "eval_dataset") if main else None


def _prepared_set(graph: Graph) -> tuple[str | None, str, Node, GraphPath]:
    """Returns the name of the first evaluation set, and of the set what `_prepared` returns; raises FG487 if nothing.

    The name is None for a set without a name.
    """
    node, like = _eval_dataset(graph), None
    path: GraphPath = (Key("main"), Key("eval_dataset"))
    if isinstance(node, Mapped) and node.entries:
        first = node.entries[0]
        like, node = str(first.key), first.value
        path = (*path, Key(first.key))
    prepared = _prepared(node, path)
    if prepared is None:
        made = node.constructor if isinstance(node, Call) else "data"
        raise ProjectError(
            f"the evaluation set of the run is made by {made}, which cannot prepare the rows of a file"
            if node is not None
            else "the run has no evaluation set that says how rows are prepared",
            code="FG487",
            span=node.span if node is not None else None,
            hint=f"rows of a file are prepared by {', '.join(_PREPARE)} of forgather.ml.data; evaluate in Python with "
            "trainer.evaluate(rows)",
        )
    return like, *prepared


def _prepared(node: Node | None, path: GraphPath) -> tuple[str, Node, GraphPath] | None:
    """Returns the innermost preparing function, its rows and their path; None without such a function."""
    function = node.constructor.removeprefix(_DATA) if isinstance(node, Call) else ""
    if not isinstance(node, Call) or function not in _PREPARE:
        return None
    rows = keyword(node, "dataset")
    place: GraphPath = (*path, Key("dataset"))
    if rows is None and node.args:
        rows, place = node.args[0], (*path, Index(0))
    if rows is None:
        return None
    return _prepared(rows, place) or (function, rows, place)


def _call_of_reader(rows: Node) -> Call | None:
    """Returns the call that reads the rows; None without one. Raises FG487 if several read differently."""
    if isinstance(rows, Call) and rows.constructor == "getitem" and len(rows.args) == 2:
        # Training and evaluation may be read differently: only the part that is taken counts.
        parts, key = rows.args
        if isinstance(parts, Mapped) and isinstance(key, Scalar):
            rows = next((entry.value for entry in parts.entries if entry.key == key.value), rows)
    names = {f"{_DATA}{name}" for name in _READ}
    readers = [node for _, node in walk([((), rows)]) if isinstance(node, Call) and node.constructor in names]
    if other := next((node for node in readers[1:] if _reading(node) != _reading(readers[0])), None):
        raise ProjectError(
            "the evaluation set of the run joins data sets that are read differently, and the file could be like any",
            code="FG487",
            span=other.span,
            hint="evaluate the run's own rows: leave --data out",
        )
    return readers[0] if readers else None


def _reading(reader: Call) -> object:
    """Returns how a reader makes rows of a file: two that are equal make the same rows."""
    own = reader.constructor.removeprefix(_DATA)
    options = {key: value for key, value in _options(reader).items() if key in _KEPT.get(own, _OTHERS_KEPT)}
    named = {key: value for key, value in options.items() if value is not None and _USUAL.get(key) != value}
    named.pop("bad_rows", None)
    return own if own in _READ_THEMSELVES else "", named


def _options(call: Call | None) -> Mapping[str, object]:
    """Returns the arguments of a call that are plain scalars, or lists of them."""
    found: dict[str, object] = {}
    # The second argument of the readers of files is the name of the column.
    if call is not None and len(call.args) > 1 and isinstance(call.args[1], Scalar):
        found["text_column"] = plain_value(call.args[1], "text_column")
    for entry in call.kwargs if call is not None else ():
        if isinstance(entry.value, Scalar):
            found[str(entry.key)] = plain_value(entry.value, str(entry.key))
    return found
