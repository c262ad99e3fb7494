"""Single values of `graph.yaml` by their paths, without loading the graph.

The input is the text that `codegen/emit_yaml.py` writes, one entry a line; the output is plain values. A look-up reads
only the lines around the value, so that a thousand graphs can be asked in a fraction of the time of loading one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise

from forgather.config.path import GraphPath, Index, Key, parse_path
from forgather.errors import ForgatherError

Value = str | int | float | bool | None
_HEAD = re.compile(r"(?:&(\S+) ?)?(?:!(\S+) ?)?(.*)", re.DOTALL)
_INT, _FLOAT = re.compile(r"[-+]?[0-9]+"), re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
# `emit_yaml` writes the arguments of a call below these keys if the keys of the call would be ambiguous.
_EXPLICIT = ("args", "kwargs")
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
    if _INT.fullmatch(text) and len(text) < 300:
        return int(text)
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
                anchored = self._anchored(head[1:].strip())
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

    def _anchored(self, name: str) -> tuple[str, str] | None:
        match = re.search(rf"^( *)((?:- )*)(?:[^\n]*?: )?(&{re.escape(name)}(?: [^\n]*)?)$", self._text, re.MULTILINE)
        if match is None:
            return None
        # What is inside an entry of a list is indented by the dash, too.
        return match[3], _below(self._text, match.end() + 1, len(match[1]) + len(match[2]) + 1)

    def paths(self) -> list[str]:
        """Returns the paths of all plain values and calls, without those through aliases."""
        return [path for path, _ in self._walk("", self._text, "")]

    def _walk(self, head: str, body: str, prefix: str) -> Iterator[tuple[str, str]]:
        if prefix:
            yield prefix, head
        is_call = bool(_HEAD.match(head)[2])  # type: ignore[index]
        for step, inner, below in _children(body):
            if inner.startswith("*"):
                continue
            if is_call and step in _EXPLICIT and not inner:
                yield from self._walk(inner, below, prefix)
            elif isinstance(step, int):
                yield from self._walk(inner, below, f"{prefix}[{step}]")
            else:
                yield from self._walk(inner, below, f"{prefix}.{step}" if prefix else step)


def _child(body: str, step: Key | Index, *, is_call: bool) -> tuple[str, str] | None:
    """Returns the text after the key and the lines below it of one entry in the lines of a container."""
    if isinstance(step, Index):
        items = [(head, below) for name, head, below in _children(body) if name == step.position]
        if items:
            return items[0]
    else:
        indent = len(body) - len(body.lstrip(" "))
        # A key is written in quotes if YAML would read it as something else than a string.
        name = "|".join(re.escape(text) for text in (str(step.name), json.dumps(str(step.name))))
        match = re.search(rf"^ {{{indent}}}(?:{name}):(?: ([^\n]*))?$", body, re.MULTILINE)
        if match is not None:
            return match[1] or "", _below(body, match.end() + 1, indent + 1)
    if is_call:
        for explicit, head, below in _children(body):
            if explicit in _EXPLICIT and not head and (found := _child(below, step, is_call=False)):
                return found
    return None


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
        return "\n".join(line.strip() for line in body.split("\n")).strip("\n")
    if rest or not body.strip():
        return plain_value(rest)
    items = list(_children(body))
    if items and all(isinstance(name, int) and inner and inner[0] not in "&!*" for name, inner, _ in items):
        return f"[{', '.join(inner for _, inner, _ in items)}]"
    return "[...]" if items and isinstance(items[0][0], int) else "{...}"
