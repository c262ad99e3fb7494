"""Loads rendered YAML text into a graph.

The input is a `RenderedText`; the output is a `Graph`. Invariants: every failure is a `LoadError` or `BudgetError` with
a place in the user's files; nothing that the config names is imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from forgather.config.graph import Entry, Graph, Mapped, Node, Scalar, describe
from forgather.config.lint.indent_check import unindented_settings
from forgather.config.rendered import RenderedText
from forgather.config.yaml.compose import Composer
from forgather.config.yaml.events import YamlProblem
from forgather.config.yaml.source_positions import SourcePositions
from forgather.config.yaml.yaml_errors import located_error
from forgather.errors import BudgetError, LoadError, Severity
from forgather.source import Origin, Site, SourceMap, Span
from forgather.spelling import begin_document

_FORBIDDEN = re.compile("[\x85\u2028\u2029\ud800-\udfff]|\r(?!\n)")
COMMAND_LINE = "<command line>"
# The code of a line that is nearly a block header: its text went into another block, which causes all further errors.
_NEARLY_HEADER = "FG138"


def load(rendered: RenderedText) -> Graph:
    """Returns the graph of a rendered config.

    Args:
        rendered: the rendered text with its origins and the limits for the document.

    Raises:
        LoadError: FG2xx if the text is not a document of the config language.
        BudgetError: FG220 if the document exceeds a limit.
    """
    # The number of comparisons for spelling suggestions is limited per document.
    begin_document()
    places = SourcePositions(rendered)
    try:
        composer = _compose(rendered, places, {})
    except LoadError as fault:
        raise _caused(fault, rendered) from None
    root = composer.root
    # `~` and a document without any text are alike for a user.
    if root is None or (isinstance(root, Scalar) and root.value is None):
        hint = "a config is a mapping of targets: main: !singleton:module:symbol"
        raise places.fault(f"{rendered.name} renders to an empty document", 1, 1, code="FG202", hint=hint)
    if not isinstance(root, Mapped) or root.tagged:
        hint = "write 'name: value' at column 0; a tag belongs after a key"
        raise places.fault(
            f"the root of a config is a mapping of targets, found {describe(root)}", 1, 1, code="FG202", hint=hint
        )
    targets = _targets(composer.root_entries, places)
    return Graph(
        targets=targets,
        definitions=composer.definitions,
        anchors=composer.names,
        diagnostics=(
            *composer.diagnostics,
            *composer.indents.findings(places),
            *unindented_settings(composer.root_entries),
            *composer.reuse.findings([entry.value for entry in targets.values()], places),
        ),
        kept=tuple(composer.anchored),
    )


def load_value(text: str, file: str = COMMAND_LINE, anchors: Mapping[str, Node] | None = None) -> Node:
    """Returns the node of a single YAML value, as on the command line.

    Args:
        text: the YAML text of the value, which may have tags.
        file: the file of the value in errors and origins, or a pseudo file.
        anchors: the nodes to which aliases in the value may refer, by anchor name.

    Raises:
        LoadError: FG2xx if the text is not a value of the config language.
    """
    starts = (0, *(found.end() for found in re.finditer("\n", text[:-1])))
    origins = tuple(Origin((Site(Span(file, line), file),)) for line in range(1, len(starts) + 1))
    rendered = RenderedText(name=file, file=file, text=text, source_map=SourceMap(text, starts, origins))
    composer = _compose(rendered, SourcePositions(rendered), anchors or {}, is_config=False)
    # `--set path=` has an empty value, which is null in YAML.
    return composer.root or Scalar(origin=origins[0], value=None)


def _compose(
    rendered: RenderedText, places: SourcePositions, anchors: Mapping[str, Node], *, is_config: bool = True
) -> Composer:
    text, budget = rendered.text, rendered.budget
    # Rendering has checked its own output; this is for texts that were not rendered, such as values of `--set`.
    if len(text) > budget.max_output_chars:
        message = f"a document of {len(text)} characters; the limit is {budget.max_output_chars}"
        raise places.fault(message, 1, 1, code="FG220", hint="move data out of the config", kind=BudgetError)
    _refuse_characters(text, places)
    # The module imports ruamel.yaml, which commands without a config do not need.
    from forgather.config.yaml.parser import read_events

    composer = Composer(places, budget, anchors, is_config=is_config)
    try:
        for event in read_events(text):
            composer.feed(event)
    except YamlProblem as problem:
        raise composer.faults.joined(located_error(problem, text, places)) or problem from None
    except LoadError as fault:
        raise composer.faults.joined(fault) or fault from None
    if (found := composer.faults.joined()) is not None:
        raise found
    return composer


def _caused(fault: LoadError, rendered: RenderedText) -> LoadError:
    """Returns the rendering error that most likely caused a load error; if there is none, the load error."""
    errors = [found for found in rendered.diagnostics if found.severity is Severity.ERROR]
    if not errors:
        return fault
    first, *rest = errors
    if first.code != _NEARLY_HEADER:
        # A nearly correct header explains every later error; other findings may be unrelated to the load error.
        rest += [fault.diagnostic, *fault.others]
    return LoadError(
        first.message,
        code=first.code,
        span=first.span,
        hint=first.hint,
        context=first.context,
        others=rest,
    )


def _refuse_characters(text: str, places: SourcePositions) -> None:
    # Line numbers of YAML and of an editor would differ after such a character.
    found = _FORBIDDEN.search(text)
    if found is None:
        return
    line, column = text.count("\n", 0, found.start()) + 1, found.start() - text.rfind("\n", 0, found.start())
    number = f"U+{ord(found[0]):04X}"
    surrogate = "\ud800" <= found[0] <= "\udfff"
    message = (
        f"{number} is half of a surrogate pair"
        if surrogate
        else f"{number} is a line break in YAML, but not in an editor"
    )
    hint = (
        "remove it" if surrogate else f'remove it, or write it as an escape in double quotes: "\\u{ord(found[0]):04x}"'
    )
    raise places.fault(message, line, column, code="FG216", hint=hint)


def _targets(entries: tuple[Entry, ...], places: SourcePositions) -> dict[str, Entry]:
    targets: dict[str, Entry] = {}
    for entry in entries:
        if not isinstance(entry.key, str):
            span = entry.span
            raise LoadError(
                f"the target name {entry.key!r} is not a string",
                code="FG217",
                span=span or places.span(1),
                # `[name]:` is a sequence as a key in YAML.
                hint="a block header is `[name]`, without a ':'" if isinstance(entry.key, tuple) else "quote it",
                context=places.context(1, 1)[:1],
            )
        # Duplicates were merged by the composer, so no entry is lost here.
        targets[entry.key] = entry
    return targets
