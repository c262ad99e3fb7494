"""`fgcli explain`: prints the page of an error code, a setting or a template, or our name for another tool's word."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict

from forgather.aliases import Alias, aliases_of, read_aliases
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json
from forgather.cli.output import columns, write_json, write_text
from forgather.cli.palette import (
    Look,
    hang_of_page,
    hang_of_reference,
    hang_of_row,
    paint_page,
    paint_reference,
    paint_row,
    reflowed,
)
from forgather.errors import ProjectError, Severity, nearest
from forgather.project.locations import error_pages_dir
from forgather.project.reference import setting_page, settings, template_page, templates
from forgather.rule_conditions import UNKNOWN
from forgather.rules import shipped_rules

DESCRIPTION = """Explain an error code (what it means, an example that leads to it, how to fix it), a setting of the
trainer (type, default, meaning, which trainers take it, where it is read), a template of the library (what it is for,
its blocks, an example), or a word of another tool (Lightning, DeepSpeed, Axolotl, ...): what it is called here."""
EXAMPLES = """examples:
  fgcli explain FG204
  fgcli explain trainer_args.learning_rate
  fgcli explain datasets/json_lines.yaml
  fgcli explain batch_size      what another tool's word is called here
  fgcli explain strategy --tool lightning
  fgcli explain                 every code, one line each"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "code",
        nargs="?",
        metavar="CODE",
        help="an error code, as in FG204, a setting, a template of the library, or a word of another tool; without "
        "one, list all codes",
    )
    parser.add_argument("--tool", metavar="TOOL", type=_a_tool, help="the tool whose word it is, as in lightning")
    add_json(parser)


def _a_tool(text: str) -> str:
    """Converts a command-line argument to the name of a tool that the table of words knows."""
    tools = {
        tool
        for kind in read_aliases().values()
        if isinstance(kind, dict)
        for one in kind.values()
        for tool in one.get("tools", ())
    }
    if text in tools:
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of the tools: {', '.join(sorted(tools - {'any'}))}")


def error_codes() -> dict[str, str]:
    """Returns the titles of the error pages by error code, in the order of the codes."""
    folder = error_pages_dir()
    codes: dict[str, str] = {}
    for name in sorted(os.listdir(folder)):
        if re.fullmatch(r"FG\d{3}\.md", name):
            with open(os.path.join(folder, name), encoding="utf-8") as stream:
                codes[name[:-3]] = stream.readline().strip().lstrip("# ").partition(": ")[2]
    return codes


def run(invocation: Invocation) -> int:
    """Runs the command: prints the page, and returns the exit status."""
    options = invocation.options
    codes = error_codes()
    if options.code is None:
        if options.json:
            write_json(codes)
        else:
            write_text(
                "\n".join(f"{code}  {title}" for code, title in codes.items()), look=Look(paint_row, hang_of_row)
            )
        return 0
    if options.tool is None and _print_reference(options.code, as_json=options.json):
        return 0
    if _print_words(options.code, options.tool, as_json=options.json):
        return 0
    # `204`, and `[FG204]` as it is copied from a report, are accepted, too.
    code = options.code.upper().strip("[]")
    code = code if code.startswith("FG") else f"FG{code}"
    if code not in codes:
        raise _unknown(options.code)
    with open(os.path.join(error_pages_dir(), f"{code}.md"), encoding="utf-8") as stream:
        text = stream.read()
    if options.json:
        write_json({"code": code, "title": codes[code], "text": text})
    else:
        write_text(text if columns() is None else reflowed(text), look=Look(paint_page, hang_of_page))
    return 0


def _print_reference(word: str, *, as_json: bool) -> bool:
    """Prints the page of a setting or of a template; returns False if `word` names neither."""
    owner, _, name = word.rpartition(".")
    if owner in ("", "trainer_args") and (setting := settings().get(name)):
        facts, text = asdict(setting), setting_page(setting)
    elif template := templates().get(word):
        facts, text = asdict(template), template_page(template)
    else:
        return False
    if as_json:
        write_json(facts)
    else:
        write_text(text, look=Look(paint_reference, hang_of_reference))
    return True


def _print_words(word: str, tool: str | None, *, as_json: bool) -> bool:
    """Prints what a word of another tool is here; returns False if nothing is known about the word."""
    words = [
        alias for alias in aliases_of(word, tool) if tool is None or tool in alias.tools or alias.kind == "keyword"
    ]
    if words and as_json:
        write_json([alias._asdict() for alias in words])
        return True
    lines = [line for alias in words for line in _lines(alias)] or _said_by_the_trainer(word)
    if lines and as_json:
        write_json([{"word": word, "why": line} for line in lines])
    elif lines:
        write_text("\n".join(lines), look=Look(paint_page, hang_of_page))
    return bool(lines)


def _said_by_the_trainer(word: str) -> list[str]:
    """Returns what the arguments of a trainer say to a name that is neither a setting nor in the table of words."""
    rules = shipped_rules()["forgather.ml:AccelTrainingArguments"][0]
    inside = [(name, rule["instead"][word]) for name, rule in rules.settings.items() if word in rule.get("instead", ())]
    if inside:
        return [f"{word} as a key of {name}: {instead}" for name, instead in inside]
    if word not in rules.renamed and word not in rules.without_effect and word not in rules.instead:
        return []
    taken, found = rules.names({word: UNKNOWN}, {word: None})
    said = [f"{one.message}: {one.hint}" for one in found if one.severity is Severity.ERROR]
    return said or [f"{word} is here the setting {name}" for name in taken] or [one.message for one in found]


def _unknown(word: str) -> ProjectError:
    owner, _, name = word.rpartition(".")
    hint: str | None = "'fgcli explain' lists every code"
    if owner == "trainer_args":
        what, hint = f"there is no setting {name!r} of the trainer", nearest(name, [*settings()])
    elif name in ("yaml", "yml"):
        what, hint = f"the library has no template {word!r}", nearest(word, [*templates()])
    elif re.fullmatch(r"(?:FG)?\d+", word, re.I) or not word.isidentifier():
        what = f"there is no error code {word!r}"
    else:
        what = f"{word!r} is neither an error code, a setting of the trainer, nor a known word of another tool"
        hint = nearest(word, [*settings()]) or hint
    return ProjectError(what, code="FG415", hint=hint)


def _lines(alias: Alias) -> list[str]:
    """Returns lines of text with our name for a word of another tool, or the reason why there is none."""
    kind, _, name = alias.to.replace("inner:", "key of a mapping:").partition(":")
    own = alias.kind.replace("inner", "key of a mapping")
    meant = f"here the {kind} {name}" if alias.verdict == "same" else alias.why
    meant += ", and taken under this name, too" if alias.is_accepted else ""
    tools = f" ({', '.join(alias.tools)})" if alias.tools and alias.tools != ("any",) else ""
    more = f": {alias.why}" if alias.verdict == "same" and alias.why else ""
    lines = [f"{alias.word}{tools} as a {own}: {meant}{more}".rstrip(": ")]
    for value, ours in alias.values.items():
        given = ", ".join(f"{key}: {json.dumps(of)}" for key, of in ours.items()) if not isinstance(ours, str) else ours
        lines.append(f"  {alias.word}: {value}   {given or 'the default'}")
    for tool in alias.tools_that_differ:
        (other,) = [one for one in aliases_of(alias.word, tool) if one.kind == alias.kind]
        lines += [f"  in {tool}: {line.partition(': ')[2]}" for line in _lines(other)[:1]]
    return lines
