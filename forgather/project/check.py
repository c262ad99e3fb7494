"""The check of a config: all findings that are possible without importing the objects that the config names.

The input is a project and a reader of signatures; the output is all findings, errors first, each with its location.
Nothing that the config names is constructed or imported. An error in rendering or loading the config is a finding, too.
Calls and settings that could not be checked are listed with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from forgather.config.graph import Calc, Call, CallKind, Graph, Scalar, Var
from forgather.config.insight.path_lookup import read_path, steps_along
from forgather.config.lint.call_check import Unchecked, check_calls
from forgather.config.path import GraphPath, Key, format_path
from forgather.config.remote import remote_code_findings
from forgather.config.traverse import all_nodes, walk
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.project.checks.adapted_modules import check_adapted_modules
from forgather.project.checks.argument_rules import check_arguments
from forgather.project.checks.chosen_keywords import check_chosen_keywords
from forgather.project.checks.cross_project import check_other_projects
from forgather.project.checks.divided_rows import check_divided_rows
from forgather.project.checks.import_check import check_imports
from forgather.project.checks.initial_weights import check_initial_weights
from forgather.project.checks.lightning_words import check_lightning_words
from forgather.project.checks.missing_packages import check_missing_packages, without_repeats
from forgather.project.checks.output_folders import check_output_folder
from forgather.project.checks.packed_rows import check_packed_rows
from forgather.project.checks.quantized_model import check_quantized_model
from forgather.project.checks.root_settings import check_missing_run, check_root_settings
from forgather.project.checks.run_requirements import check_run_requirements
from forgather.project.checks.setting_rules import check_settings
from forgather.project.checks.stream_shards import check_stream_shards
from forgather.project.checks.streamed_rows import check_streamed_rows
from forgather.project.checks.subject import Subject
from forgather.project.checks.template_notes import check_template_notes
from forgather.project.checks.trainer_hooks import check_trainer_hooks
from forgather.project.checks.trusted_calls import check_trusted_calls
from forgather.project.checks.unused_blocks import check_unused_blocks
from forgather.project.dynamic_args import FAULTS, read_options
from forgather.project.fault_tolerance import fault_tolerance
from forgather.project.locations import library_dir
from forgather.project.project import Project
from forgather.project.reader import reader_for
from forgather.project.rendered_variable import RENDERED
from forgather.project.targets import known_processes, run_meta

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader

GIVEN_BY_A_RUN = frozenset({"run_dir", RENDERED})
"""The construction variables that `fgcli train` sets."""
UNDEFINED_NAME = "FG232"
"""The error code of a calculation that reads an undefined name."""
NO_EFFECT = "FG233"
"""The error code of an override that changes nothing."""
SUSPICIOUS_SCALAR = "FG222"
"""The error code of a string that looks like a number, a boolean or null."""
# The constructed objects report these again, so that a run need not print the findings twice.
_REPORTED_BY_THE_RUN = frozenset({"FG733", "FG796", "FG825", "FG440", "FG848"})
_MISSING_FILE = "FG456"
_DATA_SOURCES = "forgather.ml.data:"
CHECKS: tuple[Callable[[Subject], Iterable[Diagnostic]], ...] = (
    check_arguments,
    check_chosen_keywords,
    check_run_requirements,
    check_missing_packages,
    check_trusted_calls,
    check_packed_rows,
    check_divided_rows,
    check_streamed_rows,
    check_stream_shards,
    check_initial_weights,
    check_quantized_model,
    check_adapted_modules,
    check_lightning_words,
    check_output_folder,
    check_imports,
    check_trainer_hooks,
    check_template_notes,
    check_unused_blocks,
)
"""The checks other than those of calls, settings and other projects; each new check gets an entry here."""
_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2, Severity.LINT: 3}


class CheckResult(NamedTuple):
    """The result of the check.

    Args:
        findings: all findings without duplicates, errors first.
        unchecked: the calls and settings that could not be checked, with the reason.
    """

    findings: tuple[Diagnostic, ...]
    unchecked: tuple[Unchecked, ...] = ()

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """The findings with the severity "error"."""
        return tuple(found for found in self.findings if found.severity is Severity.ERROR)


def check_project(
    project: Project,
    reader: Reader | None = None,
    *,
    for_run: bool = False,
    reserved: frozenset[str] = frozenset(),
) -> CheckResult:
    """Returns all findings about a config.

    Args:
        project: the config, with its options and overrides.
        reader: the reader of signatures; None to create one for the project.
        for_run: whether the target `main` is about to be run. In this case, a variable without a value is an error, and
            the number of processes is not checked, because the launcher checks it.
        reserved: the names of the command line's own options, which a config cannot declare.
    """
    try:
        found = [*project.diagnostics]
    except ForgatherError as error:
        return CheckResult(_ordered([*_all_findings(error), *_known_before(project)]))
    graph = project.graph
    reader = reader or reader_for(project.meta)
    judgement = check_calls(graph, reader)
    started = None if for_run else known_processes(graph)
    settings, undecided, words = check_settings(graph, judgement, reader, project.precedence, processes=started)
    elsewhere, unread = check_other_projects(graph, project)
    found = [one for one in _without_accepted_texts(found, (*judgement.texts, *words)) if not _repeats_the_library(one)]
    if for_run:
        found = _with_undefined_as_errors(found, graph)
    # A value of another type is out of range, too; one of the two findings is enough.
    mistyped = {one.path for one in judgement.findings if one.code == "FG242"}
    settings = [one for one in settings if one.path not in mistyped]
    found += (*judgement.findings, *settings, *elsewhere, *_unbound(graph, for_run=for_run))
    subject = Subject(project, graph, judgement.calls, reader)
    for check in CHECKS:
        found += check(subject)
    found = without_repeats(found)
    found += (*remote_code_findings(graph), *_meta_findings(graph))
    known = {one.span for one in found}
    # A call's own finding at that place says more than a finding about the root setting.
    found += [one for one in check_root_settings(graph, judgement.calls) if one.span not in known]
    found += check_missing_run(graph, for_run=for_run)
    # `Project.diagnostics` does not know the option names that the command line reserves.
    found = [one for one in found if one.code not in FAULTS]
    found += _malformed_options(graph, reserved, Severity.WARNING if for_run else Severity.ERROR)
    context = project.lineage
    writers = project.writers
    # A finding belongs to the line where the user wrote the value, not to the template of the library that prints it.
    placed = [writers.relocated(one if one.context else replace(one, context=context)) for one in found]
    return CheckResult(_ordered(placed), (*judgement.unchecked, *undecided, *unread))


def _without_accepted_texts(found: Iterable[Diagnostic], texts: Iterable[Scalar]) -> list[Diagnostic]:
    """Returns the findings without those about strings that a parameter accepts, as in `eval_strategy: no`."""
    meant = {(text.span.file, text.span.line, repr(text.value)) for text in texts if text.span is not None}
    return [one for one in found if one.code != SUSPICIOUS_SCALAR or _written_at(one) not in meant]


def _repeats_the_library(found: Diagnostic) -> bool:
    """Returns whether a finding says that a line has no effect because it repeats a line of the template library.

    Such a line is not a mistake: it keeps its value if another release of the library has a different one.
    """
    return found.code == NO_EFFECT and f" at {library_dir()}{os.sep}" in found.message


def _written_at(found: Diagnostic) -> tuple[str, int, str] | None:
    text = found.message.partition(" is a string here")[0]
    return (found.span.file, found.span.line, text) if found.span else None


def _known_before(project: Project) -> list[Diagnostic]:
    """Returns the findings of the stages that succeeded before another stage failed."""
    known = [*project.meta.diagnostics]
    # `rendered` and `declared_graph` are cached properties: their values are here only if the stage succeeded.
    if "rendered" in project.__dict__:
        known += project.rendered.diagnostics
    if "declared_graph" in project.__dict__:
        known += project.declared_graph.diagnostics
    return known


def _all_findings(error: ForgatherError) -> Iterator[Diagnostic]:
    yield error.diagnostic
    yield from error.others


def _ordered(findings: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    # Reversed, so that the first of several equal findings remains.
    first = {(found.code, found.message, found.span): found for found in reversed(list(findings))}
    return tuple(sorted(first.values(), key=_rank))


def _rank(found: Diagnostic) -> tuple[int, str, int, int, str, str]:
    span = found.span
    place = (span.file, span.line, span.column) if span else ("", 0, 0)
    return (_ORDER[found.severity], *place, found.code, found.message)


def _malformed_options(graph: Graph, reserved: frozenset[str], severity: Severity) -> Iterator[Diagnostic]:
    for fault in read_options(graph, reserved=reserved).faults:
        yield replace(fault.error.diagnostic, severity=severity)


def _meta_findings(graph: Graph) -> Iterator[Diagnostic]:
    try:
        run_meta(graph)
        fault_tolerance(graph)
    except ForgatherError as error:
        yield from _all_findings(error)


def _with_undefined_as_errors(found: Iterable[Diagnostic], graph: Graph) -> list[Diagnostic]:
    """Returns the findings; an undefined name that `main` needs becomes an error, because no run defines the name."""
    main = graph.targets.get("main")
    needed = [] if main is None else walk([((Key("main"),), main.value)], unbuilt=False)
    places = {node.span for _, node in needed if isinstance(node, Calc) and node.span is not None}
    return [
        replace(one, severity=Severity.ERROR, hint="write a number, or the name of a target")
        if one.code == UNDEFINED_NAME
        and one.span in places
        and not any(repr(name) in one.message for name in GIVEN_BY_A_RUN)
        else one
        for one in found
    ]


def _unbound(graph: Graph, *, for_run: bool) -> Iterator[Diagnostic]:
    main = graph.targets.get("main")
    needed: set[int] = set()
    if for_run and main is not None:
        needed = {id(node) for _, node in walk([((Key("main"),), main.value)], unbuilt=False)}
    for path, node in all_nodes(graph):
        if isinstance(node, Var) and node.default is None and node.variable not in GIVEN_BY_A_RUN:
            yield _unbound_var(path, node, is_needed=id(node) in needed)


def _unbound_var(path: GraphPath, node: Var, *, is_needed: bool) -> Diagnostic:
    return Diagnostic(
        code="FG244",
        message=f"!var {node.variable!r} has no default, and " + ("nothing gives it a value" if is_needed else
                "needs a value whenever this is built"),
        severity=Severity.ERROR if is_needed else Severity.WARNING,
        span=node.span,
        path=format_path(path),
        hint=f"give it a default: !var {{name: {node.variable}, default: ...}}",
    )  # fmt: skip


def is_reported_by_run(found: Diagnostic, graph: Graph, *, is_run: bool = True) -> bool:
    """Returns whether the run of a config reports a finding itself.

    Args:
        found: a finding of `check_project`.
        graph: the graph of the config.
        is_run: whether `main` is run after the check; if not, only the check reports a missing data file.
    """
    if found.code != _MISSING_FILE or found.path is None:
        return found.code in _REPORTED_BY_THE_RUN
    if not is_run:
        return False
    # Other libraries than our data sources may report a missing path in words that do not name it.
    calls = [stop.node for stop in steps_along(graph, read_path(found.path)) if isinstance(stop.node, Call)]
    return bool(calls) and calls[-1].constructor.startswith(_DATA_SOURCES) and calls[-1].kind is not CallKind.PARTIAL
