"""Facts about the targets of a config: the target `meta`, and a summary of each target.

The input is a graph; the output is plain facts, without constructing anything. Entries of `meta` that are not plain
data are left out, except that `output_dir` and `nproc_per_node` must be plain data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from forgather.config.graph import (
    Call,
    Entry,
    Graph,
    Lookup,
    Node,
    Scalar,
    Sequence,
    describe,
    is_null,
    word_of,
)
from forgather.config.traverse import children
from forgather.errors import ProjectError
from forgather.planner.memory_plan import parse_size
from forgather.project.literal import plain_entries, string_entries
from forgather.project.trainer_arguments import trainer_arguments
from forgather.source import Span


@dataclass(frozen=True, kw_only=True)
class RunMeta:
    """The target `meta` of a config.

    Args:
        name: the value of `config_name`; "" if the config has none.
        description: the value of `config_description`; "" if the config has none.
        config_class: the value of `config_class`; "" if the config has none.
        output_dir: the value of `output_dir`; None if the config has none.
        nproc_per_node: the number of processes on one machine, "gpu", or "auto". "gpu" starts one process for each
            accelerator; "auto" starts as many as the parallel sizes in the trainer's arguments need, and is the same as
            "gpu" if no size is given.
        device_memory: the bytes that the run may take on each device, or on that of each pipeline rank; empty if the
            config has no `device_memory`.
        hardware: the name of each device, or of that of each pipeline rank; empty if the config has no `hardware`.
    """

    name: str
    description: str
    config_class: str
    output_dir: str | None
    nproc_per_node: int | str = 1
    device_memory: tuple[int, ...] = ()
    hardware: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """One target in a listing.

    Args:
        name: the name of the target.
        kind: the kind of the target's node: "singleton", "dict", "scalar", "var" and so on.
        summary: the constructor, the value, or the number of items.
        span: the location of the target.
    """

    name: str
    kind: str
    summary: str
    span: Span | None


def run_meta(graph: Graph) -> RunMeta:
    """Returns the facts of the target `meta`.

    Raises:
        ProjectError: FG411 if `output_dir` is not a string; FG828 if `nproc_per_node` is not a number of processes;
            FG948 if `device_memory` is not a size, or `hardware` not a name.
    """
    entry = graph.targets.get("meta")
    values = plain_entries(entry.value) if entry else {}
    return RunMeta(
        name=_one_line(values.get("config_name")),
        description=_one_line(values.get("config_description")),
        config_class=_one_line(values.get("config_class")),
        output_dir=_output_dir(entry.value) if entry else None,
        nproc_per_node=_processes(entry.value) if entry else 1,
        device_memory=tuple(_each(entry, "device_memory", parse_size, "a size with a unit, as in 22GB"))
        if entry
        else (),
        hardware=tuple(_each(entry, "hardware", _as_name, "the name of a device, as in h100-sxm")) if entry else (),
    )


Read = TypeVar("Read")


def _each(meta: Entry | None, key: str, read: Callable[[object], Read | None], expected: str) -> Iterator[Read]:
    """Yields the items of an entry of `meta`: of a list, or the one value."""
    entries = string_entries(meta.value) if meta else ()
    entry = next((entry for entry in entries if entry.key == key), None)
    if entry is None or is_null(entry.value):
        return
    for node in entry.value.items if isinstance(entry.value, Sequence) else (entry.value,):
        value = read(node.value) if isinstance(node, Scalar) else None
        if value is None:
            found = repr(node.value)[:80] if isinstance(node, Scalar) else describe(node)
            raise ProjectError(
                f"{key!r} of target 'meta' is {found}, and must be {expected}",
                code="FG948",
                span=entry.span,
                path=f"meta.{key}",
                hint=f"write {expected}, or a list with one for each pipeline rank",
            )
        yield value


def _as_name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def known_processes(graph: Graph) -> int | None:
    """Returns the number of processes on one machine if the config contains the number, else None.

    A wrong number gives None, too; `run_meta` reports it.
    """
    try:
        processes = run_meta(graph).nproc_per_node
    except ProjectError:
        return None
    return processes if isinstance(processes, int) else None


def _output_dir(meta: Node) -> str | None:
    for entry in string_entries(meta):
        node = entry.value
        if entry.key != "output_dir" or (isinstance(node, Scalar) and node.value is None):
            continue
        if isinstance(node, Scalar) and isinstance(node.value, str) and node.value:
            return node.value
        found = repr(node.value) if isinstance(node, Scalar) else describe(node)
        raise ProjectError(
            f"'output_dir' of target 'meta' is {found}, and must be a folder",
            code="FG411",
            span=entry.span,
            path="meta.output_dir",
            hint="write output_dir: ./output_models/name",
        )
    return None


MOST_PROCESSES = 1024
"""The maximum number of processes on one machine. A larger number is a typing error, and would exhaust the machine."""


def _processes(meta: Node) -> int | str:
    for entry in string_entries(meta):
        node = entry.value
        if entry.key != "nproc_per_node" or (isinstance(node, Scalar) and node.value is None):
            continue
        value = node.value if isinstance(node, Scalar) else None
        if value in ("auto", "gpu") or (
            isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_PROCESSES
        ):
            return value
        found = repr(value)[:80] if isinstance(node, Scalar) else describe(node)
        raise ProjectError(
            f"'nproc_per_node' of target 'meta' is {found}, and must be a number of processes",
            code="FG828",
            span=entry.span,
            path="meta.nproc_per_node",
            hint='write a whole number from 1, "gpu" for one on each GPU, or "auto" for what the sizes ask for'
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
            else f"one machine may have {MOST_PROCESSES}",
        )
    return 1


def trainer_output_dir(graph: Graph) -> str | None:
    """Returns `output_dir` in the arguments of `main`; None if the folder is missing or known only after construction.

    A trainer saves to this folder whatever `meta` contains, so a `--set` of `output_dir` also moves the run's folder.
    """
    arguments = trainer_arguments(graph)
    folder = arguments.plain("output_dir") if arguments else None
    return folder if isinstance(folder, str) and folder else None


def target_facts(graph: Graph) -> list[TargetFacts]:
    """Returns the facts of each target, in the order of the config."""
    return [
        TargetFacts(name=name, kind=word_of(entry.value), summary=_summary(entry.value), span=entry.span)
        for name, entry in graph.targets.items()
    ]


def _summary(node: Node) -> str:
    if isinstance(node, Call):
        return node.constructor
    if isinstance(node, Scalar):
        return repr(node.value)[:80]
    if isinstance(node, Lookup):
        return node.text
    # A container is summarized by its size: its text could be of any length.
    count = len(list(children(node)))
    return f"{count} item{'' if count == 1 else 's'}"


def _one_line(value: object) -> str:
    return "" if value is None else " ".join(str(value).split())
