"""Findings about templates whose text has no effect, or replaces more of a parent than was meant.

The input is the templates of a load after they have run; the output is diagnostics. Invariant: no finding stops a
render.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence

from forgather.aliases import alias_of
from forgather.config._jinja.environment import LoadedTemplate, RunEnvironment
from forgather.config._jinja.loader import read_text
from forgather.config._jinja.static_analysis import BlockContents, template_contents
from forgather.config._jinja.unused_names import finding_in, is_field_read, is_own, unread_sets, unread_variables
from forgather.errors import Diagnostic, ForgatherError, Severity, closest
from forgather.source import Span

_ENOUGH = 3
_SHOWN = 3
_PLAIN = ("", "!dlist", "!dict")


def replaced_blocks(
    template: LoadedTemplate, parents: Sequence[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields a finding for each block of a template that drops contents of the parents' block.

    Templates from outside the project have no findings.
    """
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
            yield finding_in(template, environment, line, "FG137", message, severity, hint)


Found = tuple[Severity, str, str]


def _lost_keys(name: str, own: BlockContents, above: BlockContents) -> Found | None:
    lost = [key for key in above.keys if key not in own.keys]
    # Replacing a small block as a whole is common, and no sign of a mistake.
    if not own.keys or len(lost) < _ENOUGH:
        return None
    if not own.opening.startswith("!") and len(lost) < len(above.keys):
        message = f"[{name}] drops {len(lost)} settings of its parent ({_listed(lost)})"
        hint = "did you mean to keep them? Begin the block with `== super()`; to replace them all, write them out"
        return Severity.WARNING, message, hint
    # A block with another constructor has other keys, which is no mistake.
    if len(lost) == len(above.keys) and _shape(own) in _PLAIN:
        message = f"[{name}] replaces the {len(lost)} entries of its parent ({_listed(lost)})"
        return Severity.LINT, message, "to keep them, begin the block with `== super()`"
    return None


def _shape(held: BlockContents) -> str:
    """Returns the tag at the beginning of a block, without the name of the object; "" if the block has no tag."""
    if not held.opening.startswith("!"):
        return ""
    return held.opening.split(":@")[0].split("@")[0]


def _lost_sets(
    name: str, own: BlockContents, above: BlockContents, template: LoadedTemplate, environment: RunEnvironment
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


def _above(name: str, parents: Sequence[LoadedTemplate], environment: RunEnvironment) -> tuple[BlockContents, bool]:
    """Returns the contents of a block in the parents, and whether any parent has the block."""
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
    return BlockContents(keys=tuple(keys), opening=opening, sets=tuple(sets)), met


def _held(template: LoadedTemplate, name: str) -> BlockContents | None:
    found = next((held for block, held in template.namespace["fg_held"] if block == name), None)
    return None if found is None else BlockContents(*found)


def _included(name: str, environment: RunEnvironment) -> BlockContents:
    """Returns the contents of a template that a replaced block would have included."""
    if inline := environment.library.inline.get(name):
        return template_contents(inline[0].text)
    path = environment.library.on_search_path(name) if name and not os.path.isabs(name) else None
    try:
        return template_contents(read_text(path)) if path else BlockContents()
    except ForgatherError:
        return BlockContents()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


_NEAR = 0.7
_A_SLIP = 0.85

Blocks = dict[str, tuple[int, tuple[str, ...]]]


def findings(environment: RunEnvironment, given: Collection[str] = ()) -> tuple[Diagnostic, ...]:
    """Returns the findings about the templates of a load and about the variables that they were given.

    Args:
        environment: the environment in which the templates ran.
        given: the names of the variables that an option or a Python caller has set.
    """
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
                # A template that is loaded twice has each finding twice.
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
        # A block inside another block is printed with it, and needs no parent.
        if around or name in known or name in environment.called_blocks:
            continue
        meant = alias_of("block", name)
        near = meant.name if meant and meant.name in known else None
        # A block that the template has already overridden cannot be meant a second time.
        near = near or closest(name, sorted(known - set(blocks)), cutoff=_NEAR)
        # `models` next to `model` is another word and not a misspelling, so a mere suffix never counts as near.
        near = near or closest(name, [one for one in sorted(known) if not name.startswith(one)], cutoff=_A_SLIP)
        message = f"the block '{name}' has no effect: no parent of '{template.name}' has a block of that name"
        severity = Severity.ERROR if near else Severity.WARNING
        hint = f"did you mean '{near}'?" if near else _blocks_hint(sorted(known))
        yield finding_in(template, environment, line, "FG130", message, severity, hint)


def _swallowed_blocks(
    template: LoadedTemplate, parents: list[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields an error for each block that a template has inside a bracket block, and its parents have outside of it.

    A bracket block begins with a line `[name]`. The inner block replaces the parents' block of its name, and is also
    printed inside the bracket block.
    """
    blocks: Blocks = template.namespace["fg_blocks"]
    for name, (line, around) in blocks.items():
        hosts = [parent for parent in parents if name in parent.namespace["fg_blocks"]] if around else []
        outer = _line(template, blocks[around[-1]][0]) if hosts else ""
        if not outer.startswith("["):
            continue
        # A parent also has it inside one of these blocks, so the nesting is meant.
        if any(set(around) & set(host.namespace["fg_blocks"][name][1]) for host in hosts):
            continue
        first = hosts[-1]
        place = first.definition.span(first.namespace["fg_blocks"][name][0])
        indented = _line(template, line).startswith("[")
        subject = f"the indent of '[{name}]' puts it" if indented else f"the block '{name}' is"
        message = f"{subject} inside the block '{around[-1]}'; '{first.name}' has it outside, at {place}"
        hint = f"write '[{name}]' at the start of the line"
        if not indented:
            hint = f"begin it with '[{name}]', or end the other one with `-- endblock {around[-1]}`"
        yield finding_in(template, environment, line, "FG135", message, Severity.ERROR, hint)


def _line(template: LoadedTemplate, number: int) -> str:
    return template.definition.text.split("\n", number)[number - 1].strip()


def _blocks_hint(known: list[str]) -> str | None:
    if not known:
        return "the parents have no blocks"
    return "blocks of the parents: " + ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")


def _near_headers(
    template: LoadedTemplate, parents: list[LoadedTemplate], environment: RunEnvironment
) -> Iterator[Diagnostic]:
    """Yields an error for each line that is not the header of a parent's block only because of a bracket or space."""
    known = {name for parent in parents for name in parent.blocks}
    before = ""
    for number, line in enumerate(template.definition.text.split("\n"), start=1):
        text = re.split(r"\s##", line, maxsplit=1)[0].rstrip()
        header = _NEARLY_HEADER.fullmatch(text)
        # After an open bracket or a key, the same text is part of a value.
        if header and header["name"] in known and not before.endswith(_OPEN) and (fault := _header_fault(header)):
            message, hint = (
                f"a block header {fault}: [{header['name']}]",
                f"write '[{header['name']}]' alone on its line",
            )
            yield finding_in(template, environment, number, "FG138", message, Severity.ERROR, hint)
        before = text or before


_OPEN = (":", ",", "[", "(", "{", "|", ">")
_NEARLY_HEADER = re.compile(
    r"(?P<open>[\[({]*)[ \t]*(?P<name>[A-Za-z_]\w*)!?[ \t]*(?P<close>[])}]*)(?P<colon>[ \t]*:)?"
)


def _header_fault(header: re.Match[str]) -> str | None:
    """Returns why a line is not a block header; None if the line is a block header or a plain word."""
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
        return "has a ':' after it"
    return "has spaces inside" if re.search(r"\[[ \t]|[ \t]\]", header[0]) else None


def _outside(
    template: LoadedTemplate,
    parents: list[LoadedTemplate],
    environment: RunEnvironment,
    reported: Collection[Span | None],
) -> Iterator[Diagnostic]:
    known = {name for parent in parents for name in parent.blocks}
    for line, text in template.dropped.items():
        # A malformed header is dropped text as well, and was reported with the better hint.
        if template.definition.span(line) in reported:
            continue
        shown = f": {text[:60]!r}" if text else ""
        key = re.match(r"(\w+)\s*:(\s|$)", text or "")
        is_block = key is not None and key[1] in known
        as_block = f"to change '{key[1]}' of the parent, write the block [{key[1]}]" if key and is_block else None
        as_block = as_block or (_block_of(key[1], parents) if key else None)
        message = f"text outside of any block has no effect in a template that extends another{shown}"
        severity = Severity.ERROR if is_block else Severity.WARNING
        hint = as_block or _meant(text or "") or "move it into a block, or remove it"
        yield finding_in(template, environment, line, "FG131", message, severity, hint)


def _block_of(key: str, parents: list[LoadedTemplate]) -> str | None:
    """Returns a hint for a key outside of blocks, such as the block in which a parent writes the key."""
    alias = alias_of("setting", key)
    # Another tool's name for something that is no setting here: the table says where it belongs.
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
    """Returns a hint for a line outside of blocks that is nearly a header or a statement."""
    if header := re.match(r"\[\s*(\w+)!?\s*\]", text):
        return f"a block header is alone on its line, without spaces inside or anything after it: [{header[1]}]"
    if statement := re.match(r"--?(include|extends|import|from|set|block|if|for)\s", text):
        return f"did you mean `-- {statement[1]}`?"
    return None


def _sub_templates(environment: RunEnvironment) -> Iterator[Diagnostic]:
    library = environment.library
    # By identity, because several files may define sub-templates of one name.
    used = {id(found) for found in library.used}
    for name, definitions in library.inline.items():
        if not any(id(found) in used for found in definitions):
            close = closest(name, sorted(library.asked - {name}), cutoff=_NEAR)
            yield Diagnostic(
                code="FG132",
                message=f"the sub-template '{name}' is never used, so its text is lost",
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
