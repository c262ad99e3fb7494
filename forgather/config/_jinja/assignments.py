"""Tracks, while a template runs, the line that last assigned each name.

A place is a tuple of a template, a line of the template, and the block that contains the line. The input is the tables
of names in compiled code; the output is, for each expression, the places at which its names were last assigned.
Invariants: when Jinja ends the scope of a name, the places of the name are dropped; a name that was never assigned has
no place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jinja2.environment import TemplateModule

from forgather.config._jinja.origins import Place
from forgather.config._jinja.runtime_types import RunContext, TracedNamespace
from forgather.config._jinja.static_analysis import Bound, Fields, Names
from forgather.source import Span, variable_place

Places = tuple[Place, ...]


class OutsideVariable:
    """A stand-in for the template, in the place of a variable that an option or a Python caller has set."""

    __slots__ = ("name",)

    def __init__(self, variable: str) -> None:
        self.name = variable_place(variable)

    def span(self, line: int) -> Span:
        """Returns a span in a pseudo file, `<variable NAME>`."""
        return Span(self.name, line)


def given_places(variables: Iterable[str]) -> dict[str, Places]:
    """Returns the place of each variable that an option or a Python caller has set, by the name of the variable."""
    return {name: ((OutsideVariable(name), 1, None),) for name in variables}


def with_given(places: Places, context: RunContext, names: Names) -> Places:
    """Returns the place of a `set`, followed by the places of the outside variables on which the set value depends.

    An outside variable is one that an option or a Python caller has set. The expression of the `set` may read another
    name, whose value was computed from the variable.

    Args:
        places: the place of the `set`.
        context: the context of the running template.
        names: the names that the expression reads.
    """
    found = [place for name in names for place in context.fg_sets.get(name, ()) if type(place[0]) is OutsideVariable]
    # `set x = max_steps * 2` is caused by the option that gives max_steps, so blame names that option too.
    return (*places, *dict.fromkeys(found)) if found else places


def sets_of(names: Names, fields: Fields, known: Mapping[str, Places], spaces: Iterable[Any]) -> Places:
    """Returns the places where the names in an expression were last set.

    If the expression reads an attribute that has a `set` of its own, as in `set ns.x = 1`, the place of that `set` is
    returned instead of the place of the name.

    Args:
        names: the names that the expression reads.
        fields: the attributes that the expression reads, as pairs of name and attribute.
        known: the places of each name.
        spaces: for each pair in `fields`, the object whose attribute is read.
    """
    found: dict[Place, None] = {}
    replaced: set[str] = set()
    for (name, field), space in zip(fields, spaces, strict=True):
        # An attribute of a namespace or import has a `set` of its own, which says more than that of the name.
        places = _fields_of(space).get(field)
        if places is not None:
            found.update(dict.fromkeys(places))
            replaced.add(name)
    for name in names:
        if name not in replaced and (places := known.get(name)) is not None:
            found.update(dict.fromkeys(places))
    return tuple(found)


def _fields_of(space: Any) -> Mapping[str, Places]:
    if type(space) is TracedNamespace:
        fields: Mapping[str, Places] = space._fg_sets
    elif type(space) is TemplateModule:
        fields = space.__dict__["_fg_sets"]
    else:
        fields = {}
    return fields


def note_imported(context: RunContext, module: TemplateModule, pairs: Iterable[tuple[str, str]]) -> None:
    """Records, for the names that a template imports, where the imported template set them.

    Args:
        context: the context of the importing template.
        module: the imported template.
        pairs: the imported names, each with the name that the importing template uses.
    """
    places = _fields_of(module)
    for name, alias in pairs:
        if name in places:
            context.fg_sets[alias] = places[name]
        else:
            # A macro was never set; an older place of that name would be wrong.
            context.fg_sets.pop(alias, None)


class Turns:
    """A running `for` loop. Each iteration has its own record of the places (template lines) that set each name.

    Args:
        context: the context of the running template, whose places before the loop are kept in `outer`.
        place: the place of the `for` statement.
        rows: for each iteration, the names and attributes on which each loop variable depends; the last row applies to
            all further iterations.
        spaces: the objects whose attributes the loop reads, by name.
    """

    __slots__ = ("_place", "_rows", "_spaces", "_turn", "outer")

    def __init__(
        self, context: RunContext, place: Place, rows: tuple[tuple[Bound, ...], ...], spaces: Mapping[str, Any]
    ) -> None:
        self.outer = context.fg_sets
        self._place, self._rows, self._spaces, self._turn = place, rows, spaces, 0

    def begin(self, context: RunContext) -> None:
        """Begins an iteration; the assignments of the previous iteration go out of scope."""
        # A copy per iteration: `break` and `continue` leave the body without running code at its end.
        known = context.fg_sets = self.outer.copy()
        rows = self._rows
        if rows:
            # Only a literal list has a row for each item; otherwise one row applies to every iteration.
            row = rows[min(self._turn, len(rows) - 1)]
            for target, names, fields in row:
                spaces = [self._spaces.get(name) for name, _ in fields]
                known[target] = (self._place, *sets_of(names, fields, self.outer, spaces))
        self._turn += 1

    def otherwise(self, context: RunContext) -> None:
        """Begins the `else` branch of the loop."""
        context.fg_sets = self.outer.copy()

    def end(self, context: RunContext) -> None:
        """Ends the loop, and restores the places from before the loop."""
        context.fg_sets = self.outer
