"""Proves that a generated module makes the same calls as its config.

The input is a graph and a generated module; the output is the number of calls, or an error that describes the first
difference. The config and the module are both run on stand-ins, so that nothing that the config names is imported or
called. They are run once without values for the variables and once with a value for each variable, in a private
environment. The same name refers to equal stand-ins in both runs. The few real objects (builtins without side effects,
`functools.partial`, the built-in functions of the config language) are the same in both.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import importlib.machinery
import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from forgather.config.builtin_names import SHORT
from forgather.config.calc import names_in, parse_calc
from forgather.config.graph import Calc, Call, Env, Graph, Var
from forgather.config.materialize import materialize
from forgather.config.resolve import Resolver
from forgather.config.traverse import all_nodes
from forgather.errors import ForgatherError, GraphError
from forgather.verification.recording import Comparison, Log, Recorded, StandIn, Unequal


@dataclass(frozen=True, slots=True)
class Scenario:
    """The conditions under which the config and the generated code are run.

    Args:
        given: whether every variable gets a value; if False, only the variables without default get one.
        truth: the result of every comparison of stand-ins.
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
    """Returns the number of calls that a generated module makes, if they are the same as those of its config.

    Args:
        graph: the graph that the module was generated from.
        text: the source of the module.
        targets: the names of the targets that the module's `build` returns.
        parameters: the name of the parameter of `build` for each variable.
        project_dir: the folder that file imports are relative to.
        file: the path of the module; the file need not exist.

    Raises:
        GraphError: FG333 at the first difference between the module and the config; FG334 if the config itself cannot
            be built, or cannot be run on stand-ins.
    """
    code = _compiled(text)
    _refuse_escapes(graph, text)
    names = [word for node in _calcs(graph) for word in names_in(parse_calc(node.expression))]
    scenarios = [Scenario(given=False, truth=True)]
    if parameters or any(isinstance(node, Env) for node in _nodes(graph)):
        scenarios.append(Scenario(given=True, truth=True))
    # Comparisons and branches of `!calc` have to be compared for both outcomes.
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


def _refuse_escapes(graph: Graph, text: str) -> None:
    """Raises an error if the graph or the code could access the implementation of the stand-ins.

    Neither of them has run at this point.

    Raises:
        GraphError: FG334 if one of them uses a special name of Python, or a method that can create a value of any size.
    """
    for node in _nodes(graph):
        if isinstance(node, Call) and grows(node.constructor):
            message = f"the code cannot be proven: {node.constructor!r} can make a value of any size"
            hint = "without --verify, 'fgcli code' writes the code"
            raise GraphError(message, code="FG334", span=node.span, hint=hint)
    paths = (
        (node.constructor, part) for node in _nodes(graph) if isinstance(node, Call) for part in _symbol_parts(node)
    )
    found = next((f"!call:{whole}" for whole, part in paths if is_inner(part)), None)
    for node in ast.walk(ast.parse(text)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        if isinstance(node, ast.ImportFrom):
            names = [word for alias in node.names for word in (alias.name, alias.asname or "")]
        found = found or next((f"{name!r}" for name in names if is_inner(name)), None)
    if found is not None:
        message = f"the code cannot be proven: {found} leads out of the stand-ins, to their implementation"
        raise GraphError(message, code="FG334", hint="without --verify, 'fgcli code' writes the code")


def _symbol_parts(node: Call) -> list[str]:
    return node.constructor.rpartition(":")[2].split(".")


def _compiled(text: str) -> Any:
    try:
        # Without `dont_inherit`, the `__future__` import of this module would apply to the generated code.
        return compile(text, "<generated>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise GraphError(f"the generated code cannot be compiled: {error}", code="FG333") from None


def _construct(
    graph: Graph, targets: Sequence[str], chosen: list[str], resolver: RecordingResolver, log: Log
) -> dict[str, Any]:
    given = {word: _value(graph, word, log) for word in chosen}
    try:
        return materialize(graph, targets=targets, variables=given, project_dir=resolver.project_dir, resolver=resolver)
    except ForgatherError:
        raise
    except ForbiddenAccess as error:
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


# the variables and nodes of the graph


def _nodes(graph: Graph) -> Iterator[Any]:
    return (node for _, node in all_nodes(graph))


def _calcs(graph: Graph) -> list[Calc]:
    return [node for node in _nodes(graph) if isinstance(node, Calc)]


def _value(graph: Graph, variable: str, log: Log) -> Any:
    """Returns a stand-in as the value of a variable, or a mapping if the variable is unpacked into keywords."""
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
    """Context manager that sets the environment variables which `!env` reads, and restores them afterwards.

    It sets all of them if `given` is True, else only those without default; the others are removed.
    """
    # With values of this machine the proof would depend on it.
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


# Builtins without side effects, which are not replaced by stand-ins.
PURE = frozenset(
    ("abs", "bool", "callable", "dict", "float", "frozenset", "getattr", "int", "isinstance", "len", "list", "max",
     "min", "object", "round", "set", "str", "tuple", "NameError", "KeyError", "TypeError", "ValueError")
)  # fmt: skip
# The parts of the standard library that generated code uses itself: only values and path functions.
_PATHS = SimpleNamespace(
    **{
        word: getattr(os.path, word)
        for word in ("abspath", "dirname", "expanduser", "join", "normpath", "realpath", "split")
    }
)
_HELPERS: Mapping[str, Any] = {
    "hashlib": SimpleNamespace(sha256=hashlib.sha256),
    "math": SimpleNamespace(inf=math.inf, nan=math.nan),
}
_REAL: Mapping[str, Any] = {f"functools.{word}": getattr(functools, word) for word in ("cache", "partial", "wraps")}


class ForbiddenAccess(Exception):
    """Raised for code that would access the implementation of a stand-in, or create a value of any size."""


def is_inner(name: str) -> bool:
    """Returns whether a name is a special name of Python, such as `__class__`."""
    return name.startswith("__") and name.endswith("__")


# Methods whose result can have any size, because an argument gives the size or they grow their object.
_GROWING = frozenset(
    ("center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "translate", "format", "format_map",
     "to_bytes", "extend")
)  # fmt: skip
_MAX_DIGITS = 1000


def grows(constructor: str) -> bool:
    """Returns whether a constructor is a method of a builtin that can create a value of any size."""
    source, _, symbol = constructor.rpartition(":")
    first, _, rest = symbol.partition(".")
    return source in ("", "builtins") and first in PURE and not _GROWING.isdisjoint(rest.split("."))


def _rounded(number: Any, digits: Any = None) -> Any:
    """The replacement of `round` in both runs, which refuses to compute very many digits."""
    if isinstance(digits, int) and abs(digits) > _MAX_DIGITS:
        raise ForbiddenAccess(f"round(..., {digits}) computes a number of that many digits")
    return round(number, digits)


def _guarded(thing: Any, name: str, *default: Any) -> Any:
    """The replacement of `getattr` in both runs: it refuses special and private names, and methods in `_GROWING`."""
    if isinstance(name, str) and (is_inner(name) or (name[:1] == "_" and not isinstance(thing, (Recorded, StandIn)))):
        raise ForbiddenAccess(f"getattr(..., {name!r}) leads out of the stand-ins")
    if name in _GROWING and not isinstance(thing, (Recorded, StandIn)):
        raise ForbiddenAccess(f"{name!r} of {type(thing).__name__} can make a value of any size")
    return getattr(thing, name, *default)


class RecordingResolver(Resolver):
    """Resolves constructors to stand-ins.

    Args:
        project_dir: the folder that file imports are relative to.
        log: the log of the calls.
    """

    def __init__(self, project_dir: str, log: Log) -> None:
        super().__init__(project_dir)
        self._log = log

    def resolve(self, constructor: str, searchpath: Sequence[str] = ()) -> Any:
        """Returns a stand-in, or the real object if both runs use the real object.

        Args:
            constructor: the constructor as the config writes it.
            searchpath: the `submodule_searchpath` of the call.
        """
        source, colon, symbol = constructor.rpartition(":")
        if not colon and constructor in SHORT:
            return SHORT[constructor]
        if not colon or source == "builtins":
            return _builtin(self._log, symbol)
        folders = [self._absolute(folder) for folder in searchpath]
        if source.endswith(".py") or "/" in source:
            folder, file = os.path.split(self._absolute(source))
            return StandIn(self._log, f"{_places([folder, *folders])}.{file.removesuffix('.py')}.{symbol}")
        if source.startswith("."):
            return StandIn(self._log, f"{_places(folders)}{source}.{symbol}")
        dotted = f"{source}.{symbol}"
        return _REAL[dotted] if dotted in _REAL else StandIn(self._log, dotted)


def _places(folders: Iterable[str]) -> str:
    return repr([os.path.realpath(folder) for folder in dict.fromkeys(folders)])


def _builtin(log: Log, symbol: str) -> Any:
    first, *rest = symbol.split(".")
    found: Any
    if first in ("getattr", "round"):
        found = _guarded if first == "getattr" else _rounded
    else:
        found = getattr(builtins, first) if first in PURE else StandIn(log, f"builtins.{first}")
    return functools.reduce(_guarded, rest, found)


def module_globals(log: Log, file: str) -> dict[str, Any]:
    """Returns the globals of a generated module, with stand-ins for imports and builtins.

    Args:
        log: the log of the calls.
        file: the value of `__file__` in the module.
    """
    packages: dict[str, Any] = {}

    def import_module(name: str) -> Any:
        package, _, rest = name.partition(".")
        if package in packages:
            return StandIn(log, f"{list(packages[package].__path__)!r}.{rest}")
        return StandIn(log, name)

    parts = SimpleNamespace(
        import_module=import_module,
        machinery=SimpleNamespace(ModuleSpec=importlib.machinery.ModuleSpec),
        util=SimpleNamespace(module_from_spec=importlib.util.module_from_spec),
    )
    # Read here and not at import: the caller may have replaced `os.environ`.
    system = SimpleNamespace(environ=os.environ, path=_PATHS, PathLike=os.PathLike)
    helpers = {**_HELPERS, "os": system, "sys": SimpleNamespace(modules=packages, path=[]), "importlib": parts}

    def import_hook(name: str, _: Any = None, __: Any = None, names: Sequence[str] = (), *___: Any) -> Any:
        # Generated code uses `import module` for its own needs, and `from module import name` for the config's names.
        if not names:
            return helpers[name.partition(".")[0]]
        return StandIn(log, name, _REAL)

    words = [word for word in dir(builtins) if not word.startswith("_")]
    inner = {word: _builtin(log, word) for word in words} | {"__import__": import_hook}
    return {"__name__": "generated", "__file__": file, "__builtins__": inner}
