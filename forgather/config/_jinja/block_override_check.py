"""What the blocks of a template hold: keys, includes, and what they set.

Takes the tree of a template, or the text of one, gives plain constants. Keeps true: nothing is rendered; only keys that
stand in the text count, so that there may be more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jinja2 import nodes

from forgather.config._jinja.environment import LoadedTemplate, RunEnvironment
from forgather.config._jinja.loader import read_text
from forgather.config._jinja.unused_names import is_field_read, is_own
from forgather.errors import Diagnostic, ForgatherError, Severity

_KEY = re.compile(r"([A-Za-z_][\w.-]*)\s*:(?:\s|$)")


class Holding(NamedTuple):
    """What a block holds.

    Args:
        keys: keys at its outermost indent.
        opening: the first word of its text ("!dlist:@callbacks"); "" where it holds none.
        calls_super: whether it prints what its parent holds.
        includes: names of the templates that it includes, as far as they are literals.
        sets: attributes that it sets, as pairs of name and attribute.
    """

    keys: tuple[str, ...] = ()
    opening: str = ""
    calls_super: bool = False
    includes: tuple[str, ...] = ()
    sets: tuple[tuple[str, str], ...] = ()


def holdings(tree: nodes.Template) -> tuple[tuple[str, tuple[object, ...]], ...]:
    """Returns what each block of a template holds, by name, as constants that its code can carry."""
    return tuple((block.name, tuple(_of_block(block))) for block in tree.find_all(nodes.Block))


def text_holding(text: str) -> Holding:
    """Returns what the text of a whole template holds."""
    lines = [line for line in text.split("\n") if not line.lstrip().startswith(("-- ", "<< ", ">> ", "{%", "=="))]
    return _of_lines(lines)


def _of_block(block: nodes.Block) -> Holding:
    found = _of_lines("".join(_texts(block)).split("\n"))
    included = [item.template for item in block.find_all(nodes.Include)]
    return found._replace(
        calls_super=any(isinstance(c.node, nodes.Name) and c.node.name == "super" for c in block.find_all(nodes.Call)),
        includes=tuple(name.value if isinstance(name, nodes.Const) else "" for name in included),
        sets=tuple(dict.fromkeys((ref.name, ref.attr) for ref in block.find_all(nodes.NSRef))),
    )


def _texts(block: nodes.Block) -> Iterator[str]:
    for output in block.find_all(nodes.Output):
        for part in output.nodes:
            # What is printed stands for a value, or for a key that is not known.
            yield part.data if isinstance(part, nodes.TemplateData) else "\0"


def _of_lines(lines: Iterable[str]) -> Holding:
    written = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not written:
        return Holding()
    # What is printed at the margin, as by `== super()`, brings an indent of its own.
    outermost = min((len(line) - len(line.lstrip()) for line in written if line[0] != "\0"), default=0)
    found = [match[1] for line in written if (match := _KEY.match(line, outermost))]
    return Holding(keys=tuple(dict.fromkeys(found)), opening=written[0].split()[0])


_ENOUGH = 3
_SHOWN = 3
_PLAIN = ("", "!dlist", "!dict")


def replaced_blocks(
    template: LoadedTemplate, parents: Sequence[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields a finding for each block of a project's template that loses what its parents' block holds."""
    if not is_own(template, environment.globals.get("project_dir")):
        return
    for name, (line, _) in template.namespace["fg_blocks"].items():
        own = _held(template, name)
        if own is None or own.calls_super or own.includes or "\0" in own.opening:
            continue
        above, source = _above(name, parents, environment)
        found = _lost_keys(name, own, above) or _lost_sets(name, own, above, template, environment)
        if source and found:
            severity, message, hint = found
            yield Diagnostic(
                code="FG137",
                message=message,
                severity=severity,
                span=template.definition.span(line),
                hint=hint,
                context=(environment.library.story(template.use),),
            )


Found = tuple[Severity, str, str]


def _lost_keys(name: str, own: Holding, above: Holding) -> Found | None:
    lost = [key for key in above.keys if key not in own.keys]
    if not own.keys or len(lost) < _ENOUGH:
        return None
    if not own.opening.startswith("!") and len(lost) < len(above.keys):
        message = f"[{name}] drops {len(lost)} settings of its parent ({_listed(lost)})"
        hint = "did you mean to keep them? Begin the block with `== super()`; to replace them all, write them out"
        return Severity.WARNING, message, hint
    if len(lost) == len(above.keys) and _shape(own) in _PLAIN:
        message = f"[{name}] replaces the {len(lost)} entries of its parent ({_listed(lost)})"
        return Severity.LINT, message, "to keep them, begin the block with `== super()`"
    return None


def _shape(held: Holding) -> str:
    """Returns the tag at the head of a block without the name of the object; "" for a plain mapping."""
    if not held.opening.startswith("!"):
        return ""
    return held.opening.split(":@")[0].split("@")[0]


def _lost_sets(
    name: str, own: Holding, above: Holding, template: LoadedTemplate, environment: RunEnvironment
) -> Found | None:
    if own.opening:
        return None
    written = template.namespace["fg_written"]
    lost = [
        f"{base}.{field}"
        for base, field in above.sets
        if field not in written and is_field_read(base, field, environment)
    ]
    if not lost:
        return None
    message = f"[{name}] drops what its parent sets and templates read: {_listed(lost)}"
    return Severity.WARNING, message, "did you mean to keep it? Begin the block with `== super()`"


def _above(name: str, parents: Sequence[LoadedTemplate], environment: RunEnvironment) -> tuple[Holding, bool]:
    """Returns what the block of that name holds in the parents, and whether any of them has it."""
    keys: dict[str, None] = {}
    sets: dict[tuple[str, str], None] = {}
    opening, met = "", False
    for parent in parents:
        held = _held(parent, name)
        if held is None:
            continue
        met = True
        parts = [held, *(_included(included, environment) for included in held.includes)]
        for part in reversed(parts):
            keys.update(dict.fromkeys(part.keys))
            opening = part.opening if part.opening.startswith("!") else opening or part.opening
        sets.update(dict.fromkeys(held.sets))
        if not held.calls_super:
            break
    return Holding(keys=tuple(keys), opening=opening, sets=tuple(sets)), met


def _held(template: LoadedTemplate, name: str) -> Holding | None:
    found = next((held for block, held in template.namespace["fg_held"] if block == name), None)
    return None if found is None else Holding(*found)


def _included(name: str, environment: RunEnvironment) -> Holding:
    """Returns what a template holds that a replaced block would have included."""
    if inline := environment.library.inline.get(name):
        return text_holding(inline[0].text)
    path = environment.library.on_search_path(name) if name and not os.path.isabs(name) else None
    try:
        return text_holding(read_text(path)) if path else Holding()
    except ForgatherError:
        return Holding()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
