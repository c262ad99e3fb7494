"""Graph to Python source.

Takes a graph and target names, gives a module that builds the same objects by plain calls. Keeps true: the module
needs no part of the config layer; it makes the calls of `config.materialize` in its order, shares what that shares,
and is laid out as `ruff format` would do it.
"""

from __future__ import annotations

from collections.abc import Sequence as Names
from dataclasses import dataclass

from forgather.codegen.python import names as naming
from forgather.codegen.python.body import Body
from forgather.codegen.python.imports import OWN_NAMES, Imports
from forgather.codegen.python.module import Setting, ending, module_text, returned, signature
from forgather.codegen.python.parameters import parameters_of
from forgather.codegen.python.passes import names_read, without_unused
from forgather.codegen.python.reach import Reach
from forgather.codegen.python.text import bracketed
from forgather.config.graph import Call, Graph
from forgather.config.path import Key

__all__ = ["PythonCode", "Setting", "emit_python"]


@dataclass(frozen=True, slots=True)
class PythonCode:
    """A generated module.

    Args:
        text: its source.
        targets: what its function `build` returns: the object of one, a dict of several.
        parameters: the parameter of `build` for each variable of the config.
        imports: what of the config it imports: "module:symbol", and files.
    """

    text: str
    targets: tuple[str, ...]
    parameters: dict[str, str]
    imports: tuple[str, ...]


def emit_python(graph: Graph, targets: Names[str] = ("main",), setting: Setting | None = None) -> PythonCode:
    """Returns a module whose `build()` gives what constructing the targets gives.

    Raises:
        UnknownTargetError: a target that the graph does not have.
        GraphError: something that Python without the config layer cannot say (FG331), or that cannot be built at all.
    """
    setting = setting or Setting()
    wanted = list(dict.fromkeys(targets))
    reach = Reach(graph, wanted)
    names = naming.Names(set(OWN_NAMES))
    imports = Imports(names, setting.system_path)
    imports.take(node for _, node in reach.nodes if isinstance(node, Call))
    parameters = parameters_of(graph, wanted, reach, names)
    body = Body(graph, reach, imports, names, parameters, project_dir=setting.project_dir)
    built = []
    for target in wanted:
        expression = body.build(graph.target(target).value, (Key(target),))
        built.append(expression if len(wanted) == 1 else body.bind(expression, target))
    members = zip((f"{body.key(target).text}: " for target in wanted), built, strict=True)
    last = returned(wanted, built, bracketed("{", members, "}", pure=True))
    statements = [*body.block, last]
    if body.drops:
        statements = without_unused(statements)
        imports.keep(names_read(statements))
    head = signature(parameters.values(), lambda value: body.literal(value, (), 10**6).text)
    imports.own |= {"UNSET"} if any(parameter.unset for parameter in parameters.values()) else set()
    tail = ending(graph, wanted, parameters.values(), setting.seed)
    imports.own |= {"seed_everything"} if tail and setting.seed is not None else set()
    text = module_text(setting, wanted, statements, imports, head, tail)
    known = {variable: parameter.name for variable, parameter in parameters.items()}
    return PythonCode(text, tuple(wanted), known, tuple(imports.facts()))
