"""The parameters of the generated function: one for each variable of the config.

The input is the graph and the nodes that the requested targets need; the output is the parameter of each variable. If
all uses of a variable have the same plain default, the parameter has this default. If the defaults of the uses differ,
or a default has to be built, the default of the parameter is `UNSET`, and each use evaluates its own default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forgather.codegen.python.names import Names
from forgather.codegen.python.reachability import Reach, calc_names
from forgather.config.graph import Calc, Graph, Scalar, Var
from forgather.config.path import PlainScalar

_LONGEST = 60


@dataclass(frozen=True, slots=True)
class Parameter:
    """A keyword-only parameter.

    Args:
        name: the name of the parameter.
        required: whether the parameter has no default.
        unset: whether the default of the parameter is `UNSET`.
        default: the plain default of the parameter; not used if the parameter is required or unset.
    """

    name: str
    required: bool = False
    unset: bool = False
    default: PlainScalar = None

    def text(self, literal: Callable[[PlainScalar], str]) -> str:
        """Returns the text of the parameter in the signature; `literal` returns the text of a plain value."""
        if self.required:
            return self.name
        return f"{self.name}={'UNSET' if self.unset else literal(self.default)}"


def parameters_of(graph: Graph, targets: list[str], reach: Reach, names: Names) -> dict[str, Parameter]:
    """Returns the parameter of each variable, in the order of the first uses of the variables.

    Args:
        graph: the whole graph.
        targets: the names of the targets.
        reach: the part of the graph that the targets need.
        names: the names that are already used in the module.
    """
    certain = reach.certain(targets)
    forms: dict[str, set[str]] = {}
    defaults: dict[str, PlainScalar] = {}
    must: set[str] = set()
    for _, node in reach.nodes:
        if isinstance(node, Var):
            form = "required" if node.default is None else "built"
            if isinstance(node.default, Scalar) and _is_short(node.default.value):
                form, defaults[node.variable] = f"plain {node.default.value!r}", node.default.value
            forms.setdefault(node.variable, set()).add(form)
            # A variable without default that is not always built may stay unset.
            if form == "required" and id(node) in certain:
                must.add(node.variable)
    declared = set(forms)
    for _, node in reach.nodes:
        for word in calc_names(node) if isinstance(node, Calc) else ():
            # A variable of the same name as a target replaces the target in a `!calc`.
            if word in graph.targets and word in declared:
                forms[word].add("target")
            elif word not in graph.targets:
                forms.setdefault(word, set()).add("required")
    return {variable: _parameter(variable, forms[variable], must, defaults, names) for variable in forms}


def _parameter(
    variable: str, forms: set[str], must: set[str], defaults: dict[str, PlainScalar], names: Names
) -> Parameter:
    word = names.free(variable)
    if variable in must:
        return Parameter(word, required=True)
    if len(forms) == 1 and next(iter(forms)).startswith("plain"):
        return Parameter(word, default=defaults[variable])
    return Parameter(word, unset=True)


def _is_short(value: PlainScalar) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST
    return not isinstance(value, int) or value.bit_length() <= 200
