"""Applies `--set path=value` to a graph.

The inputs are a graph and assignments, each a path and a YAML text; the output is a new graph. Invariants: the given
graph is unchanged; sharing is preserved, so a value inside a shared node changes wherever that node is used, and a
finding of the new graph reports this change; `Entry.replaced` keeps the old value.

An assignment does what editing the file would do: at the path of an anchor (`lr: &lr 1e-3`, or a definition) it changes
the value for every alias; at the path of an alias it changes that path only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from forgather.aliases import alias_of, suggest
from forgather.config.graph import Call, Entry, Graph, Mapped, Node, describe
from forgather.config.graph import Sequence as Items
from forgather.config.insight.path_lookup import child_at, near_paths, path_text, read_path, root_entry, steps_along
from forgather.config.load import COMMAND_LINE, load_value
from forgather.config.path import GraphPath, Index, Key, format_path
from forgather.config.traverse import (
    SEARCH_PATH,
    Moved,
    Step,
    all_nodes,
    children,
    entries,
    paths_to,
    rebuild,
    roots,
    shared_nodes,
    walk_places,
    with_value,
)
from forgather.config.yaml.merge import overriding
from forgather.errors import Diagnostic, ForgatherError, GraphError, Severity, nearest
from forgather.source import Origin, Site, Span

# The default of `Budget.max_depth`, which limits a loaded document.
_MAX_DEPTH = 100
_LISTED = 2
# A node in a list of thousands has thousands of paths; the finding only needs to say "many".
_COUNTED = 100
_ORIGIN = Origin((Site(Span(COMMAND_LINE, 1), COMMAND_LINE),))


def split_assignment(text: str) -> tuple[str, str]:
    """Returns the path and the value of `path=value`; an `=` inside brackets belongs to the path.

    Raises:
        GraphError: FG313 if there is no `=` outside brackets.

    Example:
        >>> split_assignment("optimizer.lr=3e-4")
        ('optimizer.lr', '3e-4')
    """
    depth, quote, escaped = 0, "", False
    for position, char in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = char == "\\"
            quote = "" if char == quote else quote
        elif depth > 0 and char in "'\"":
            quote = char
        elif char == "=" and depth <= 0:
            return text[:position].strip(), text[position + 1 :]
        else:
            # An `=` in brackets is part of a key: `options['a=b']=1`.
            depth += (char == "[") - (char == "]")
    raise GraphError(f"{text!r} is not an assignment: it has no '='", code="FG313", hint="write path=value")


def override(graph: Graph, assignments: Sequence[tuple[str, str]]) -> Graph:
    """Returns the graph after all assignments, which are applied in order.

    Args:
        graph: the config.
        assignments: the pairs of path and YAML text; a path that begins with `+` adds a new value.

    Raises:
        GraphError: FG311 if the path does not exist; FG312 if a path with `+` exists.
        LoadError: FG2xx if the value is not YAML of the config language.
    """
    for path, value in assignments:
        graph = _assign(graph, path, value)
    return graph


def _assign(graph: Graph, text: str, value: str) -> Graph:
    adds = text.startswith("+")
    path = read_path(text.removeprefix("+"))
    # The value may use aliases of the config: `--set model.head=*head`.
    anchors = {graph.anchors[id(node)]: node for _, node in all_nodes(graph) if id(node) in graph.anchors}
    alias = value.strip().removeprefix("*") if value.lstrip().startswith("*") else None
    edit = _Edit(text, path, _value(text, value, anchors), adds, alias)
    # A root key has no node that contains it: targets and definitions are kept by the graph itself.
    if len(path) == 1:
        return _assign_root(graph, edit)
    holder = _follow(graph, edit)
    step = path[-1]
    found = child_at(holder, step)
    present = None if found is None else found[0]
    _judge_presence(edit, holder, present)
    # At the path of its anchor, the node itself is replaced, which changes all its aliases.
    if present is not None and _is_home(graph, holder, step, present):
        swaps = {id(present): edit.value}
        return _announced(_rebuilt(graph, swaps, edit, edit.moved), edit, _others(graph, edit, swaps))
    swaps = {id(holder): _added(edit, holder) if present is None else _set(holder, step, edit)}
    return _announced(_rebuilt(graph, swaps, edit), edit, _others(graph, edit, swaps, (step,)))


def _value(text: str, value: str, anchors: Mapping[str, Node]) -> Node:
    try:
        return load_value(value, anchors=anchors)
    except ForgatherError as error:
        # The place of the value is not in a file, so the message shows the option.
        error.context = (f"--set {text}={value}",)
        raise


@dataclass(frozen=True, slots=True)
class _Edit:
    text: str
    path: GraphPath
    value: Node
    adds: bool
    alias: str | None = None

    def entry(self, key: Any) -> Entry:
        """Returns the entry that has the assigned value and the command line as its origin."""
        return Entry(key, self.value, _ORIGIN, alias=self.alias, through=(_ORIGIN,) if self.alias else ())

    def moved(self, entry: Entry, value: Node) -> Entry:
        """Returns an entry with a new value; an entry whose value is replaced keeps the old one in `replaced`."""
        if value is not self.value:
            return with_value(entry, value)
        here = self.entry(entry.key) if entry.alias is None else replace(entry, value=value, replaced=())
        return overriding(here, entry)


# finding the place


def _follow(graph: Graph, edit: _Edit) -> Node:
    """Returns the node that contains the value at the path, or that will contain the added value."""
    stops = steps_along(graph, edit.path[:-1])
    if not stops:
        _root_entry(graph, edit)
    if len(stops) < len(edit.path) - 1:
        _no_such(edit, stops[-1].node, edit.path[len(stops)], stops[-1].path)
    return stops[-1].node


def _root_entry(graph: Graph, edit: _Edit) -> Entry:
    name = edit.path[0].name if isinstance(edit.path[0], Key) else edit.path[0].position
    found = root_entry(graph, name)
    if found is None:
        known = [*graph.targets, *(str(entry.key) for entry in graph.definitions)]
        # `--set lr=...` is a common first attempt, so the table of other tools' names comes first.
        near = _elsewhere(graph, edit.path) or nearest(str(name), known)
        if not near or not near.startswith("did"):
            ends = near_paths(path_text(edit.path), (path_text(path) for path, _ in walk_places(graph)))
            near = f"did you mean {' or '.join(ends)}?" if ends else near
        hint = near or "see `fgcli targets`"
        message = f"no target {name!r} for the path {edit.text!r}"
        raise GraphError(message, code="FG311", path=edit.text, hint=hint)
    return found


def _elsewhere(graph: Graph, path: GraphPath) -> str | None:
    """Returns a hint if the path ends with another tool's name of a setting, such as `lr` for `learning_rate`."""
    alias = alias_of("setting", str(getattr(path[-1], "name", "")))
    if alias is None:
        return None
    if alias.verdict != "same":
        return alias.why
    ends = near_paths(alias.name, (path_text(path) for path, _ in walk_places(graph)))
    return f"did you mean {ends[0]}?" if ends and ends[0].endswith(alias.name) else None


def _judge_presence(edit: _Edit, holder: Node, present: Node | None) -> None:
    if present is None and not edit.adds:
        _no_such(edit, holder, edit.path[-1], edit.path[:-1])
    if present is not None and edit.adds:
        message = f"{edit.text!r}: {format_path(edit.path)} is already there"
        where = format_path(edit.path)
        raise GraphError(message, code="FG312", path=where, span=present.span, hint="leave out the '+'")


def _no_such(edit: _Edit, node: Node, step: Step, inside: GraphPath) -> NoReturn:
    names = [str(other.name) for other, _ in children(node) if isinstance(other, Key)]
    if isinstance(step, Index):
        count = sum(isinstance(other, Index) for other, _ in children(node))
        found, hint = f"[{step.position}]", f"it has {count} items" if count else _listing(names)
    else:
        kind = "setting" if "learning_rate" in names else "keyword"
        found, hint = repr(step.name), suggest(kind, str(step.name), names) or _listing(names)
    is_known = hint is not None and alias_of("setting", str(getattr(step, "name", ""))) is not None
    may_add = not edit.adds and step == edit.path[-1] and isinstance(step, Key)
    if may_add and not is_known and isinstance(node, (Call, Mapped)):
        # Only the last step can be added; a missing step before it is rather a misspelling.
        added = f"+{edit.text}=... adds it"
        hint = added if hint is None else f"{added}; {hint}" if hint.startswith("it has") else f"{hint}; {added}"
    message = f"{format_path(inside)} ({describe(node)}) has no {found}"
    raise GraphError(message, code="FG311", path=format_path(inside), span=node.span, hint=hint)


def _listing(names: list[str]) -> str | None:
    return f"it has: {', '.join(names[:20])}" if names else None


# making the new graph


def _is_home(graph: Graph, holder: Node, step: Step, present: Node) -> bool:
    """Returns whether `present` is shared and is written at this path, not behind an alias or a merge key."""
    entry = next((entry for entry in entries(holder) if Key(entry.key) == step), None)
    if entry is None or entry.alias is not None:
        return False
    return id(present) in shared_nodes([node for _, node in roots(graph)])


def _set(holder: Node, step: Step, edit: _Edit) -> Node:
    """Returns `holder` with the child at `step` replaced by the assigned value."""
    if isinstance(holder, Call) and isinstance(step, Key):
        if step.name == SEARCH_PATH and all(entry.key != step.name for entry in entries(holder)):
            # `submodule_searchpath` is a field of the call, unless the call has an argument of that name.
            marks = _marked(holder.marks, SEARCH_PATH, holder.submodule_searchpath, edit)
            return replace(holder, submodule_searchpath=edit.value, marks=marks)
        kwargs, latent = _entry_set(holder.kwargs, step.name, edit), holder.latent_args
        # A keyword may be among the latent arguments only.
        if kwargs is holder.kwargs:
            latent = _entry_set(latent, step.name, edit)
        return replace(holder, kwargs=kwargs, latent_args=latent)
    if isinstance(holder, Call) and isinstance(step, Index):
        marks = _marked(holder.marks, step.position, holder.args[step.position], edit)
        return replace(holder, args=_item_set(holder.args, step.position, edit.value), marks=marks)
    if isinstance(holder, Items) and isinstance(step, Index):
        marks = _marked(holder.marks, step.position, holder.items[step.position], edit)
        return replace(holder, items=_item_set(holder.items, step.position, edit.value), marks=marks)
    if isinstance(holder, Mapped):
        name = step.name if isinstance(step, Key) else step.position
        return replace(holder, entries=_entry_set(holder.entries, name, edit))
    return rebuild(holder, lambda _: edit.value)


def _entry_set(entries: tuple[Entry, ...], name: object, edit: _Edit) -> tuple[Entry, ...]:
    if all(entry.key != name for entry in entries):
        return entries
    return tuple(overriding(edit.entry(entry.key), entry) if entry.key == name else entry for entry in entries)


def _marked(marks: tuple[Entry, ...], key: int | str, present: Node | None, edit: _Edit) -> tuple[Entry, ...]:
    """Returns the marks of a node, with a new mark for `key` that keeps the old value."""
    earlier = next((mark for mark in marks if mark.key == key), None)
    if earlier is None and present is not None:
        earlier = Entry(key, present, present.origin)
    new = edit.entry(key) if earlier is None else overriding(edit.entry(key), earlier)
    return (*(mark for mark in marks if mark.key != key), new)


def _item_set(items: tuple[Node, ...], position: int, value: Node) -> tuple[Node, ...]:
    return (*items[:position], value, *items[position + 1 :])


def _added(edit: _Edit, holder: Node) -> Node:
    step = edit.path[-1]
    if isinstance(step, Key) and isinstance(holder, Call) and isinstance(step.name, str):
        return replace(holder, kwargs=(*holder.kwargs, edit.entry(step.name)))
    if isinstance(step, Key) and isinstance(holder, Mapped):
        return replace(holder, entries=(*holder.entries, edit.entry(step.name)))
    # A position beyond the end would leave a gap.
    if isinstance(step, Index) and isinstance(holder, Items) and step.position == len(holder.items):
        return replace(holder, items=(*holder.items, edit.value))
    if isinstance(step, Index) and isinstance(holder, Call) and step.position == len(holder.args):
        return replace(holder, args=(*holder.args, edit.value))
    inside = format_path(edit.path[:-1])
    message = f"{edit.text!r}: this cannot be added to {inside} ({describe(holder)})"
    raise GraphError(message, code="FG312", path=inside, span=holder.span, hint="a sequence grows at its end only")


def _assign_root(graph: Graph, edit: _Edit) -> Graph:
    step = edit.path[0]
    name = step.name if isinstance(step, Key) else step.position
    present = root_entry(graph, name)
    if edit.adds and isinstance(name, str) and present is None:
        entry = edit.entry(name)
        if name.startswith("."):
            return replace(graph, definitions=(*graph.definitions, entry))
        return replace(graph, targets={**graph.targets, name: entry})
    entry = _root_entry(graph, edit)
    _judge_presence(edit, entry.value, entry.value)
    new = overriding(edit.entry(entry.key), entry)
    swaps = {id(entry.value): edit.value} if entry.alias is None else {}
    changed = replace(
        graph,
        targets={key: new if old is entry else old for key, old in graph.targets.items()},
        definitions=tuple(new if old is entry else old for old in graph.definitions),
    )
    return _announced(_rebuilt(changed, swaps, edit, edit.moved), edit, _others(graph, edit, swaps))


def _rebuilt(graph: Graph, swaps: Mapping[int, Node], edit: _Edit, moved: Moved = with_value) -> Graph:
    """Returns the graph with each node of `swaps` replaced at all its paths.

    Args:
        graph: the config.
        swaps: the new nodes, by the id of the old node.
        edit: the assignment, for messages.
        moved: a function that returns the new entry for an entry and its new value.
    """
    made: dict[int, Node] = {}
    anchors: dict[int, str] = {}

    def change(node: Node) -> Node:
        if id(node) not in made:
            # By id of the old node, so that a shared node becomes one new node.
            made[id(node)] = swaps.get(id(node)) or rebuild(node, change, moved)
            if id(node) in graph.anchors:
                anchors[id(made[id(node)])] = graph.anchors[id(node)]
        return made[id(node)]

    def changed(entry: Entry) -> Entry:
        value = change(entry.value)
        return entry if value is entry.value else moved(entry, value)

    targets = {name: changed(entry) for name, entry in graph.targets.items()}
    definitions = tuple(changed(entry) for entry in graph.definitions)
    _refuse_depth([entry.value for entry in (*targets.values(), *definitions)], edit)
    return replace(graph, targets=targets, definitions=definitions, anchors=anchors)


def _refuse_depth(level: list[Node], edit: _Edit) -> None:
    for _ in range(_MAX_DEPTH + 1):
        # Level by level without repeated nodes, because the number of paths can be exponential.
        level = list({id(child): child for parent in level for _, child in children(parent)}.values())
        if not level:
            return
    message = f"{edit.text!r} nests the config deeper than {_MAX_DEPTH}"
    raise GraphError(message, code="FG220", path=edit.text, hint="use fewer levels")


def _others(graph: Graph, edit: _Edit, changed: Iterable[int], behind: GraphPath = ()) -> list[str]:
    """Returns the other paths whose value changes with an assignment.

    A path through another target is not reported again. The assigned path begins with a target or definition. If that
    is used at one place only, the place is not reported either, because its change is expected.

    Args:
        graph: the graph before the change.
        edit: the assignment.
        changed: the ids of the nodes that change.
        behind: the part of the reported paths after the path of a changed node.
    """
    names: dict[int, str] = {}
    for name, entry in graph.targets.items():
        names.setdefault(id(entry.value), name)
    wanted = set(changed)
    target = graph.targets.get(str(edit.path[0].name)) if isinstance(edit.path[0], Key) else None
    own = id(target.value) if target is not None else None
    inside: list[tuple[GraphPath, Node]] = [
        ((Key(name), step), child) for key, name in names.items() if key not in wanted
        for step, child in children(graph.targets[name].value)
    ]  # fmt: skip
    uses: list[GraphPath] = []
    places: list[GraphPath] = [(Key(name), *behind) for key, name in names.items() if key in wanted and key != own]
    for path, node in paths_to(inside, wanted | set(names), limit=_COUNTED):
        if id(node) == own:
            uses.append((*path, *edit.path[1:]))
        elif id(node) in wanted:
            places.append((*path, *behind))
    # The path of the assignment itself is expected to change.
    places = [path for path in places if path != edit.path]
    # A definition exists only to be used elsewhere, so a single use of it is expected, too.
    is_surprise = len(uses) > 1 or len(places) > (own is None)
    return [format_path(path) for path in (*uses, *places)] if is_surprise else []


def _announced(graph: Graph, edit: _Edit, others: list[str]) -> Graph:
    """Returns the graph with a finding that lists the other paths whose values change, if there are any."""
    if not others:
        return graph
    shown = ", ".join(others[:_LISTED])
    if len(others) > _LISTED:
        shown += f" and {'at least ' if len(others) >= _COUNTED - 1 else ''}{len(others) - _LISTED} more"
    found = Diagnostic(
        code="FG314",
        message=f"{edit.text} is shared with {shown}",
        severity=Severity.NOTE,
        span=Span(COMMAND_LINE, 1),
        path=format_path(edit.path),
        hint="to change one place alone, replace the alias there as a whole",
    )
    return replace(graph, diagnostics=(*graph.diagnostics, found))
