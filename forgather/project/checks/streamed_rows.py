"""Checks streamed rows: whether a trainer and the functions that prepare the rows can do without all of them.

The input is calls; the output is findings. Nothing is imported. The run also refuses every config for which this check
reports an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forgather.config.graph import Call, CallKind, Node, Scalar
from forgather.config.lint.call_check import Called
from forgather.config.path import format_path
from forgather.config.traverse import children, walk
from forgather.errors import Diagnostic
from forgather.project.checks.setting_rules import arguments_of, rules_about
from forgather.project.checks.subject import Subject
from forgather.project.trainer_arguments import keyword
from forgather.whole_rows import whole_row_hints

_DATA = "forgather.ml.data"
_READERS = (":chats", ":preference_pairs", ":json_lines", ":parquet", ":text_files")


def check_streamed_rows(subject: Subject) -> list[Diagnostic]:
    """Returns findings about trainers whose training rows are streamed."""
    found: list[Diagnostic] = []
    for called in subject.calls.values():
        given = arguments_of(called)
        if "train_dataset" in given and called.node.kind is not CallKind.META and rules_about(called):
            stream = next(iter(streams_of(given["train_dataset"])), None)
            if stream is not None:
                found += _check_trainer(called, given, stream, subject.calls)
                found += _check_functions(called, stream)
    return found


def _check_trainer(
    called: Called, given: Mapping[str, Node], stream: Call, calls: Mapping[int, Called]
) -> Iterator[Diagnostic]:
    args = calls.get(id(given.get("args")))
    settings = arguments_of(args) if args is not None else {}
    path = format_path(called.path)
    max_steps = settings.get("max_steps")
    value = max_steps.value if isinstance(max_steps, Scalar) else -1
    is_known = args is not None and (max_steps is None or isinstance(max_steps, Scalar))
    if is_known and isinstance(value, int) and value <= 0:
        yield Diagnostic(
            code="FG805",
            message="the training rows are streamed, so their number is not known, and max_steps is not set",
            span=stream.span,
            path=path,
            hint="set max_steps in [trainer_args]; rows / (per_device_train_batch_size x gradient_accumulation_steps x "
            "processes) steps are one epoch",
        )
    strategy = settings.get("train_sampling_strategy")
    if isinstance(strategy, Scalar) and strategy.value == "group_by_length":
        yield Diagnostic(
            code="FG946",
            message="rows cannot be grouped by length: they are streamed",
            span=strategy.span,
            path=path,
            hint="set train_sampling_strategy: random, or packing: true where the rows are tokenized",
        )
    streams, bad_rows = settings.get("data_streams"), settings.get("bad_rows")
    is_whole = isinstance(streams, Scalar) and streams.value == 0 and streams.value is not False
    if is_whole and isinstance(bad_rows, Scalar) and bad_rows.value != "stop":
        yield Diagnostic(
            code="FG976",
            message=f"bad_rows is {bad_rows.value!r}, and the training rows are not read by virtual streams",
            span=bad_rows.span,
            path=path,
            hint="remove data_streams: 0, or set bad_rows: stop",
        )
    buffer_size = keyword(stream, "buffer_size")
    is_shuffled = buffer_size is None or (isinstance(buffer_size, Scalar) and buffer_size.value != 0)
    if isinstance(strategy, Scalar) and strategy.value == "sequential" and is_shuffled:
        yield Diagnostic(
            code="FG982",
            message="train_sampling_strategy is 'sequential', and the streamed rows are shuffled",
            span=strategy.span,
            path=path,
            hint="set buffer_size: 0 where they are read, for the order of the files",
        )


def _check_functions(called: Called, stream: Call) -> Iterator[Diagnostic]:
    has_eval = not _is_null(keyword(stream, "eval_paths"))
    for call in _calls(called.node):
        name = call.constructor.rpartition(":")[2]
        # `split` keeps evaluation rows that are given, and those are never streamed.
        if not _needs_all(call) or (name == "split" and has_eval):
            continue
        rows = _calls_of_rows(call)
        # A tokenizer that is trained on the texts of rows gets no rows itself.
        is_of_texts = name == "train_bpe" and any(one.constructor == f"{_DATA}:row_texts" for one in rows)
        if any(one is stream for one in rows) and not is_of_texts:
            yield Diagnostic(
                code="FG982",
                message=f"the rows are streamed, and {name} needs all of them",
                span=call.span,
                path=format_path(called.path),
                hint=whole_row_hints()[name],
            )


def _needs_all(call: Call) -> bool:
    return call.constructor.startswith(_DATA) and call.constructor.rpartition(":")[2] in whole_row_hints()


def _calls_of_rows(call: Call) -> list[Call]:
    """Returns the calls that make the rows which a function gets, without those for evaluation, never streamed."""
    node = next(iter(call.args), None) or keyword(call, "dataset") or keyword(call, "datasets")
    found: dict[int, Call] = {}
    seen: set[int] = set()
    left = [] if node is None else [node]
    while left:
        node = left.pop()
        if id(node) in seen or _is_evaluation(node):
            continue
        seen.add(id(node))
        if isinstance(node, Call):
            found[id(node)] = node
        left += [child for _, child in children(node)]
    return list(found.values())


def _is_evaluation(node: Node) -> bool:
    if not isinstance(node, Call) or node.constructor != "getitem" or len(node.args) != 2:
        return False
    part = node.args[1]
    return isinstance(part, Scalar) and part.value == "eval"


def _calls(node: Node) -> list[Call]:
    return [found for _, found in walk([((), node)], unbuilt=False) if isinstance(found, Call)]


def streams_of(node: Node) -> list[Call]:
    """Returns the calls below a node that give streamed rows."""
    return [call for call in _calls(node) if _is_stream(call)]


def _is_stream(call: Call) -> bool:
    is_reader = call.constructor.startswith(_DATA) and call.constructor.endswith(_READERS)
    flag = keyword(call, "streaming")
    return is_reader and isinstance(flag, Scalar) and flag.value is True


def _is_null(node: Node | None) -> bool:
    return node is None or (isinstance(node, Scalar) and node.value is None)
