"""Translates exceptions of Jinja and Python into located errors in the terms of this language.

The inputs are an exception and the load in which it was raised; the output is a `ForgatherError` with the user's file
and line, the chain of templates that led to the line, and a hint. Invariants: a message shows text and line numbers of
the user's files only, never rewritten text or generated code; only names that the failing line could have used are
suggested.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.runtime import Macro
from jinja2.utils import internal_code, missing

from forgather.config._jinja.environment import LoadedTemplate, MissingTemplate
from forgather.config._jinja.filters import FILTERS, TESTS
from forgather.config._jinja.loader import Definition, Library
from forgather.config._jinja.parser import UnclosedStatement, UnknownStatement, open_block, open_quote, open_tag
from forgather.config._jinja.runtime_types import PlacedMessage, TracedNamespace
from forgather.config.syntax import desugar
from forgather.errors import BudgetError, ForgatherError, RenderError, SyntaxFault, first_line, nearest
from forgather.source import Span
from forgather.spelling import close_matches

# Rendering may raise Jinja's errors, ours, and any error of an expression over plain values; anything else is a bug.
RENDER_FAULTS = (
    ForgatherError,
    TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NameError,
    OSError,
    RuntimeError,
    StopIteration,
    SyntaxError,
    TypeError,
    ValueError,
)
_STATEMENTS = (
    "block break call continue do elif else endblock endcall endfilter endfor endif endmacro endraw endset endwith "
    "extends filter for from if import include macro raw set with"
).split()
_TOKENS = {
    "end of statement block": "the end of the statement",
    "end of print statement": "the end of the expression",
    "begin of statement block": "the start of a statement",
    "begin of print statement": "the start of an expression",
    "template data / text": "text",
    "end of template": "the end of the template",
}
_MEANT = {
    "elseif": "did you mean 'elif'?",
    "elsif": "did you mean 'elif'?",
    "end": "write the whole word, as `-- endif`",
}
_MAX_CALLS = 4
# The names of classes in Jinja's messages, in the words of a user.
_KINDS = {
    "TracedNamespace": "namespace", "Traced": "text", "str": "text", "TemplateReference": "template",
    "None": "empty value",
}  # fmt: skip
# The exceptions of Jinja have no codes, so the cause is read from the words of their messages.
_EXPECTED = re.compile(r"expected token '(.+?)', got '(.+)'", re.S)
_END = "the end of the statement"
_HINTS = {
    ("'='", _END): "compare with '=='",
    ("'integer'", _END): "an assignment is written `-- set name = value`",
    ("'float'", _END): "an assignment is written `-- set name = value`",
    ("'for'", "','"): "there are no comprehensions: use filters, as in `range(3) | list`, or a loop",
    ("'string'", "the end of the expression"): "join texts with `~`; there are no f-strings",
    ("'of'", "'in'"): "write `-- for item in items`",
}
_ODD_CHARACTERS = {char: "write plain quotes: '...'" for char in "“”‘’„«»`"} | {
    "&": "write 'and'", "!": "write 'not', or compare with '!='", "$": "write the name of a variable without '$'",
    "?": "a choice is written `a if condition else b`", ";": "write one statement per line",
    "\\": "write '/' in a path",
}  # fmt: skip
_ASKED = re.compile(r"\b(?:extends|include|import|from)\s+([\w-]+(?:[./][\w./-]*)?)")
_NAME = re.compile(r"\w+")
_NEARLY_EXTENDS = re.compile(r"\s*(?:-{1,2}|-\s+-|=+)?\s*(extends\s+['\"][^'\"]+['\"])\s*(?:##.*)?$")
_LITERAL = re.compile(r"^found '?(?:integer|float|string)'?")
_FAILING = (
    (
        re.compile(r".*\bstr\b"),
        "`~` joins values of any kind into a text, `| int` and `| float` convert a text to a number",
    ),
    (re.compile(r".*not iterable"), "a loop needs a list, a mapping or a text: `[3]`, `range(3)`"),
    (re.compile(r".*unpack"), "each item must be a list of as many values as the loop has names"),
    (re.compile(r".*division by zero|.*modulo by zero"), "test the divisor first"),
)
_MISSING_NAME = re.compile(r"'([^']*)' is undefined")
_NO_ATTRIBUTE = re.compile(r"'(.*)' has no attribute '(.*)'")
_NO_FILTER = re.compile(r"No (filter|test) named '(.*)'\.?( found\.)?")


# -- while a template is compiled


def syntax_fault(error: BaseException, found: Definition) -> SyntaxFault:
    """Returns the error for a template that cannot be compiled.

    Args:
        error: the exception of Jinja or of Python's compiler.
        found: the definition of the template.
    """
    line = getattr(error, "lineno", None) if isinstance(error, TemplateSyntaxError) else None
    span = found.span(line or 1)
    if isinstance(error, UnclosedStatement):
        return _unclosed(error, found, span)
    if isinstance(error, UnknownStatement):
        return _unknown(error, span)
    if isinstance(error, TemplateSyntaxError):
        # An unclosed quote or tag makes Jinja fail at a later line: the causes are looked for before its own message is
        # used.
        if quoted := open_quote(found.text.split("\n"), error.lineno):
            ending = f"end the text with {quoted[0]} on its own line"
            return SyntaxFault("the quote is not closed", code="FG101", span=found.span(quoted[1]), hint=ending)
        opened = open_tag(desugar(found.text))
        if opened and opened[1] <= error.lineno:
            mark, at = opened
            return SyntaxFault(
                f"'{mark}' is not closed",
                code="FG102",
                span=found.span(at),
                hint=f"end it with '{'}}' if mark == '{{' else '%}'}', or close a quote or bracket inside it",
            )
        name = re.search(r"\bendblock\s+(\w+)", "".join(found.text.split("\n")[error.lineno - 1 :][:1]))
        if name and "'end of statement block', got" in (error.message or ""):
            text = f"'endblock {name[1]}' does not match the block that is open"
            return SyntaxFault(text, span=span, hint="name the block that it closes, or write `-- endblock` alone")
        if opened_block := open_block(desugar(found.text)):
            tag, at = opened_block
            return SyntaxFault(
                f"block '{tag}' is not closed before the end of the block around it",
                code="FG102",
                span=found.span(at),
                hint="add a line `-- endblock`",
            )
        message, code, hint = _reworded(error.message or "it cannot be read")
        if "literal" in error.__dict__:
            message = _LITERAL.sub(f"found '{error.__dict__['literal']}'", message)
        # Jinja reads `{ {x} }` and `{{ x }` alike; for a user a bracket is missing.
        if error.message == "unexpected '}'":
            message, code, hint = "'{{' is not closed", "FG102", "close it with '}}'"
        return SyntaxFault(message, code=code, span=span, hint=hint)
    # Python's compiler reports "too many statically nested blocks" above twenty loops.
    if isinstance(error, RecursionError | MemoryError) or "nested" in str(error):
        return SyntaxFault(
            "the template is nested too deeply",
            code="FG124",
            span=span,
            hint="take parts of it into macros or includes",
        )
    if "integer string conversion" in str(error):
        return SyntaxFault("a number has more than 4,300 digits", code="FG101", span=span, hint="write it as a float")
    return SyntaxFault(f"it cannot be read: {first_line(error)[:200]}", code="FG101", span=span)


def _unclosed(error: UnclosedStatement, found: Definition, span: Span) -> SyntaxFault:
    where = f" before '{error.found}' on line {found.line - 1 + error.found_line}" if error.found else ""
    if error.found and error.found not in "".join(found.text.split("\n")[error.found_line - 1 :][:1]):
        where = " before the end of the block around it"  # the end of a bracket block is not in the user's text
    opener = "".join(found.text.split("\n")[error.lineno - 1 :][:1])
    block = re.search(r"\bblock\s+(\w+)", opener) if error.tag == "block" else None
    return SyntaxFault(
        f"block '{block[1]}' is not closed{where}" if block else f"'{error.tag}' is not closed{where}",
        code="FG102",
        span=span,
        hint=f"add a line `-- end{error.tag}`",
        expected=f"end{error.tag}",
        found=error.found,
    )


def _unknown(error: UnknownStatement, span: Span) -> SyntaxFault:
    if error.tag.startswith("end") or error.tag in ("else", "elif"):
        return SyntaxFault(
            f"'{error.tag}' has no open statement to close or to continue",
            code="FG103",
            span=span,
            hint="remove the line, or add the statement that it belongs to",
        )
    return SyntaxFault(
        f"there is no statement '{error.tag}'",
        code="FG103",
        span=span,
        hint=_MEANT.get(error.tag)
        or nearest(error.tag, _STATEMENTS)
        or f"to set a variable write `-- set {error.tag} = ...`; a line that begins with `-- ` is a statement",
    )


def _reworded(message: str) -> tuple[str, str, str | None]:
    if match := _EXPECTED.fullmatch(message):
        wanted, met = (_TOKENS.get(word, f"'{word}'") for word in match.groups())
        return f"found {met} where {wanted} was expected", "FG101", _HINTS.get((met, wanted)) or _HINTS.get((met, ""))
    if match := _NO_FILTER.fullmatch(message):
        kind, name = match.group(1), match.group(2)
        return f"there is no {kind} '{name}'", "FG104", nearest(name, sorted(FILTERS if kind == "filter" else TESTS))
    if message.startswith("Missing end of comment"):
        return "a comment is not closed", "FG102", "end it with '#}'"
    if message.startswith("Missing end of raw"):
        return "'raw' is not closed", "FG102", "add a line `-- endraw`"
    if match := re.fullmatch(r"block '(.*)' defined twice", message):
        return f"the block '{match.group(1)}' is defined twice in one template", "FG105", "rename one of them"
    if match := re.fullmatch(r"Expected an expression, got '(.*)'", message, re.S):
        met = _TOKENS.get(match.group(1), match.group(1))
        return f"found {met} where a value was expected", "FG101", "write the value, or remove the text before it"
    if match := re.fullmatch(r"unexpected '(.*?)'(?:, expected '(.*)')?\.?", message, re.S):
        met, wanted = (word and _TOKENS.get(word, f"'{word}'") for word in match.groups())
        if wanted:
            return f"found {met} where {wanted} was expected", "FG101", None
        return f"found {met} where a value was expected", "FG101", "write the value, or remove the text before it"
    if match := re.fullmatch(r"unexpected end of template, expected '(.*)'\.?", message):
        return f"the template ends where {_TOKENS.get(match.group(1), match.group(1))} was expected", "FG102", None
    if match := re.fullmatch(r"unexpected char (.*) at \d+", message):
        quote = match.group(1)[1:-1] in ("'", '"')
        hint = "a quote that opens here is not closed" if quote else _ODD_CHARACTERS.get(match.group(1)[1:-1])
        return f"unexpected character {match.group(1)}", "FG101", hint
    if message == "tag name expected":
        return "a statement without a name", "FG101", "quote it in YAML if it is text"
    return message.rstrip(".").replace("Jinja", "the template language"), "FG101", None


# -- while templates run


def render_fault(error: BaseException, library: Library) -> ForgatherError:
    """Returns the error for a render that failed, with its place and the chain of templates that led to the place.

    Args:
        error: the exception, whose traceback contains the templates and lines.
        library: the templates of the load.
    """
    frames = list(_template_frames(error.__traceback__))
    if isinstance(error, MissingTemplate):
        error = error.error
    made = error if isinstance(error, ForgatherError) else _translated(error, frames, library)
    if made.span is None:
        made.span = _innermost_span(frames, library)
    # Only now the failing line is known.
    if made.code == "FG111" and frames and made.found:
        # `extends base.yaml` without quotes is an attribute `yaml` of an undefined name `base` to Jinja.
        made.hint = _unquoted_template(str(made.found), made.hint or "", *frames[-1][:2]) or made.hint
    if not made.context:
        use = frames[-1][0].use if frames else 0
        if library.uses:
            calls = _macro_calls(error.__traceback__)
            made.context = (library.story(use), *(f"called at {call}" for call in calls if call != made.span))
    return made


def _macro_calls(traceback: TracebackType | None) -> list[Span]:
    """Returns the lines that call the macros in which a render failed, innermost first."""
    calls: list[Span] = []
    before: Span | None = None
    while traceback is not None:
        code, template = traceback.tb_frame.f_code, traceback.tb_frame.f_globals.get("__jinja_template__")
        # `internal_code` marks frames of Jinja's runtime, which a user has not written.
        if isinstance(template, LoadedTemplate) and code not in internal_code:
            if code.co_name == "macro" and before is not None:
                calls.append(before)
            before = template.definition.span(template.get_corresponding_lineno(traceback.tb_lineno))
        traceback = traceback.tb_next
    # A recursive macro is called at the same line again and again.
    return list(dict.fromkeys(calls[::-1]))[:_MAX_CALLS]


def _template_frames(traceback: TracebackType | None) -> Iterable[tuple[LoadedTemplate, int, dict[str, Any]]]:
    while traceback is not None:
        template = traceback.tb_frame.f_globals.get("__jinja_template__")
        if isinstance(template, LoadedTemplate) and traceback.tb_frame.f_code not in internal_code:
            yield template, template.get_corresponding_lineno(traceback.tb_lineno), traceback.tb_frame.f_locals
        traceback = traceback.tb_next


def _innermost_span(frames: Frames, library: Library) -> Span:
    if frames:
        template, line, _ = frames[-1]
        return template.definition.span(line)
    return library.used[-1].span(1) if library.used else Span("<config>", 1)


def _translated(error: BaseException, frames: Frames, library: Library) -> ForgatherError:
    if isinstance(error, RecursionError):
        return BudgetError(
            "the templates call themselves without end",
            code="FG123",
            hint="a macro, block or include that repeats itself needs a condition that ends it",
        )
    if isinstance(error, MemoryError):
        return BudgetError("the templates need more memory than is available", code="FG122", hint="make smaller values")
    if isinstance(error, SecurityError):
        return _undefined(str(error), frames, library)
    if isinstance(error, UndefinedError):
        made = _undefined(str(error), frames, library)
        if error.args and isinstance(placed := error.args[0], PlacedMessage):
            made.span = placed.template.definition.span(placed.line)
        return made
    # The sandbox refuses long ranges itself.
    if isinstance(error, OverflowError) and "MAX_RANGE" in str(error):
        return BudgetError("'range' has more than 100,000 items", code="FG120", hint="use a smaller range")
    if isinstance(error, TemplateError):
        return _runtime(error.message or "")
    # A text with origins is a text to whoever wrote the template.
    reason = first_line(error)[:200].replace("'Traced'", "'str'")
    made = RenderError(f"{_kind(error)}: {reason}", code="FG110", found=type(error).__name__)
    failing = (hint for pattern, hint in _FAILING if pattern.match(str(error)))
    made.hint = near_argument(str(error), frames) or next(failing, None)
    return made


def _kind(error: BaseException) -> str:
    if isinstance(error, OverflowError | ZeroDivisionError):
        return "the number cannot be computed"
    return f"the expression failed ({type(error).__name__})"


def _runtime(message: str) -> RenderError:
    if match := _NO_FILTER.fullmatch(message):
        text, code, hint = _reworded(message)
        return RenderError(text, code=code, hint=hint)
    if match := re.fullmatch(r"Required block '(.*)' not found", message):
        return RenderError(
            f"the block '{match.group(1)}' is required, and no template that extends this one defines it",
            code="FG119",
            hint=f"define it: `-- block {match.group(1)}` ... `-- endblock`",
        )
    if message == "extended multiple times":
        return RenderError("a template can extend one other only", code="FG113", hint="remove one `extends`")
    if "non-namespace" in message:
        return RenderError(
            "only an attribute of a namespace can be set",
            code="FG117",
            hint="create it first: `-- set ns = namespace()`; that of a parent template exists inside blocks only",
        )
    return RenderError(message or "the template fails", code="FG110")


def _undefined(message: str, frames: Frames, library: Library) -> RenderError:
    if match := _MISSING_NAME.fullmatch(message):
        name = match.group(1)
        return RenderError(f"'{name}' is not defined", code="FG111", found=name, hint=near_variable(name, frames))
    if match := re.match(r"the template '(.*)' \(imported on .*\) does not export the requested name '(.*)'", message):
        hint = (
            near_export(match.group(2), match.group(1), library)
            or "only macros and variables that are defined outside blocks can be imported"
        )
        return RenderError(f"'{match.group(1)}' has no macro or variable '{match.group(2)}'", code="FG111", hint=hint)
    if match := re.match(r"parameter '(.*)' was not provided", message):
        return RenderError(f"the macro is called without '{match.group(1)}'", code="FG111", hint="give it a value")
    if match := re.match(r"there is no parent block called '(.*)'", message):
        return _nothing_above(match.group(1), frames, library)
    if match := re.match(r"access to attribute '(.*)' of '(.*)' object is unsafe", message):
        return RenderError(
            f"a template may not use '{match.group(1)}' of {match.group(2).replace('Traced', '')}",
            code="FG117",
            hint="templates see plain values, and do not change them",
        )
    if match := _NO_ATTRIBUTE.fullmatch(message):
        kind, name = match.group(1).rsplit(".", 1)[-1].removesuffix(" object"), match.group(2)

        kind = _KINDS.get(kind, kind)
        near = near_attribute(name, frames) if kind == "namespace" else None
        hint = f"test it first, or give a default: `... | default(...)`; was '{name}' set before this line?"
        hint = near or hint
        return RenderError(f"'{name}' is not defined in this {kind}", code="FG111", found=name, hint=hint)
    return RenderError(message, code="FG111")


def _nothing_above(block: str, frames: Frames, library: Library) -> RenderError:
    """Returns the error for a `super()` without a parent block, or in a template without a parent."""
    template = frames[-1][0] if frames else None
    if template is None or any(use.why == "extends" and use.parent == template.use for use in library.uses):
        return RenderError(
            f"'super()' has nothing to print: no parent has a block '{block}'",
            code="FG119",
            hint="remove `super()`, or check the name of the block",
        )
    made = RenderError(
        "'super()' has nothing to print: this template has no `extends`",
        code="FG119",
        hint="begin with `-- extends '...'`, or remove `super()`",
    )
    for number, line in enumerate(template.definition.text.split("\n"), start=1):
        if meant := _NEARLY_EXTENDS.match(line):
            made.message = "this template has no `extends`: the line is read as text"
            made.span = template.definition.span(number)
            made.hint = f"did you mean `-- {meant[1]}`?"
            break
    return made


def _unquoted_template(name: str, near: str, template: LoadedTemplate, line: int) -> str | None:
    text = template.definition.text.split("\n")[line - 1 :][:1]
    match = _ASKED.search(text[0] if text else "")
    if match is None or name not in _NAME.findall(match[1]) or (match[1] == name and near.startswith("did you mean")):
        return None
    return f"quote the name of a template: '{match[1]}'"


Frames = list[tuple[LoadedTemplate, int, dict[str, Any]]]
"""The templates that were running, outermost first, each with the line that it was executing and its local names."""

_LOCAL = re.compile(r"l_\d+_(.*)", re.S)
_EXPORT = re.compile(r"^[ \t]*(?:--|<<|>>|\{%[-+]?)[ \t]*(?:macro|set)[ \t]+(\w+)", re.M)
_NO_ARGUMENT = re.compile(r"macro '(.*)' takes no keyword argument '(.*)'")


def near_variable(name: str, frames: Frames) -> str:
    """Returns a hint for a variable that is not defined."""
    if close_matches(name, ["super"], cutoff=0.8):
        return "did you mean 'super'?"
    # A misspelt variable is more likely one of the config than `range` or `dict`.
    known = {seen for seen in _visible(frames) if seen not in DEFAULT_NAMESPACE}
    known -= {"super", "self", "caller", "varargs", "kwargs"}
    return _close(name, sorted(known)) or f"set it before it is read, or give a default: `{name} | default(...)`"


def near_attribute(name: str, frames: Frames) -> str | None:
    """Returns a hint with the attribute whose name is closest to `name`; None if no name is close.

    The attributes are those of all namespaces in scope at the failing line.
    """
    # Jinja's namespace has no public way to list its attributes.
    spaces = [value for value in _visible(frames).values() if isinstance(value, TracedNamespace)]
    return _close(name, sorted({attribute for space in spaces for attribute in space._Namespace__attrs}))


def near_argument(message: str, frames: Frames) -> str | None:
    """Returns a hint for an unknown argument of a macro; None if Jinja's message is about something else."""
    match = _NO_ARGUMENT.match(message)
    if match is None:
        return None
    macros = [value for value in _visible(frames).values() if isinstance(value, Macro) and value.name == match[1]]
    return nearest(match[2], macros[0].arguments) if macros else "see the parameters in the definition of the macro"


def near_export(name: str, template: str, library: Library) -> str | None:
    """Returns a hint: the macro or variable in `template` whose name is closest to `name`; None if none is close."""
    texts = [found.text for found in library.used if found.name == template]
    return nearest(name, [exported for text in texts for exported in _EXPORT.findall(text)])


def _close(name: str, known: list[str]) -> str | None:
    hint = nearest(name, known)
    return hint if hint and hint.startswith("did") else None


def _visible(frames: Frames) -> dict[str, Any]:
    """Returns the names in scope at the failing line, with their values."""
    if not frames:
        return {}
    local = frames[-1][2]
    context = local.get("context")
    seen = dict(context.get_all()) if context is not None else {}
    # Compiled code keeps the names of loops and macros in locals such as `l_1_item`.
    for key, value in local.items():
        if (match := _LOCAL.fullmatch(key)) and value is not missing:
            seen[match[1]] = value
    return seen
