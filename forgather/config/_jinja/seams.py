"""Where text of one template may meet text of another within a line.

Takes the tokens and the tree of a template, notes on the nodes that write something whether they begin a line of the
source, and on the includes whether text follows them on their line. Keeps true: trimming that the user asked for
(`-%}`, `{%-`) is no line end; a seam changes text only where two templates would share a line that none of them wrote.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import nodes

from forgather.config._jinja import origins
from forgather.config._jinja.origins import Traced

_WRITERS = ("include", "call", "filter", "block")
_BEGINS = {"data", "variable_begin", "block_begin", "comment_begin", "raw_begin"}
_ENDS = {"variable_end", "block_end", "comment_end", "raw_end"}
_LAST_LINE_ENDS_BLOCK = re.compile(r"\s*\{% endblock\b")

Token = tuple[int, str, str]


class Seam(str):
    """An empty text, written where a line of a template begins."""

    __slots__ = ("owner",)

    owner: Any

    def joins(self, before: str) -> bool:
        """Says whether another template has a part in the text before, which does not end its line."""
        if type(before) is not Traced or before.endswith("\n"):
            return False
        return any(site[0] is not self.owner for site in before.trails[-1][0])


def seam_of(owner: Any) -> Seam:
    """Returns the seam of a template's lines."""
    made = Seam()
    made.owner = owner
    return made


def line_end(before: str) -> Traced:
    """Returns the line end that a text lacks, written by whoever wrote the text."""
    return origins.traced("\n", before.trails[-1] if type(before) is Traced else origins.LOST)


def mark_seams(tree: nodes.Template, tokens: Iterable[Token], source: str) -> None:
    """Notes `fg_begins`, `fg_ends` and `fg_inline` on the nodes of a template.

    Args:
        tree: its nodes.
        tokens: what the lexer makes of its source.
        source: the source.
    """
    lines = source.split("\n")
    writers = list(_writers(tokens))
    found = [
        node for node in tree.find_all((nodes.Output, nodes.Include, nodes.CallBlock, nodes.FilterBlock, nodes.Block))
    ]
    written = [child for node in found for child in (node.nodes if isinstance(node, nodes.Output) else [node])]
    for node, (begins, word, follower) in zip(written, writers, strict=True):
        node.__dict__["fg_begins"] = begins
        if word == "include":
            node.__dict__["fg_inline"] = follower
    for block in tree.find_all(nodes.Block):
        end = block.__dict__.get("fg_end_line", 0)
        block.__dict__["fg_ends"] = bool(end and _LAST_LINE_ENDS_BLOCK.match(lines[end - 1]))
    tree.__dict__["fg_has_seams"] = any(word in ("include", "call") for _, word, _ in writers)


def _writers(tokens: Iterable[Token]) -> Iterator[tuple[bool, str, bool]]:
    """Yields, for each token that writes: does it begin a line, its word, does text follow on its line."""
    at_start, word, pending = True, "", None
    for kind, value, name in _tags(tokens):
        if kind in _ENDS:
            at_start = at_start if kind != "variable_end" else False
            if value.endswith("\n") and not value.startswith("-"):
                at_start = True
                if pending:
                    yield (*pending, False)
                    pending = None
            continue
        if kind.endswith("_begin") and value.rstrip("#").endswith("-"):
            at_start = False
        word = name if kind == "block_begin" else kind
        # A block that another template replaces, or a call, has written something where it ends.
        at_start = at_start and word not in ("endblock", "endcall", "endfilter")
        if word not in (*_WRITERS, "data", "variable_begin"):
            continue
        if pending:
            yield (*pending, kind != "data" or value.split("\n", 1)[0].strip() != "")
            pending = None
        if word == "include":
            pending = (at_start, word)
        else:
            yield at_start, word, False
        if kind == "data":
            at_start = not value.rpartition("\n")[2].strip() and "\n" in value or (at_start and not value.strip())
        elif word != "block":
            at_start = False
    if pending:
        yield (*pending, False)


def _tags(tokens: Iterable[Token]) -> Iterator[tuple[str, str, str]]:
    """Yields kind and text of the tokens between and at the edges of tags; of a statement, its word, too."""
    opened = ""
    for _, kind, value in tokens:
        if opened and kind == "name":
            yield "block_begin", opened, value
            opened = ""
        elif kind == "block_begin":
            opened = value
        elif kind in _BEGINS or kind in _ENDS:
            yield kind, value, ""
