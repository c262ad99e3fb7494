"""Single values of `graph.yaml` by their paths, without loading the graph.

The input is the text that `codegen/emit_yaml.py` writes, one entry a line; the output is plain values. A look-up reads
only the lines around the value, so that a thousand graphs can be asked in a fraction of the time of loading one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

from forgather.config.path import GraphPath, Index, Key, parse_path
from forgather.errors import ForgatherError

Value = str | int | float | bool | None
_HEAD = re.compile(r"(?:&(\S+) ?)?(?:!(\S+) ?)?(.*)", re.DOTALL)
_INT, _FLOAT = re.compile(r"[-+]?[0-9]+"), re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
_LINE = re.compile(r"^( *)((?:- )*)([^\n]*)$", re.MULTILINE)
_ANCHORED = re.compile(r'((?:"(?:[^"\\]|\\.)*"|[^"&\s][^\n]*?): )?(&(\S+).*)$')
# `emit_yaml` writes the arguments of a call below these keys if the keys of the call would be ambiguous.
_EXPLICIT = ("args", "kwargs", "latent_args", "submodule_searchpath")
_EXPLICIT_KEY = re.compile(rf" *(?:{'|'.join(_EXPLICIT)}):")
_ENTRY = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^"#?\s-][^\n]*?|-[^ \n][^\n]*?)(?=:(?: |$))', re.MULTILINE)


def plain_value(text: str) -> Value:
    """Returns the value that a text has as a YAML scalar.

    Example:
        >>> [plain_value(text) for text in ("1e-3", "12", "true", "~", '"1"', "adamw")]
        [0.001, 12, True, None, '1', 'adamw']
    """
    words: dict[str, Value] = {"~": None, "null": None, "": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if text in (".inf", "-.inf", ".nan"):
        return float(text.replace(".", ""))
    if _INT.fullmatch(text):
        return int(text) if len(text) < 300 else text  # a longer one is no float, which sorting needs
    if _FLOAT.fullmatch(text):
        return float(text)
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            return text
    return text


class ConfigText:
    """The text of a graph.

    Args:
        text: the content of `graph.yaml`.
    """

    def __init__(self, text: str) -> None:
        self._text = text if text.endswith("\n") else text + "\n"

    def get(self, path: str) -> tuple[Value] | None:
        """Returns the value at a path in a tuple of one; None if there is no such value.

        A call gives its constructor, a list of plain values its text, and any other container an ellipsis in brackets.

        Args:
            path: the path, such as `optimizer.lr`. Paths through an alias lead to the value that it names.
        """
        try:
            steps = parse_path(path.removeprefix("."))
        except ForgatherError:
            return None
        if path.startswith(".") and steps and isinstance(steps[0], Key):
            steps = (Key(f".{steps[0].name}"), *steps[1:])
        return self._at(steps, "", self._text, depth=0)

    def _at(self, steps: GraphPath, head: str, body: str, *, depth: int) -> tuple[Value] | None:
        while True:
            if head.startswith("*"):
                anchored = self._anchors.get(head[1:].strip())
                if anchored is None or depth > 100:
                    return None
                head, body = anchored
                depth += 1
                continue
            if not steps:
                return (_shown(head, body),)
            found = _child(body, steps[0], is_call=bool(_HEAD.match(head)[2]))  # type: ignore[index]
            if found is None:
                return None
            steps, (head, body) = steps[1:], found

    @cached_property
    def _anchors(self) -> dict[str, tuple[str, str]]:
        """The text after the key and the lines below of each value with an anchor, by the name of the anchor."""
        found: dict[str, tuple[str, str]] = {}
        block: int | None = None
        for match in _LINE.finditer(self._text):
            indent = len(match[1])
            if block is not None and (indent > block or not match[3] + (match[2] or "")):
                continue  # a text of several lines may look like a config
            block = indent if match[3].endswith((" |", " |-", " |+")) or match[3] in ("|", "|-", "|+") else None
            anchored = _ANCHORED.match(match[3])
            if anchored is not None:
                # What is inside an item of a list is indented by the dash, and inside an entry by more than its key.
                least = indent + len(match[2]) + (1 if anchored[1] else 0)
                found[anchored[3]] = (anchored[2], _below(self._text, match.end() + 1, least))
        return found

    def paths(self) -> list[str]:
        """Returns the paths of all plain values and calls, without those through aliases."""
        return [path for path, _ in self._walk("", self._text, "")]

    def _walk(self, head: str, body: str, prefix: str, *, is_inside: bool = False) -> Iterator[tuple[str, str]]:
        if prefix and not is_inside:
            yield prefix, head
        is_explicit = bool(_HEAD.match(head)[2] and _explicit_parts(body))  # type: ignore[index]
        for step, inner, below in _children(body):
            if inner.startswith("*"):
                continue
            if is_explicit and not inner:
                yield from self._walk("", below, prefix, is_inside=True)
            elif isinstance(step, int):
                yield from self._walk(inner, below, f"{prefix}[{step}]")
            else:
                yield from self._walk(inner, below, f"{prefix}.{step}" if prefix else step)


def _child(body: str, step: Key | Index, *, is_call: bool) -> tuple[str, str] | None:
    """Returns the text after the key and the lines below it of one entry in the lines of a container."""
    if is_call and (parts := _explicit_parts(body)):
        inside = (_child(part, step, is_call=False) for part in parts)
        return next((found for found in inside if found is not None), None)
    if isinstance(step, Index):
        items = [(head, below) for name, head, below in _children(body) if name == step.position]
        return items[0] if items else None
    indent = len(body) - len(body.lstrip(" "))
    # A key is written in quotes if YAML would read it as something else than a string.
    name = "|".join(re.escape(text) for text in (str(step.name), json.dumps(str(step.name), ensure_ascii=False)))
    match = re.search(rf"^ {{{indent}}}(?:{name}):(?: ([^\n]*))?$", body, re.MULTILINE)
    return None if match is None else (match[1] or "", _below(body, match.end() + 1, indent + 1))


def _explicit_parts(body: str) -> list[str]:
    """Returns the lines of the arguments of a call, if they are written below `args`, `kwargs` and the like."""
    if not _EXPLICIT_KEY.match(body):
        return []
    children = list(_children(body))
    if not all(name in _EXPLICIT for name, _, _ in children):
        return []
    return [below for _, head, below in children if not head]


def _below(text: str, begin: int, indent: int) -> str:
    """Returns the lines from a position on that are indented by at least `indent` columns."""
    end = re.compile(rf"^(?! {{{indent}}}|$)", re.MULTILINE).search(text, begin)
    return text[begin : end.start() if end else len(text)]


def _children(body: str) -> Iterator[tuple[str | int, str, str]]:
    """Yields the name or position of each entry in the lines of a container, the text after it and the lines below."""
    indent = len(body) - len(body.lstrip(" "))
    starts = [match.start() for match in re.finditer(rf"^ {{{indent}}}(?=[^ \n#])", body, re.MULTILINE)]
    position = 0
    for begin, end in pairwise([*starts, len(body)]):
        first, _, below = body[begin + indent : end].partition("\n")
        if first.startswith("- "):
            item = first[2:]
            is_entry = _ENTRY.match(item) and not item.startswith(("&", "!", "*", "- "))
            # The first line of a container is on the line of the dash.
            inside = f"{' ' * (indent + 2)}{item}\n{below}" if is_entry or item.startswith("- ") else below
            yield position, "" if inside is not below else item, inside
            position += 1
        elif match := _ENTRY.match(first):
            name = plain_value(match[0]) if match[0].startswith('"') else match[0]
            yield str(name), first[match.end() + 1 :].strip(), below


def _shown(head: str, body: str) -> Value:
    match = _HEAD.match(head)
    assert match is not None, "the pattern matches any text"  # noqa: S101
    tag, rest = match[2], match[3]
    if tag is not None:
        kind, _, constructor = tag.partition(":")
        return (constructor.partition("@")[0] or kind) if not rest or constructor else rest
    if rest in ("|", "|-", "|+"):
        indent = len(body) - len(body.lstrip(" "))
        text = "\n".join(line[indent:] for line in body.split("\n"))
        return text if rest == "|+" else text.rstrip("\n") + ("\n" if rest == "|" else "")
    if rest or not body.strip():
        return plain_value(rest)
    items = list(_children(body))
    if items and all(isinstance(name, int) and inner and inner[0] not in "&!*" for name, inner, _ in items):
        return f"[{', '.join(inner for _, inner, _ in items)}]"
    return "[...]" if items and isinstance(items[0][0], int) else "{...}"
