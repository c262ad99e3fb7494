"""Tracks, while a template runs, the line that last assigned each name.

Takes the tables of compiled code; gives the places of the names in an expression. Invariants: a name goes out of scope
here where it does in Jinja; a name without an assignment has no place.
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
    """Replaces the template in the place of a variable that was given from outside: by an option, or in Python."""

    __slots__ = ("name",)

    def __init__(self, variable: str) -> None:
        self.name = variable_place(variable)

    def span(self, line: int) -> Span:
        """Returns the pseudo place of the variable."""
        return Span(self.name, line)


def given_places(variables: Iterable[str]) -> dict[str, Places]:
    """Returns the pseudo places of variables that were given from outside, by name."""
    return {name: ((OutsideVariable(name), 1, None),) for name in variables}


def with_given(places: Places, context: RunContext, names: Names) -> Places:
    """Returns the place of a `set`, followed by the outside variables that its expression reads, directly or not."""
    found = [place for name in names for place in context.fg_sets.get(name, ()) if type(place[0]) is OutsideVariable]
    # `set x = max_steps * 2` is caused by the option that gives max_steps, so blame names that option too.
    return (*places, *dict.fromkeys(found)) if found else places


def sets_of(names: Names, fields: Fields, known: Mapping[str, Places], spaces: Iterable[Any]) -> Places:
    """Returns the place of the last executed `set` of each name, and of each attribute that has its own.

    Args:
        names: names that the expression reads.
        fields: attributes that it reads, as pairs of name and attribute.
        known: places of names.
        spaces: the value of the name of each of `fields`.
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
    """Records where the imported names of a template were set."""
    places = _fields_of(module)
    for name, alias in pairs:
        if name in places:
            context.fg_sets[alias] = places[name]
        else:
            # A macro was never set; an older place of that name would be wrong.
            context.fg_sets.pop(alias, None)


class Turns:
    """A running loop: the places of its names in each turn.

    Args:
        context: where names are looked up; `outer` keeps its places from before the loop.
        place: the line of the loop.
        rows: what each name reads, turn by turn; the last row applies to all further turns.
        spaces: values of the names whose attributes the loop reads.
    """

    __slots__ = ("_place", "_rows", "_spaces", "_turn", "outer")

    def __init__(
        self, context: RunContext, place: Place, rows: tuple[tuple[Bound, ...], ...], spaces: Mapping[str, Any]
    ) -> None:
        self.outer = context.fg_sets
        self._place, self._rows, self._spaces, self._turn = place, rows, spaces, 0

    def begin(self, context: RunContext) -> None:
        """Begins a turn; assignments of the turn before go out of scope."""
        # A copy per turn: `break` and `continue` leave the body without running code at its end.
        known = context.fg_sets = self.outer.copy()
        rows = self._rows
        if rows:
            # Only a literal list has a row for each item; otherwise one row applies to every turn.
            row = rows[min(self._turn, len(rows) - 1)]
            for target, names, fields in row:
                spaces = [self._spaces.get(name) for name, _ in fields]
                known[target] = (self._place, *sets_of(names, fields, self.outer, spaces))
        self._turn += 1

    def otherwise(self, context: RunContext) -> None:
        """Begins the `else` of the loop."""
        context.fg_sets = self.outer.copy()

    def end(self, context: RunContext) -> None:
        """Ends the loop."""
        context.fg_sets = self.outer
