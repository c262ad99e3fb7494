"""What a render left without effect: findings, judged when it is over.

Takes the templates of a load as they were run, gives diagnostics. Keeps true: nothing here stops a render.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from forgather.aliases import alias_of
from forgather.config._jinja.block_override_check import replaced_blocks
from forgather.config._jinja.environment import LoadedTemplate, RunEnvironment
from forgather.config._jinja.unused_names import unread_sets, unread_variables
from forgather.errors import Diagnostic, Severity, closest
from forgather.source import Span

_NEAR = 0.7
_A_SLIP = 0.85

Blocks = dict[str, tuple[int, tuple[str, ...]]]


def findings(environment: RunEnvironment, given: Collection[str] = ()) -> tuple[Diagnostic, ...]:
    """Returns what the templates of a load say that nothing reads, and which of the given variables nothing reads."""
    found: dict[tuple[str, Span | None], Diagnostic] = {}
    by_use = {template.use: template for template in environment.templates}
    for template in environment.templates:
        parents = _parents(template, environment, by_use)
        if parents:
            headers = list(_near_headers(template, parents, environment))
            for item in (
                *headers,
                *_idle_blocks(template, parents, environment),
                *_swallowed_blocks(template, parents, environment),
                *_outside(template, parents, environment, {header.span for header in headers}),
                *replaced_blocks(template, parents, environment),
            ):
                found.setdefault((item.code, item.span), item)
    for item in (*_sub_templates(environment), *unread_sets(environment)):
        found.setdefault((item.code, item.span), item)
    return (*unread_variables(environment, given), *found.values())


def _parents(
    template: LoadedTemplate, environment: RunEnvironment, by_use: dict[int, LoadedTemplate]
) -> list[LoadedTemplate]:
    """Returns the templates that `template` extends, nearest first."""
    parents: list[LoadedTemplate] = []
    current = template.use
    for position, use in enumerate(environment.library.uses):
        if use.why == "extends" and use.parent == current and position in by_use:
            parents.append(by_use[position])
            current = position
    return parents


def _idle_blocks(
    template: LoadedTemplate, parents: list[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    known = {name for parent in parents for name in parent.blocks}
    blocks: Blocks = template.namespace["fg_blocks"]
    for name, (line, around) in blocks.items():
        if around or name in known or name in environment.called_blocks:
            continue
        meant = alias_of("block", name)
        near = meant.name if meant and meant.name in known else None
        near = near or closest(name, sorted(known - set(blocks)), cutoff=_NEAR)
        # `models` beside `model` is another word, not a slip.
        near = near or closest(name, [one for one in sorted(known) if not name.startswith(one)], cutoff=_A_SLIP)
        yield Diagnostic(
            code="FG130",
            message=f"the block '{name}' has no effect: no parent of '{template.name}' has a block of that name",
            severity=Severity.ERROR if near else Severity.WARNING,
            span=template.definition.span(line),
            hint=f"did you mean '{near}'?" if near else _blocks_hint(sorted(known)),
            context=(environment.library.story(template.use),),
        )


def _swallowed_blocks(
    template: LoadedTemplate, parents: list[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields an error for each block that stands inside a bracket block, where the parents have it elsewhere.

    The block replaces the parents' one at its place there, and is printed inside the other block as well.
    """
    blocks: Blocks = template.namespace["fg_blocks"]
    for name, (line, around) in blocks.items():
        hosts = [parent for parent in parents if name in parent.namespace["fg_blocks"]] if around else []
        outer = _line(template, blocks[around[-1]][0]) if hosts else ""
        if not outer.startswith("["):
            continue
        if any(set(around) & set(host.namespace["fg_blocks"][name][1]) for host in hosts):
            continue
        first = hosts[-1]
        place = first.definition.span(first.namespace["fg_blocks"][name][0])
        indented = _line(template, line).startswith("[")
        subject = f"the indent of '[{name}]' puts it" if indented else f"the block '{name}' stands"
        yield Diagnostic(
            code="FG135",
            message=f"{subject} inside the block '{around[-1]}'; '{first.name}' has it outside, at {place}",
            severity=Severity.ERROR,
            span=template.definition.span(line),
            hint=f"write '[{name}]' at the start of the line"
            if indented
            else f"begin it with '[{name}]', or end the other one with `-- endblock {around[-1]}`",
            context=(environment.library.story(template.use),),
        )


def _line(template: LoadedTemplate, number: int) -> str:
    return template.definition.text.split("\n", number)[number - 1].strip()


def _blocks_hint(known: list[str]) -> str | None:
    if not known:
        return "the parents have no blocks"
    return "blocks of the parents: " + ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")


def _near_headers(
    template: LoadedTemplate, parents: list[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields an error for each line that is a header but for a bracket or a blank, of a block that a parent has."""
    known = {name for parent in parents for name in parent.blocks}
    before = ""
    for number, line in enumerate(template.definition.text.split("\n"), start=1):
        text = re.split(r"\s##", line, maxsplit=1)[0].rstrip()
        header = _NEARLY_HEADER.fullmatch(text)
        # Behind an open bracket or a key it is a part of a value.
        if header and header["name"] in known and not before.endswith(_OPEN) and (fault := _header_fault(header)):
            yield Diagnostic(
                code="FG138",
                message=f"a block header {fault}: [{header['name']}]",
                severity=Severity.ERROR,
                span=template.definition.span(number),
                hint=f"write '[{header['name']}]' alone on its line",
                context=(environment.library.story(template.use),),
            )
        before = text or before


_OPEN = (":", ",", "[", "(", "{", "|", ">")
_NEARLY_HEADER = re.compile(
    r"(?P<open>[\[({]*)[ \t]*(?P<name>[A-Za-z_]\w*)!?[ \t]*(?P<close>[])}]*)(?P<colon>[ \t]*:)?"
)


def _header_fault(header: re.Match[str]) -> str | None:
    """Returns what keeps a line from being a header; None for one that is a header, or a word."""
    opening, closing = header["open"], header["close"]
    if not opening and not closing:
        return None
    if not opening:
        return "lacks its opening bracket"
    if not closing:
        return "lacks its closing bracket"
    if len(opening) + len(closing) > 2:
        return "has a bracket too many"
    if opening + closing != "[]":
        return "has brackets of another kind"
    if header["colon"]:
        return "has a ':' behind it"
    return "has blanks inside" if re.search(r"\[[ \t]|[ \t]\]", header[0]) else None


def _outside(
    template: LoadedTemplate,
    parents: list[LoadedTemplate],
    environment: RunEnvironment,
    told: Collection[Span | None],
) -> Iterator[Diagnostic]:
    known = {name for parent in parents for name in parent.blocks}
    for line, text in template.dropped.items():
        if template.definition.span(line) in told:
            continue
        shown = f": {text[:60]!r}" if text else ""
        key = re.match(r"(\w+)\s*:(\s|$)", text or "")
        is_block = key is not None and key[1] in known
        as_block = f"to change '{key[1]}' of the parent, write the block [{key[1]}]" if key and is_block else None
        as_block = as_block or (_block_of(key[1], parents) if key else None)
        yield Diagnostic(
            code="FG131",
            message=f"text outside of any block has no effect in a template that extends another{shown}",
            severity=Severity.ERROR if is_block else Severity.WARNING,
            span=template.definition.span(line),
            hint=as_block or _meant(text or "") or "move it into a block, or remove it",
            context=(environment.library.story(template.use),),
        )


def _block_of(key: str, parents: list[LoadedTemplate]) -> str | None:
    """Returns where a key belongs that stands outside of blocks: into the block in which a parent writes it."""
    alias = alias_of("setting", key)
    if alias is not None and alias.verdict != "same":
        return alias.why
    name = key if alias is None else alias.name
    written = re.compile(rf"[ \t]+{re.escape(name)}:(?:[ \t]|$)")
    for parent in parents:
        blocks: Blocks = parent.namespace["fg_blocks"]
        starts = sorted((line, block) for block, (line, _) in blocks.items())
        for number, line in enumerate(parent.definition.text.split("\n"), start=1):
            around = [block for start, block in starts if start < number]
            if around and written.match(line):
                return f"write '{name}:' in the block [{around[-1]}]"
    return None if alias is None else f"did you mean '{name}'? Settings go into the block [trainer_args]"


def _meant(text: str) -> str | None:
    """What a line outside of blocks was meant to be, where it is nearly a header or a statement."""
    if header := re.match(r"\[\s*(\w+)!?\s*\]", text):
        return f"a block header is alone on its line, without spaces inside or anything after it: [{header[1]}]"
    if statement := re.match(r"--?(include|extends|import|from|set|block|if|for)\s", text):
        return f"did you mean `-- {statement[1]}`?"
    return None


def _sub_templates(environment: RunEnvironment) -> Iterator[Diagnostic]:
    library = environment.library
    used = {id(found) for found in library.used}
    for name, definitions in library.inline.items():
        if not any(id(found) in used for found in definitions):
            close = closest(name, sorted(library.asked - {name}), cutoff=_NEAR)
            yield Diagnostic(
                code="FG132",
                message=f"the sub-template '{name}' is used by nothing, and its text is lost",
                severity=Severity.WARNING,
                span=Span(definitions[0].file, definitions[0].line - 1),
                hint=f"did you mean '{close}'?" if close else f"include it (`-- include '{name}'`), or remove it",
            )
        if path := library.on_search_path(name):
            yield Diagnostic(
                code="FG133",
                message=f"the sub-template '{name}' hides the file of that name",
                severity=Severity.LINT,
                span=Span(definitions[0].file, definitions[0].line - 1),
                hint=f"the hidden file is {path}",
            )
