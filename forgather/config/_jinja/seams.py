"""Seams, the places where text of one template could end up on the same line as text of another template.

`mark_seams` takes the tokens and the tree of a template. It marks on each node with output whether the node begins a
line of the source, and on each include whether text follows on the line of the include. Invariants: trimming that the
user wrote (`-%}`, `{%-`) does not count as the end of a line; a seam changes the output only where two templates would
share a line that neither wrote.
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
    """An empty string that compiled code writes where a line of the template `owner` begins.

    It serves to detect text of two templates on one line.
    """

    __slots__ = ("owner",)

    owner: Any

    def joins(self, before: str) -> bool:
        """Returns whether the text before the seam ends in an unfinished line of a template other than `owner`."""
        if type(before) is not Traced or before.endswith("\n"):
            return False
        # A template may leave its own line open, as `a: {{ x }}` does; only another template's open line is a mistake.
        return any(site[0] is not self.owner for site in before.trails[-1][0])


def seam_of(owner: Any) -> Seam:
    """Returns a seam of the template `owner`: an empty string at a place where a line of the template begins."""
    made = Seam()
    made.owner = owner
    return made


def line_end(before: str) -> Traced:
    """Returns the line end that is missing after a text; its origin is that of the last part of the text."""
    return origins.traced("\n", before.trails[-1] if type(before) is Traced else origins.LOST)


def mark_seams(tree: nodes.Template, tokens: Iterable[Token], source: str) -> None:
    """Sets `fg_begins`, `fg_ends` and `fg_inline` on the nodes of a template, and `fg_has_seams` on its tree.

    Args:
        tree: the nodes of the template.
        tokens: the tokens of the source.
        source: the Jinja source of the template.
    """
    lines = source.split("\n")
    # Jinja's nodes do not say whether they begin a line, so the tokens are matched with the nodes in order.
    writers = list(_writers(tokens))
    found = list(tree.find_all((nodes.Output, nodes.Include, nodes.CallBlock, nodes.FilterBlock, nodes.Block)))
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
    """Yields, for each token with output: whether it begins a line, its word, and whether text follows on its line."""
    at_start, word, pending = True, "", None
    for kind, value, name in _tags(tokens):
        if kind in _ENDS:
            # An expression has written something, even if it is the only text on its line.
            at_start = at_start if kind != "variable_end" else False
            if value.endswith("\n") and not value.startswith("-"):
                at_start = True
                if pending:
                    yield (*pending, False)
                    pending = None
            continue
        # `{%-` removes the line end before it, so the tag continues the line above.
        if kind.endswith("_begin") and value.rstrip("#").endswith("-"):
            at_start = False
        word = name if kind == "block_begin" else kind
        # The text of a block or call may come from another template, so its end does not begin a line.
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
    """Yields the kind, the text and the statement's word of each token outside of tags, and of each mark of a tag."""
    opened = ""
    for _, kind, value in tokens:
        if opened and kind == "name":
            yield "block_begin", opened, value
            opened = ""
        elif kind == "block_begin":
            opened = value
        elif kind in _BEGINS or kind in _ENDS:
            yield kind, value, ""
