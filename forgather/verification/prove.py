"""Does generated code build what its config builds?

Takes a graph and a generated module, gives a count of equal calls. Keeps true: both run on stand-ins, so nothing that
the config names is imported or called; they run bare and with every variable given, in an environment of their own.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from forgather.config.calc import names_in, parse_calc
from forgather.config.graph import Calc, Call, Env, Graph, Var
from forgather.config.materialize import materialize
from forgather.config.traverse import all_nodes
from forgather.errors import ForgatherError, GraphError
from forgather.verification.backends import Barred, RecordingResolver, grows, is_inner, module_globals
from forgather.verification.comparison import Comparison, Unequal
from forgather.verification.recording import Log


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to run both sides.

    Args:
        given: True where every variable gets a value, False where only those do that need one.
        truth: how comparisons of results come out.
    """

    given: bool
    truth: bool


def prove(
    graph: Graph,
    text: str,
    targets: Sequence[str],
    parameters: Mapping[str, str],
    *,
    project_dir: str = ".",
    file: str = "<generated>",
) -> int:
    """Returns how many calls a generated module makes, all of them as its config makes them.

    Args:
        graph: what the module was made from.
        text: the module.
        targets: what its `build` returns.
        parameters: the parameter of `build` for each variable.
        project_dir: folder that file imports are relative to.
        file: where the module lies, or would lie.

    Raises:
        GraphError: FG333 with the first difference; FG334 where the config itself cannot be built.
    """
    code = _compiled(text)
    _stay_inside(graph, text)
    names = [word for node in _calcs(graph) for word in names_in(parse_calc(node.expression))]
    scenarios = [Scenario(given=False, truth=True)]
    if parameters or any(isinstance(node, Env) for node in _nodes(graph)):
        scenarios.append(Scenario(given=True, truth=True))
    if names:
        scenarios += [Scenario(scenario.given, truth=False) for scenario in scenarios]
    counts = []
    for scenario in scenarios:
        ours, theirs = Log(scenario.truth), Log(scenario.truth)
        variables = _variables(graph, parameters, scenario)
        with _environment(graph, given=scenario.given):
            expected = _construct(graph, targets, variables, RecordingResolver(project_dir, ours), ours)
            counts.append(ours.count())

            def build(log: Log = theirs, chosen: list[str] = variables) -> dict[str, Any]:
                world = module_globals(log, file)
                exec(code, world)
                given = {parameters[word]: _value(graph, word, log) for word in chosen}
                built = world["build"](**given)
                return {targets[0]: built} if len(targets) == 1 else built

            _compare(ours, theirs, expected, build)
    return counts[0]


def _stay_inside(graph: Graph, text: str) -> None:
    """Refuses what would reach past the stand-ins, before any of it runs.

    Raises:
        GraphError: FG334, a name of Python's own is asked for.
    """
    for node in _nodes(graph):
        if isinstance(node, Call) and grows(node.constructor):
            message = f"the code cannot be proven: {node.constructor!r} can make a value of any size"
            hint = "without --verify, 'fgcli code' writes the code"
            raise GraphError(message, code="FG334", span=node.span, hint=hint)
    paths = ((node.constructor, part) for node in _nodes(graph) if isinstance(node, Call) for part in _parts(node))
    found = next((f"!call:{whole}" for whole, part in paths if is_inner(part)), None)
    for node in ast.walk(ast.parse(text)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom):
            names = [word for alias in node.names for word in (alias.name, alias.asname or "")]
        found = found or next((f"{name!r}" for name in names if is_inner(name)), None)
    if found is not None:
        message = f"the code cannot be proven: {found} leads out of the stand-ins, to what they are made of"
        raise GraphError(message, code="FG334", hint="without --verify, 'fgcli code' writes the code")


def _parts(node: Call) -> list[str]:
    return node.constructor.rpartition(":")[2].split(".")


def _compiled(text: str) -> Any:
    try:
        return compile(text, "<generated>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise GraphError(f"the generated code cannot be read: {error}", code="FG333") from None


def _construct(
    graph: Graph, targets: Sequence[str], chosen: list[str], resolver: RecordingResolver, log: Log
) -> dict[str, Any]:
    given = {word: _value(graph, word, log) for word in chosen}
    try:
        return materialize(graph, targets=targets, variables=given, project_dir=resolver.project_dir, resolver=resolver)
    except ForgatherError:
        raise
    except Barred as error:
        message = f"the code cannot be proven: {error}"
        raise GraphError(message, code="FG334", hint="without --verify, 'fgcli code' writes the code") from None
    except Exception as error:  # noqa: BLE001 - what a builtin raises for the config's arguments
        message = f"the config cannot be built: {type(error).__name__}: {error}"
        raise GraphError(message, code="FG334", hint="'fgcli construct' shows the error with its place") from None


def _compare(ours: Log, theirs: Log, expected: dict[str, Any], build: Callable[[], dict[str, Any]]) -> None:
    try:
        Comparison(ours, theirs).values(expected, build())
    except Unequal as difference:
        message = (
            f"the code does not build what the config builds: at {difference.path}, "
            f"expected {difference.expected}, found {difference.found}"
        )
        raise GraphError(message, code="FG333", path=difference.path, expected=difference.expected,
                         found=difference.found) from None  # fmt: skip
    except Exception as error:  # noqa: BLE001 - whatever running generated code on stand-ins raises
        raise GraphError(f"the generated code fails: {type(error).__name__}: {error}", code="FG333") from None


# what the graph asks for


def _nodes(graph: Graph) -> Iterator[Any]:
    return (node for _, node in all_nodes(graph))


def _calcs(graph: Graph) -> list[Calc]:
    return [node for node in _nodes(graph) if isinstance(node, Calc)]


def _value(graph: Graph, variable: str, log: Log) -> Any:
    """Returns the value of a variable: a stand-in, or a mapping with one where the variable holds keywords."""
    value = log.record(f"the variable {variable}")
    holders = (node.spread for node in _nodes(graph) if isinstance(node, Call))
    holds_keywords = any(isinstance(node, Var) and node.variable == variable for node in holders)
    return {"of_the_variable": value} if holds_keywords else value


def _variables(graph: Graph, parameters: Mapping[str, str], scenario: Scenario) -> list[str]:
    if scenario.given:
        return list(parameters)
    bare = {node.variable for node in _nodes(graph) if isinstance(node, Var) and node.default is None}
    read = {word for node in _calcs(graph) for word in names_in(parse_calc(node.expression))} - set(graph.targets)
    return [word for word in parameters if word in bare | read]


@contextmanager
def _environment(graph: Graph, *, given: bool) -> Iterator[None]:
    """Sets the variables that `!env` reads: all of them, or those alone that have no default."""
    nodes = [node for node in _nodes(graph) if isinstance(node, Env)]
    before = {node.variable: os.environ.get(node.variable) for node in nodes}
    try:
        for node in nodes:
            os.environ.pop(node.variable, None)
        for node in nodes:
            if given or node.default is None:
                os.environ[node.variable] = f"value of {node.variable}"
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
