"""`fgcli explain`: prints the page of an error code, a setting or a template, or our name for another tool's word."""

from __future__ import annotations

import argparse
import os
import re
from dataclasses import asdict

from forgather.aliases import Alias, aliases_of
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
from forgather.errors import ProjectError, nearest
from forgather.project.locations import error_pages_dir
from forgather.project.reference import setting_page, settings, template_page, templates

DESCRIPTION = """Explain an error code (what it means, an example that leads to it, how to fix it), a setting of the
trainer (type, default, meaning, which trainers take it, where it is read), a template of the library (what it is for,
its blocks, an example), or a word of another tool (Lightning, DeepSpeed, Axolotl, ...): what it is called here."""
EXAMPLES = """examples:
  fgcli explain FG204
  fgcli explain trainer_args.learning_rate
  fgcli explain datasets/json_lines.yaml
  fgcli explain batch_size      what another tool's word is called here
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
    add_json(parser)


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
    if _print_reference(options.code, as_json=options.json):
        return 0
    words = aliases_of(options.code)
    if words:
        if options.json:
            write_json([alias._asdict() for alias in words])
        else:
            write_text("\n".join(_line(alias) for alias in words), look=Look(paint_page, hang_of_page))
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


def _line(alias: Alias) -> str:
    """Returns a line of text with our name for a word of another tool, or the reason why there is none."""
    kind, _, name = alias.to.partition(":")
    meant = f"here the {kind} {name}" if alias.verdict == "same" else alias.why
    tools = f" ({', '.join(alias.tools)})" if alias.tools and alias.tools != ("any",) else ""
    more = f": {alias.why}" if alias.verdict == "same" and alias.why else ""
    return f"{alias.word}{tools} as a {alias.kind}: {meant}{more}"
