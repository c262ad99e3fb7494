"""The order of base classes, and classes that one call makes.

Takes lines of bases, gives them joined. Keeps true: the order is Python's (C3); where there is none, a `Doubt` ends it.
"""

from __future__ import annotations

import ast

from forgather.signatures import known
from forgather.signatures.things import Class, Doubt, Ref, Thing, Tuples

Line = list[Class | Ref | Doubt]


def merge(chains: list[Line]) -> Line:
    """Joins lines of bases as Python does (C3)."""
    merged: Line = []
    while chains := [chain for chain in chains if chain]:
        for chain in chains:
            head = chain[0]
            if not any(_same(head, later) for other in chains for later in other[1:]):
                break
        else:
            return [*merged, Doubt("its bases have no order")]
        merged.append(head)
        for chain in chains:
            if _same(chain[0], head):
                del chain[0]
    return merged


def _same(one: Class | Ref | Doubt, other: Class | Ref | Doubt) -> bool:
    if isinstance(one, Class) and isinstance(other, Class):
        return one.node is other.node
    return one == other


def named_tuple(call: ast.Call) -> Thing:
    """Returns what a call of `collections.namedtuple` makes."""
    if len(call.args) != 2 or any(keyword.arg not in ("defaults", "module") for keyword in call.keywords):
        return Doubt("a named tuple made by code")
    defaults = 0
    for keyword in call.keywords:
        if keyword.arg == "defaults":
            if not isinstance(keyword.value, ast.Tuple | ast.List):
                return Doubt("a named tuple made by code")
            defaults = len(keyword.value.elts)
    try:
        names = ast.literal_eval(call.args[1])
    except ValueError:
        return Doubt("a named tuple made by code")
    fields = names.replace(",", " ").split() if isinstance(names, str) else list(names)
    return Tuples(tuple(str(field) for field in fields), defaults)


def is_generic(thing: Thing) -> bool:
    """Returns whether `thing[...]` is constructed like the thing itself."""
    if isinstance(thing, Ref):
        return thing.dotted in known.EMPTY_BASES or not thing.dotted.startswith("typing")
    return isinstance(thing, Class | Doubt)
