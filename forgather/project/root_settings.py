"""Settings of the trainer that stand at the root of a config, where nothing reads them.

Takes a graph and its calls, gives findings. Keeps true: a root key that an alias or a calculation uses is no finding,
and neither is one of a config without trainer arguments, in which targets of any name are the user's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from forgather.aliases import alias_of
from forgather.config.calc import names_in, parse_calc
from forgather.config.constructors import Called
from forgather.config.events import Refusal
from forgather.config.graph import Calc, Entry, Graph, Scalar
from forgather.config.path import Key
from forgather.config.traverse import roots, walk
from forgather.errors import Diagnostic, Severity, closest
from forgather.project.settings import rules_about
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments

_OWN = frozenset({"main", "meta", "dynamic_args"})
_A_SLIP = 0.85


def judge_roots(graph: Graph, calls: Mapping[int, Called]) -> Iterator[Diagnostic]:
    """Yields a warning for each root key that is meant as a setting of the trainer, or as another target."""
    arguments = trainer_arguments(graph)
    called = calls.get(id(arguments.call)) if arguments else None
    if arguments is None or called is None or called.callee is None:
        return
    settings = {name for signature in called.callee.signatures for name in signature.parameters} - {"settings"}
    for rules in rules_about(called):
        settings |= {*rules.settings, *rules.renamed, *rules.without_effect}
    for name, entry in graph.targets.items():
        if name in _OWN or not isinstance(entry.value, Scalar) or _is_read(name, entry, graph):
            continue
        hint = _hint(name, arguments, settings, graph)
        if hint is not None:
            yield Diagnostic(
                code="FG250",
                message=f"{name!r} stands at the root: it is a target that nothing reads, and changes no setting",
                severity=Severity.WARNING,
                span=entry.span,
                hint=hint,
            )


def _hint(name: str, arguments: TrainerArguments, settings: set[str], graph: Graph) -> str | None:
    block = arguments.path(name).lstrip("+").partition(".")[0]
    if name in settings:
        return f"put it into the block [{block}], indented as the settings there are"
    alias = alias_of("setting", name)
    if alias is not None:
        return f"in the block [{block}]: {alias.hint}" if alias.name in settings else alias.hint
    near = closest(name, [other for other in graph.targets if other != name], cutoff=_A_SLIP)
    return f"did you mean {near!r}?" if near else None


def _is_read(name: str, entry: Entry, graph: Graph) -> bool:
    others = [((Key(key),), other.value) for key, other in graph.targets.items() if key != name]
    for _, node in walk([*others, *(item for item in roots(graph) if item[1] is not entry.value)]):
        if node is entry.value or (isinstance(node, Calc) and name in _names(node)):
            return True
    return False


def _names(node: Calc) -> set[str]:
    try:
        return set(names_in(parse_calc(node.expression)))
    except Refusal:
        # It is refused where it stands.
        return set()
