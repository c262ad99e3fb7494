"""Values that construction finds, as Python: `!var`, `!env` and `!calc`.

Takes their nodes, gives expressions over parameters, `os.environ` and built targets. Keeps true: what may stay unread
(the default of something that is given, the other branch of a `!calc`) is built only when it is read.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from forgather.codegen.python.calc import calc_text, is_lazy
from forgather.codegen.python.faults import located
from forgather.codegen.python.names import wish
from forgather.codegen.python.text import Expression, call, name, width
from forgather.config.events import Refusal
from forgather.config.graph import Calc, Env, Node, Scalar, Var
from forgather.config.path import GraphPath, Key

if TYPE_CHECKING:
    from forgather.codegen.python.body import Body

_LONGEST = 60
_ANY_WIDTH = 1_000_000
_COMPARED = tuple(
    text for sign in ("==", "!=") for word in ("None", "True", "False") for text in (f"{sign} {word}", f"{word} {sign}")
)


class ValueWriter:
    """Writes values that construction finds into a body."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def variable(self, node: Var, path: GraphPath) -> Expression:
        """Returns a `!var`: a parameter, or its default."""
        body, parameter = self._body, self._body.parameters[node.variable]
        if not parameter.unset:
            return name(parameter.name)
        if node.default is None:
            return self._given(node.variable)
        body.imports.use("UNSET")
        make = partial(body.build, node.default, (*path, Key("default")))
        return body.otherwise(f"{parameter.name} is UNSET", name(parameter.name), parameter.name, make)

    def environment(self, node: Env, path: GraphPath) -> Expression:
        """Returns an `!env`: read when it is built, by `os.environ`."""
        body, default, inside = self._body, node.default, (*path, Key("default"))
        body.imports.use("os")
        if default is None:
            return Expression(f"os.environ[{body.literal(node.variable).text}]", pure=False)
        if isinstance(default, Scalar):
            items = [("", body.literal(node.variable))]
            items += [] if default.value is None else [("", body.literal(default.value, inside))]
            return call(name("os.environ.get"), items)
        value = self.environment_value(node)
        return body.otherwise(
            f"{value.text} is None", value, node.variable.lower(), partial(body.build, default, inside)
        )

    def environment_value(self, node: Env) -> Expression:
        """Returns a variable that holds an environment variable, or `None`."""
        self._body.imports.use("os")
        read = call(name("os.environ.get"), [("", self._body.literal(node.variable))])
        return self._body.bind(read, node.variable.lower())

    def calculated(self, node: Calc, path: GraphPath) -> Expression:
        """Returns a `!calc`."""
        body = self._body

        def text_of(word: str) -> str:
            found = self._named(word, lazily)
            loose = found.text.startswith("-") or (not found.primary and " " in found.text)
            return f"({found.text})" if loose else found.text

        with located(node, path):
            lazily = is_lazy(node.expression)
            body.uncertain += lazily
            text = calc_text(node.expression, text_of, lambda value: body.literal(value, (), _ANY_WIDTH).text)
            body.uncertain -= lazily
        return self._arithmetic(text, wish(body.graph, node, path))

    def _arithmetic(self, text: str, wished: str) -> Expression:
        expression = Expression(text, pure=False, primary=False)
        faults = "E711, E712" if any(sign in text for sign in _COMPARED) else ""
        if not faults and width(text) <= _LONGEST:
            return expression
        return self._body.keep(expression, wished, faults)

    def _named(self, word: str, lazily: bool) -> Expression:
        """Returns what a name in a `!calc` stands for: a variable, or else a target."""
        body = self._body
        entry = body.graph.targets.get(word)
        if entry is None:
            return self._given(word)
        if body.is_open(entry.value):
            hint = "break the cycle with a !var or a plain value"
            raise Refusal("FG304", f"!calc reads the target {word!r} while that is being built from it", hint)
        make = partial(self._target, word, entry.value, lazily)
        if word not in body.parameters:
            return make()
        body.imports.use("UNSET")
        parameter = body.parameters[word].name
        return body.otherwise(f"{parameter} is UNSET", name(parameter), word, make)

    def _given(self, variable: str) -> Expression:
        """Returns a variable that must have been given."""
        parameter = self._body.parameters[variable]
        if not parameter.unset:
            return name(parameter.name)
        self._body.imports.own |= {"UNSET", "given"}
        return call(name("given"), [("", name(parameter.name)), ("", self._body.literal(variable))], pure=True)

    def _target(self, word: str, node: Node, lazily: bool) -> Expression:
        body, path = self._body, (Key(word),)
        if not lazily or isinstance(node, Scalar):
            return body.bind(body.build(node, path), word)
        bound = body.bound(node)
        if bound is not None:
            return bound
        make = partial(body.make_apart, node, path)
        if body.reach.remembered(node):
            return body.lazy(node, path, make)
        found = body.local_lazy(node, path, make)
        # What is built anew for each reader is not kept by the function either.
        body.top[-1].heads = body.top[-1].heads[1:]
        body.drops = True
        return found
