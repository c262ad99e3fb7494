"""Shell completion of `fgcli`, which `eval "$(register-python-argcomplete fgcli)"` switches on.

The input is the incomplete command line of the shell; the output is the possible next words. Configs are read, but the
code that they name is not run. No process is started.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import argcomplete

from forgather.cli.commands import explain
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_declared_options
from forgather.cli.parsing import Parser, build_parser, split_command
from forgather.errors import ForgatherError
from forgather.project.configs import config_files
from forgather.project.metadata_cache import load_meta
from forgather.project.workspace import find_project


def complete() -> None:
    """Prints the completions for the shell, and ends the process."""
    words = _words(os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", ""))
    at = split_command(words)
    parser, chosen, module = build_parser(words[at] if at is not None and words[at] != "" else None)
    before = _before(words if at is None else words[:at])
    if chosen is not None and getattr(module, "CONFIG_OPTIONS", False):
        # A config with errors has no options to offer; the command itself reports the errors.
        with suppress(ForgatherError):
            add_declared_options(chosen, Invocation(options=before))
    _attach(parser, before)
    if chosen is not None:
        _attach(chosen, before)
    finder: Any = argcomplete.autocomplete
    finder(parser, default_completer=_paths, always_complete_options="long")


def _words(line: str, point: str) -> list[str]:
    text = line[: int(point)] if point.isdigit() else line
    try:
        return shlex.split(text)[1:]
    except ValueError:  # the cursor is inside a quoted word
        return text.split()[1:]


def _before(words: list[str]) -> argparse.Namespace:
    parser = Parser(add_help=False)
    parser.add_argument("-p", "--project", nargs="?")
    parser.add_argument("-t", "--config", nargs="?")
    return parser.parse_known_args(words)[0]


def _attach(parser: argparse.ArgumentParser, before: argparse.Namespace) -> None:
    offers = {
        "config": lambda: _configs(before),
        "a": lambda: _configs(before),
        "b": lambda: _configs(before),
        "configs": lambda: _configs(before),
        "targets": lambda: _targets(before),
        "data_set": lambda: ["train", "eval", *_targets(before)],
        "paths": lambda: _values(before),
        "checkpoint": lambda: ["best", "last", "model"],
        "code": lambda: list(explain.error_codes()),
        "project": None,
        "folders": None,
        "output": None,
        "html": None,
    }
    for action in parser._actions:
        offer = offers.get(action.dest)
        if action.dest in offers:
            action.completer = _quiet(offer) if offer else _paths  # type: ignore[attr-defined]


def _quiet(offer: Any) -> Any:
    def completer(prefix: str, **_: object) -> list[str]:
        try:
            return [word for word in offer() if word.startswith(prefix)]
        except (ForgatherError, OSError):
            # The shell would show a message in the middle of the command line that is being typed.
            return []

    return completer


def _configs(before: argparse.Namespace) -> list[str]:
    meta = load_meta(find_project(before.project))
    return list(config_files(meta.searchdir, meta.config_prefix))


def _targets(before: argparse.Namespace) -> list[str]:
    return list(Invocation(options=before).undeclared().targets)


def _values(before: argparse.Namespace) -> list[str]:
    from forgather.config.insight.path_lookup import path_text
    from forgather.config.traverse import walk_places

    return [path_text(path) for path, _ in walk_places(Invocation(options=before).undeclared().graph)]


def _paths(prefix: str, **_: object) -> Iterator[str]:
    # argcomplete's own completer of file names starts a process each time the user presses the Tab key.
    folder, start = os.path.split(prefix)
    try:
        with os.scandir(folder or ".") as entries:
            names = sorted((entry.name, entry.is_dir()) for entry in entries if entry.name.startswith(start))
    except OSError:
        return
    for name, is_folder in names:
        if start or not name.startswith("."):
            yield os.path.join(folder, name) + ("/" if is_folder else "")
