"""The errors of a YAML document: parser errors with their cause, place and fix, and the collection of all errors.

The inputs are a `YamlProblem` and the rendered text, or the errors of the composer; the output is one located
`LoadError`. Invariant: a message describes the text (indents, tags, quotes) and not the state of the parser.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from forgather.config.graph import Node, Scalar
from forgather.config.yaml.events import YamlProblem
from forgather.config.yaml.source_positions import SourcePositions
from forgather.errors import BudgetError, LoadError
from forgather.source import Origin

_KEY = re.compile(r"\s*(?:- +)*(\"[^\"]*\"|'[^']*'|[^\s#:][^#:]*?)\s*:(?:\s|$)")
_KEYED = re.compile(r"\s*[^\s#:-][^#:]*:[ \t]+[^\s#|>]")
_BAD_TAG = re.compile(r"![^\s]*")


@dataclass(frozen=True, slots=True)
class _Finding:
    code: str
    message: str
    hint: str
    line: int
    column: int = 1


def located_error(problem: YamlProblem, text: str, places: SourcePositions) -> LoadError:
    """Returns the error to raise for a text that is not a document of the language.

    Args:
        problem: the failure of the parser.
        text: the rendered text.
        places: the map from lines of the rendered text to the user's files.
    """
    lines = text.split("\n")
    # The order matters: a later check would give a less exact answer for what an earlier one recognises.
    finding = (
        _document(problem, lines)
        or _character(problem)
        or _mark(problem, lines)
        or _tab(problem, lines)
        or _tag(problem, lines)
        or _column_zero(problem, lines)
        or _stray(problem, lines)
        or _open_quote(problem, lines)
        or _no_key(problem, lines)
        or _indent(problem, lines, places)
        or _item(problem, lines)
        or _known(problem, lines)
    )
    return places.fault(finding.message, finding.line, finding.column, code=finding.code, hint=finding.hint)


def _document(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    place = problem.line, problem.column
    if "second document" in problem.problem or "expected <document start>" in problem.problem:
        # `--- name ---` is a sub-template without its '#'.
        if header := re.match(r"-{3,}\s*([\w./-]+)\s*-{3,}\s*$", _line(lines, problem.line)):
            message = f"a second document begins here, named {header[1]!r}; a config is one document"
            return _Finding("FG215", message, f"a sub-template begins with #--- {header[1]} ---", *place)
        hint = "remove the '---' or '...'; a sub-template begins with `#--- name ---`"
        return _Finding("FG215", "a second document begins here; a config is one document", hint, *place)
    if "directive" in problem.problem:
        message = "%YAML, %TAG and other directives are not part of the language"
        return _Finding("FG215", message, "remove the line", *place)
    return None


def _character(problem: YamlProblem) -> _Finding | None:
    if "unacceptable character" not in problem.problem:
        return None
    number = re.search(r"#x([0-9a-fA-F]+)", problem.problem)
    name = f"U+{number[1].upper()}" if number else "a control character"
    escape = f"\\x{int(number[1], 16):02x}" if number else "\\x1b"
    hint = f'remove it, or write it as an escape in double quotes: "{escape}"'
    return _Finding("FG216", f"the character {name} is not allowed in a document", hint, problem.line, problem.column)


def _mark(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    # The parser reports some state after the mark, which is invisible in an editor.
    column = _line(lines, problem.line).find("\ufeff")
    if column < 0:
        return None
    message = "a byte order mark (U+FEFF) in the middle of the text"
    return _Finding("FG216", message, "remove the invisible character", problem.line, column + 1)


def _tab(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    # The parser may notice a tab only at the next token.
    for number in (problem.line, problem.start or problem.line):
        line = _line(lines, number)
        blank = line[: len(line) - len(line.lstrip())]
        if "\t" in blank:
            return _Finding("FG219", "a tab in the indentation", "indent with spaces", number, blank.index("\t") + 1)
    return None


def _tag(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    if "scanning a tag" not in problem.problem and "tag handle" not in problem.problem:
        return None
    line = _line(lines, problem.line)
    begin = max((match.start() for match in _BAD_TAG.finditer(line, 0, problem.column)), default=problem.column - 1)
    match = _BAD_TAG.match(line, begin)
    tag = match[0] if match else line[begin:]
    met = line[problem.column - 1 : problem.column]
    place = problem.line, begin + 1
    if not tag.isascii():
        message = f"the tag {tag!r} contains a non-ASCII character"
        return _Finding("FG211", message, "rename what it refers to", *place)
    if "tag handle" in problem.problem:
        return _Finding("FG210", f"unknown tag {tag!r}", "a tag is written !kind:module:symbol", *place)
    hint = f"put a space before {met!r}" if met else "put a space after the tag"
    return _Finding("FG211", f"the tag {tag!r} runs into {met!r}", hint, *place)


def _column_zero(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    # A tag at column 0 ends the mapping above, so the parser fails at one of the lines after it.
    for number in (problem.line, problem.line - 1, problem.start or problem.line):
        line = _line(lines, number)
        if number > 1 and line.startswith("!"):
            tag = line.split()[0]
            message = f"the tag {tag!r} is at column 0, outside the key that it should belong to"
            return _Finding("FG211", message, "indent it under its key, or put it on the line of the key", number)
    return None


def _stray(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    """Returns the finding for a closing bracket without an opening bracket, or for a tag before an alias; else None."""
    line, place = _line(lines, problem.line), (problem.line, problem.column)
    char = line[problem.column - 1 : problem.column]
    if "expected key" not in problem.problem and "'-' indicator" not in problem.problem:
        return None
    if char in ("]", "}"):
        return _Finding(
            "FG200", f"a {char!r} without an opening bracket", "remove it, or write the opening bracket", *place
        )
    # YAML forbids a tag on an alias, and the parser reports it as a missing key.
    if char == "*" and re.search(r"![^\s]+\s+$", line[: problem.column - 1]):
        hint = "an alias is the value of its anchor: put the tag there, or merge its keys with <<: *name"
        return _Finding("FG200", "a tag before an alias", hint, *place)
    return None


def _open_quote(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    """Returns the finding for an unclosed quote, if the next quote some lines below closes it; else None."""
    quote = _line(lines, problem.line)[: problem.column - 1].rstrip()[-1:]
    if quote not in ("'", '"') or not any(words in problem.problem for words in ("expected key", "'-' indicator")):
        return None
    # A quoted text of more than a hundred lines is unlikely, and the search must be bounded.
    for number in range(problem.line - 1, max(problem.line - 100, 0), -1):
        if _line(lines, number).count(quote) % 2:
            message = f"a quote that opens here is not closed before the line of {_name(_line(lines, problem.line))}"
            return _Finding("FG200", message, "close the quote", number, _line(lines, number).rfind(quote) + 1)
    return None


def _no_key(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    """Returns the finding for a line without `key: value` above the reported line, or for a second `: `; else None."""
    if "mapping values" in problem.problem:
        before = _line(lines, problem.line)[: problem.column - 1]
        # There is a complete `key: value` before the second colon on the same line.
        if re.search(r"[^\s:]:\s+[^\s'\"{\[#]", before):
            hint = 'quote the value: key: "a: b"'
            return _Finding("FG200", "a second ': ' in one line", hint, problem.line, problem.column)
        number = problem.line - 1
        while number > 1 and not _line(lines, number).strip():
            number -= 1
    elif "could not find expected ':'" in problem.problem:
        number = problem.start or problem.line
    else:
        return None
    line = _line(lines, number)
    if not line.strip() or line.lstrip()[0] in "#-'\"[{|>" or _KEY.match(line):
        if not re.match(r"\s*(--?\w|\[\s*\w+\s*\]\s*:?\s*$)", line):
            return None
    return _Finding("FG200", "a line that is neither 'key: value' nor '- item'", no_key_hint(line), number)


_NO_KEY_HINTS = (
    (r"(?:-{1,2}|=|=>|<<|>>)?\s*super\b\s*(?:\(\s*\))?$", "did you mean `== super()`?"),
    (r"-?\s*(include|extends|import|from)\s+['\"]", "did you mean `-- {0}`?"),
    (r"-?\s*(set|do|if|elif|for|block|end(?:if|for|block|set|macro))\s+\w", "did you mean `-- {0}`?"),
    (r"-?\s*(else|end(?:if|for|block|set|macro))$", "did you mean `-- {0}`?"),
    (r"(<{7}|={7}|>{7}|\|{7})(\s|$)", "a mark of a merge conflict: choose one side and remove it"),
    (r"--(\w+)", "a statement has a space after its mark: -- {0}"),
    (r"-(include|extends|import|from|set|block)\s", "did you mean `-- {0}`?"),
    (r"(==|=>|<<|>>)(\S.*)", "the mark needs one space after it: {0} {1}"),
    (r"=\s*(.*\(.*)", "to print a value write: == {0}"),
    (r"\[\s*(\w+)\s*\]", "a block header is alone on its line, without spaces inside or anything after it: [{0}]"),
    (r"[\w.-]+：", "this is not an ASCII colon: write ':'"),
    (r"([\w.-]+)\s*=", "write ':' in place of '='"),
    (r"([A-Za-z_][\w.-]*):(\S.*)", "put a space after the ':', as in `{0}: {1}`"),
)


def no_key_hint(line: str) -> str:
    """Returns a hint for a line that is not a `key: value`."""
    for pattern, hint in _NO_KEY_HINTS:
        if match := re.match(pattern, line.strip()):
            return hint.format(*match.groups())
    return "add the ':' after its key"


def _indent(problem: YamlProblem, lines: list[str], places: SourcePositions) -> _Finding | None:
    if not any(words in problem.problem for words in ("mapping values", "expected key", "'-' indicator", "block")):
        return None
    number = problem.line
    while number > 1 and not _line(lines, number).strip():
        number -= 1
    line = _line(lines, number)
    if not _KEY.match(line) and not line.lstrip().startswith("- "):
        return None
    indent = _width(line)
    neighbour = _neighbour(lines, number, indent)
    if neighbour is None:
        return None
    # The parser fails at the first line that does not fit, which may be right while the one before it is wrong.
    number, neighbour = _out_of_line(lines, number, neighbour, places)
    line = _line(lines, number)
    indent, other = _width(line), _width(_line(lines, neighbour))
    if places.builds_on(places.at(neighbour, other + 1), places.at(number, indent + 1)):
        # The user can fix the line of the own template, and not the inherited line after it.
        number, neighbour, indent, other = neighbour, number, other, indent
        line = _line(lines, number)
    message = (
        f"{_name(line)} is indented by {indent}, its neighbour {_name(_line(lines, neighbour))} "
        f"({places.span(neighbour, other + 1)}) by {other}"
    )
    hint = "give both lines the same indent"
    if statement := places.moved_by(number):
        hint = f"the spaces before {statement!r} indent the text after it: begin {statement!r} at column 0"
    elif symbol := re.search(r":\s+([\w./-]+:[A-Za-z_][\w.]*)\s*$", _line(lines, neighbour)):
        hint = f"is a tag missing, as in `!singleton:{symbol[1]}`?"
    # A key with a value on its line cannot have children as well.
    elif indent - other > 1 and re.search(r":\s+[^\s&|>#]", _line(lines, neighbour)):
        hint += f", or move the value of {_name(_line(lines, neighbour))} off its line"
    return _Finding("FG201", message, hint, number, indent + 1)


def _out_of_line(lines: list[str], number: int, neighbour: int, places: SourcePositions) -> tuple[int, int]:
    """Returns the line that is indented less than its two neighbours in the same file, and the line above it."""
    before = _written_above(lines, number)
    for odd, above, below in (
        (before, _written_above(lines, before), number),
        (number, before, _written_below(lines, number)),
    ):
        around = [_line(lines, at) for at in (above, odd, below)]
        widths = [_width(line) for line in around]
        files = {origin.span.file if origin else None for at in (above, odd, below) if (origin := places.at(at, 1))}
        if len(files) == 1 and widths[0] == widths[2] > widths[1] and all(map(_KEYED.match, around)):
            return odd, above
    return number, neighbour


def _written_above(lines: list[str], number: int) -> int:
    return next((at for at in range(number - 1, 0, -1) if _is_written(_line(lines, at))), 0)


def _written_below(lines: list[str], number: int) -> int:
    return next((at for at in range(number + 1, len(lines) + 1) if _is_written(_line(lines, at))), 0)


def _is_written(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _neighbour(lines: list[str], number: int, indent: int) -> int | None:
    """Returns the nearest earlier line with an indent other than `indent` and closest to it; None if there is none."""
    best: int | None = None
    for candidate in range(number - 1, 0, -1):
        line = _line(lines, candidate)
        if not _is_written(line):
            continue
        width = _width(line)
        if width == indent:
            return best
        if best is None or abs(width - indent) < abs(_width(_line(lines, best)) - indent):
            best = candidate
        if width < indent:
            return best
    return best


def _item(problem: YamlProblem, lines: list[str]) -> _Finding | None:
    """Returns the finding for a list item among the keys of a mapping; else None."""
    line = _line(lines, problem.line)
    item = re.match(r"\s*- +(.*?)\s*$", line)
    if item is None or "expected key" not in problem.problem:
        return None
    symbol = re.search(r":(?:[\w.]+\.)?([A-Za-z_]\w*)(?:@\w+)?\s*$", item[1]) if item[1].startswith("!") else None
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", symbol[1]).lower() if symbol else "name"
    hint = f"the value around it is a mapping: write `{name}: {item[1]}`"
    message = "a '- item' among the 'key: value' lines of a mapping"
    return _Finding("FG200", message, hint, problem.line, _width(line) + 1)


_WORDS = (
    ("mapping values are not allowed", "a second ': ' in one line", 'quote the value: key: "a: b"'),
    ("cannot start any token", "{char!r} cannot begin a value", "quote the value"),
    ("unexpected end of stream", "a quote that opens here is never closed", "close the quote"),
    ("unexpected document indicator", "a quote that opens here is never closed", "close the quote"),
    ("unknown escape", "an unknown escape in a double-quoted string", "double the backslash, or use single quotes"),
    ("escape code", "an escape that names no character", "write \\xXX, \\uXXXX or \\UXXXXXXXX"),
    ("scanning an anchor", "an anchor name that YAML cannot read", "letters, digits, '_' and '-' only: &name"),
    ("scanning an alias", "an alias name that YAML cannot read", "letters, digits, '_' and '-' only: *name"),
    ("unexpected ':'", "a ':' inside a plain value between brackets", 'quote the value: ["a:b"]'),
    ("flow sequence", "a '[' that is not closed, or a missing ','", "close it with ']'"),
    ("flow mapping", "a '{{' that is not closed, or a missing ','", "close it with '}}'"),
    ("could not find expected ':'", "a line that is neither 'key: value' nor '- item'", "add the ':' after its key"),
    ("'-' indicator", "a line that is not a '- item' of the sequence above", "give it the indent of the items above"),
    ("expected key", "a line that is not a 'key: value' of the mapping above", "give it the indent of its neighbours"),
    ("block sequence entries", "'- ' in a place where no item can begin", "put it on a line of its own"),
    ("flow node", "the text ends inside a '[' or '{{'", "close it"),
    ("node content", "a value is missing", "write the value"),
)


def _known(problem: YamlProblem, lines: list[str]) -> _Finding:
    char = _line(lines, problem.line)[problem.column - 1 : problem.column]
    for words, message, hint in _WORDS:
        if words in problem.problem:
            opened = ("quote", "'['", "'{", "neither")
            # For something that was opened and not closed, the opening is the place to fix.
            at_start = problem.start is not None and any(word in message for word in opened)
            line, column = (problem.start or 1, 1) if at_start else (problem.line, problem.column)
            return _Finding("FG200", message.format(char=char), hint.format(), line, column)
    return _Finding(
        "FG200", f"not YAML: {problem.problem}", "check the line above as well", problem.line, problem.column
    )


def _line(lines: list[str], number: int) -> str:
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _width(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _name(line: str) -> str:
    match = _KEY.match(line)
    return repr(match[1].strip("'\"")) if match else repr(line.strip()[:40])


_MAX_FAULTS = 10


class ErrorCollector:
    """The errors of one document, and the placeholders of values that could not be read."""

    def __init__(self) -> None:
        self._found: list[LoadError] = []
        self._holes: dict[int, Node] = {}

    def __contains__(self, node: Node) -> bool:
        """Returns whether a node is the placeholder for a value that could not be read."""
        return id(node) in self._holes

    def note(self, fault: LoadError | BudgetError, *, is_key: bool = False) -> None:
        """Records an error for the end of the document; raises the error now if reading cannot continue after it.

        Args:
            fault: the error.
            is_key: whether the value that could not be read is a key.
        """
        # After a key or a tag that was misread, further errors would be consequences of the first.
        if isinstance(fault, BudgetError) or is_key or fault.code == "FG211" or len(self._found) >= _MAX_FAULTS:
            raise fault
        self._found.append(fault)

    def placeholder(self, fault: LoadError | BudgetError, origin: Origin | None, *, is_key: bool) -> Node:
        """Records an error, and returns a placeholder for the value.

        Args:
            fault: the error.
            origin: the lines that wrote the value.
            is_key: whether the value is a key.
        """
        self.note(fault, is_key=is_key)
        node = Scalar(origin=origin, value=None)
        self._holes[id(node)] = node
        return node

    def joined(self, last: LoadError | None = None) -> LoadError | None:
        """Returns the first error, with all other errors in `others`; None if there are no errors.

        Args:
            last: the error that ended the reading; None if the document was read to its end.
        """
        faults = [*self._found, *([last] if last else [])]
        if not faults:
            return None
        first, *rest = faults
        first.others = (*first.others, *(found for fault in rest for found in (fault.diagnostic, *fault.others)))
        return first
