"""What the blocks of a template hold: keys, includes, and what they set.

Takes the tree of a template, or the text of one, gives plain constants. Keeps true: nothing is rendered; only keys that
stand in the text count, so that there may be more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jinja2 import nodes

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
