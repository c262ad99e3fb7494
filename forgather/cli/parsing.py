"""The argument parsers of `fgcli`, and the two parsing passes that the options of a config need.

The input is the command line; the output is the module of the command and an `Invocation`. Only the module of the
chosen command is imported. The config is read only if its options are needed: for an unknown argument, for `--help`,
and for completion.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from forgather import __version__
from forgather.aliases import alias_of
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_declared_options
from forgather.cli.palette import Look, hang_of_row, reflowed, shown_on, styled, width_of
from forgather.errors import ForgatherError, nearest
from forgather.redaction import hide
from forgather.spelling import close_matches

if TYPE_CHECKING:
    from forgather.project.dynamic_args import Declared

_GROUPS = {
    ("write", "fgcli new project my_project"): {
        "new": "make a working project or config",
        "code": "write Python that builds what a config builds, without this package's configs",
    },
    ("look", "fgcli -t tiny.yaml blame trainer_args.learning_rate"): {
        "ls": "list projects, their configs and what each is for",
        "pp": "print a config as text, after all templates",
        "graph": "print what a config would build",
        "blame": "print which line set each value, and what it replaced",
        "targets": "list the targets of a config",
        "plan": "plan the memory of a run before it runs",
        "select": "select hardware and a strategy for a model, by its name",
        "benchmark": "write what to measure for a model, by its name",
        "trefs": "show the templates that a config loaded, and why",
        "tlist": "list the templates that a project can use",
        "data": "show rows of a data set as the model gets them, with statistics",
        "diff": "show how the graphs of two configs, revisions or runs differ",
        "explain": "explain an error code",
    },
    ("run", "fgcli -p projects/tiny_llama -t tiny.yaml train --set trainer_args.max_steps=20"): {
        "train": "run the target 'main' of a config",
        "rerun": "repeat a past run from the record in its folder",
        "eval": "evaluate a checkpoint of a past run",
        "export": "write the model of a past run for other programs",
        "generate": "ask a trained model, and print its answers",
        "chat": "talk to a trained model in the terminal",
        "serve": "serve a trained model to clients of OpenAI's interface",
        "construct": "build targets and print them",
        "trust": "allow code to run",
    },
    ("many runs", "fgcli runs --where 'trainer_args.learning_rate<1e-3' --sort eval_loss"): {
        "sweep": "run a config many times with other values",
        "queue": "let runs wait until a place is free",
        "runs": "list runs, with filters and the values that differ; label, archive and remove them",
        "control": "pause, resume, save, stop or change a run that goes on",
        "compare": "compare runs: which one is best, and what differs, in the terminal or as a page",
        "watch": "show runs while they go on, in the terminal or in a browser",
    },
    ("verify", "fgcli check --all"): {
        "check": "find every error that can be found without running anything",
        "golden": "compare the graphs of a project's configs with their goldens, the snapshots in the project",
        "ckpt": "list, verify, show, export and prune checkpoints",
        "doctor": "check a machine, and machines together, before a run",
    },
}
COMMANDS = {name: summary for commands in _GROUPS.values() for name, summary in commands.items()}
_EPILOG = "'fgcli COMMAND --help' or 'fgcli help COMMAND' shows more; with -t it lists the config's own options, too."
_VALUED = ("-p", "--project", "-t", "--config")


class Parser(argparse.ArgumentParser):
    """An argument parser whose error messages have two lines: the problem with a suggestion, and the help command."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # An abbreviation would become ambiguous, or change its meaning, as soon as a config declares another option.
        super().__init__(allow_abbrev=False, **settings)

    def format_help(self) -> str:
        """Returns the help text, which has colors and is wrapped at words if the output is a terminal."""
        # The standard output is None if the caller has closed it.
        if sys.stdout is None:
            return super().format_help()
        if width_of(sys.stdout) is not None and self.description:
            self.description = reflowed(self.description)
        text = super().format_help()
        look = Look(_paint_help, _hang_of_help)
        return "\n".join(shown_on(sys.stdout, line, look) for line in text.split("\n"))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Python 3.11 takes the text after `--name=` for the end of the options, and gives the option an empty list.
        if action.option_strings and arg_strings == ["--"]:
            raise argparse.ArgumentError(action, "expected one argument")
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        """Prints a usage error, and ends the process with status 2."""
        sys.stderr.write(hide(f"error: {reworded(message)}\n  help: {self.prog} --help\n"))
        sys.exit(2)


def _paint_help(line: str) -> str:
    """Returns a line of a help text with colors for titles, names of commands and options, and examples."""
    title = re.match(r"(usage:|[\w][\w ./-]{,60}:$)(.*)|(  \w+)(  +fgcli .*)$", line)
    if title and title[1]:
        return styled("strong", title[1]) + title[2]
    if title:
        return styled("strong", title[3]) + styled("dim", title[4])
    name = re.match(r"( {2,8})((?:-|[a-z]|[A-Z]|fgcli )(?:\S| (?! ))*)(?=  |$)", line)
    return f"{name[1]}{styled('key', name[2])}{line[name.end() :]}" if name else line


def _hang_of_help(line: str) -> int:
    return hang_of_row(line) if line.startswith(" ") else 0


_KINDS = {"int": "a whole number", "float": "a number"}


def reworded(message: str) -> str:
    """Returns an error message of argparse in our own words, which do not depend on the Python version.

    Example:
        >>> reworded("argument --steps/-n: invalid int value: 'many'")
        "--steps: 'many' is not a whole number"
    """
    about = re.fullmatch(r"argument ([^:/]+)(?:/[^:]*)?: (.*)", message, re.DOTALL)
    if about is None:
        return message
    name, problem = about.groups()
    if choice := re.fullmatch(r"invalid choice: (.*) \(choose from (.*)\)", problem, re.DOTALL):
        known = choice[2].replace(chr(39), "")
        close = nearest(choice[1].strip(chr(39)), known.split(", "))
        meant = f": {close}" if close and close.startswith("did") else ""
        return f"{name}: {choice[1]} is not one of {known}{meant}"
    if kind := re.fullmatch(r"invalid (\w+) value: (.*)", problem, re.DOTALL):
        return f"{name}: {kind[2]} is not {_KINDS.get(kind[1], kind[1])}"
    return f"{name} needs a value" if problem == "expected one argument" else f"{name}: {problem}"


def split_command(arguments: Sequence[str]) -> int | None:
    """Returns the index of the command name among the arguments, or None if there is no command."""
    position = 0
    while position < len(arguments):
        if arguments[position] in _VALUED:
            position += 2
        elif arguments[position] == "--":
            return None
        elif arguments[position].startswith("-"):
            position += 1
        else:
            return position
    return None


def build_parser(command: str | None) -> tuple[Parser, Parser | None, ModuleType | None]:
    """Returns the parser of `fgcli`, the parser of the command, and the module of the command.

    The last two are None if there is no command or the command is unknown.
    """
    parser = Parser(prog="fgcli", description="Describe, check and run model training.", epilog=_EPILOG)
    parser.add_argument("-p", "--project", metavar="DIR", help="project folder (default: nearest above this folder)")
    parser.add_argument("-t", "--config", metavar="CONFIG", help="config (default: the project's default config)")
    parser.add_argument("--version", action="version", version=f"forgather {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, help=argparse.SUPPRESS)
    chosen: Parser | None = None
    module: ModuleType | None = None
    if command in COMMANDS:
        # A parser takes half a millisecond, so the others are made only for the list of commands.
        module = import_module(f"forgather.cli.commands.{command}")
        chosen = choices.add_parser(command, description=module.DESCRIPTION, epilog=module.EXAMPLES)
        module.configure(chosen)
    else:
        for name in COMMANDS:
            choices.add_parser(name, add_help=False)
        parser.epilog = f"{_listed_commands()}\n\n{_EPILOG}"
    return parser, chosen, module


def _listed_commands() -> str:
    """Returns the list of commands as text, in groups with an example for each group."""
    width = max(map(len, COMMANDS))
    groups = []
    for (title, example), commands in _GROUPS.items():
        rows = [f"    {name:<{width}}  {summary}" for name, summary in commands.items()]
        groups.append("\n".join([f"  {title:<{width + 2}}  {example}", *rows]))
    return "commands:\n" + "\n\n".join(groups)


def parse(arguments: Sequence[str]) -> tuple[ModuleType, Invocation]:
    """Returns the module of the command and the parsed arguments.

    Raises:
        SystemExit: with status 2 after wrong usage, or with status 0 after `--help` or `--version`.
        ForgatherError: if the options of a config are needed and the config cannot be read.
    """
    at = split_command(arguments)
    if at is not None and arguments[at] == "help":
        arguments = [*arguments[:at], *arguments[at + 1 : at + 2], "--help"]
        at = split_command(arguments)
    command = None if at is None else arguments[at]
    parser, chosen, module = build_parser(command)
    if chosen is None or module is None or at is None:
        parser.parse_args(_with_suggestion(parser, command, arguments))
        raise AssertionError("argparse ends the process when there is no known command")
    # The words as they were typed are needed later: other processes are started with them, and the run records them.
    given_words = tuple(arguments)
    if (complete := getattr(module, "completed_words", None)) is not None:
        arguments = [*arguments[: at + 1], *complete(arguments[at + 1 :])]
    handed: tuple[str, ...] = ()
    if getattr(module, "HANDS_THROUGH", False) and "--" in arguments[at:]:
        end = list(arguments).index("--", at)
        arguments, handed = arguments[:end], tuple(arguments[end + 1 :])
    declared: Declared | None = None
    if getattr(module, "CONFIG_OPTIONS", False):
        declared = _declare(parser, chosen, module, arguments, at)
    namespace, rest = parser.parse_known_args(arguments)
    into = next((name for name in getattr(module, "REST_INTO", ()) if name in namespace), None)
    if rest and into is not None and not any(map(_is_option, rest)):
        # argparse takes the words before the first option for all words of a list, and leaves those after it.
        getattr(namespace, into).extend(rest)
        rest = []
    if declared and (fault := declared.fault_of(arguments[at:], unknown=bool(rest))):
        raise fault
    if rest:
        chosen.error(_unknown(rest, chosen, module, Invocation(options=namespace, arguments=tuple(arguments))))
    _refuse_unused(namespace, module, chosen)
    names = [option.variable for option in declared.options] if declared else []
    variables = {name: getattr(namespace, f"declared_{name}") for name in names}
    given = {name: value for name, value in variables.items() if value is not None}
    return module, Invocation(options=namespace, arguments=given_words, variables=given, handed=handed)


def _is_option(word: str) -> bool:
    return word.startswith("-") and word != "-"


def _declare(parser: Parser, chosen: Parser, module: ModuleType, arguments: Sequence[str], at: int) -> Declared | None:
    after = arguments[at + 1 :]
    if not {"-h", "--help"}.isdisjoint(after):
        namespace = _before_command(parser, arguments[:at])
        try:
            # The options of a config are listed by the commands that train, and accepted by all others, too.
            shown = not getattr(module, "OPTIONS_UNTOLD", False)
            parsed = Invocation(options=namespace, arguments=tuple(arguments))
            declared = add_declared_options(chosen, parsed, shown=shown)
        except ForgatherError as error:
            chosen.epilog = f"{chosen.epilog}\n\nThe config's own options are not listed: {error.message}"
            return None
        for fault in declared.faults:
            chosen.epilog = f"{chosen.epilog}\n\nAn option of the config is not listed: {fault.error.message}"
        return declared
    namespace, rest = parser.parse_known_args(arguments)
    # Without an unknown argument, no option of the config is used, and the config need not be read.
    if not rest or rest[0].split("=")[0] in _VALUED:
        return None
    return add_declared_options(chosen, Invocation(options=namespace, arguments=tuple(arguments)))


def _before_command(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    bare = Parser(prog=parser.prog, add_help=False)
    bare.add_argument("-p", "--project")
    bare.add_argument("-t", "--config")
    return bare.parse_known_args(arguments)[0]


def _with_suggestion(parser: Parser, command: str | None, arguments: Sequence[str]) -> Sequence[str]:
    if command is not None:
        at = arguments.index(command)
        # The value of an unknown option before the command was taken for the command.
        if at and arguments[at - 1].startswith("--") and any(name in COMMANDS for name in arguments[at + 1 :]):
            parser.error(f"unknown argument {arguments[at - 1]!r}: options of a config go after the command")
        suggestion = nearest(command, list(COMMANDS))
        parser.error(f"there is no command {command!r}" + (f": {suggestion}" if suggestion else ""))
    if not {"-h", "--help", "--version"}.isdisjoint(arguments):
        return arguments
    if arguments and arguments[-1] in _VALUED:
        parser.error(f"{arguments[-1]} needs a value, and a command after it")
    parser.error("a command is missing")


def _refuse_unused(namespace: argparse.Namespace, module: ModuleType, chosen: Parser) -> None:
    about_one = getattr(module, "CONFIG_OPTIONS", False) or getattr(module, "TAKES_CONFIG", False)
    if namespace.config is not None and not about_one:
        chosen.error(f"{namespace.command!r} takes no config: leave out -t {namespace.config}")
    if namespace.project is not None and getattr(namespace, "folders", None):
        chosen.error(f"both -p {namespace.project} and {namespace.folders[0]!r} name a folder")


def _unknown(rest: list[str], chosen: Parser, module: ModuleType, invocation: Invocation) -> str:
    name = rest[0].split("=")[0]
    command = chosen.prog.split()[-1]
    if name in _VALUED:
        return f"{name} goes before the command, as in: fgcli {name} NAME {command}"
    hint: str | None = None
    if not name.startswith("-"):
        if getattr(module, "CONFIG_OPTIONS", False) and invocation.config is None:
            hint = f"a config is named before the command, as in: fgcli -t {rest[0]} {command}"
    else:
        known = {word.lstrip("-"): word for action in chosen._actions for word in action.option_strings}
        if known.get(name.lstrip("-")) == name:
            return f"{name} goes after the command, as in: fgcli {command} {name}"
        hint = _in_other_words(name, known) or _meant_setting(rest, known, invocation)
        if hint is None:
            close = close_matches(name.lstrip("-"), list(known), n=1)
            hint = f"did you mean {known[close[0]]!r}?" if close else _setting(rest, known, invocation)
    return f"unknown argument {name!r}" + (f": {hint}" if hint else "")


def _in_other_words(name: str, known: Mapping[str, str]) -> str | None:
    """Returns a hint for an option of another tool, or None if the option is not in the table of aliases."""
    plain = name.lstrip("-").replace("_", "-")
    if plain in known:
        return f"did you mean {known[plain]!r}?"
    option = alias_of("option", name)
    if option is not None and (not option.name or option.name in known):
        return option.why
    return None


def _meant_setting(rest: list[str], known: Mapping[str, str], invocation: Invocation) -> str | None:
    """Returns a hint for a setting that is an option in another tool, such as `--lr`, or None if there is none."""
    name, has_value, value = rest[0].partition("=")
    alias = alias_of("setting", name)
    if alias is None or "set" not in known:
        return None
    if alias.verdict != "same":
        return alias.why
    option = alias.name.replace("_", "-")
    if option in known:
        return f"did you mean {known[option]!r}?"
    return _setting([f"--{alias.name}={value}" if has_value else f"--{alias.name}", *rest[1:]], known, invocation)


def _setting(rest: list[str], known: Mapping[str, str], invocation: Invocation) -> str | None:
    """Returns a hint with the `--set` option that changes a value of the config.

    The value is the one whose name is close to that of the unknown option. The result is None if there is none.
    """
    from forgather.config.insight.path_lookup import near_paths, path_text
    from forgather.config.traverse import walk_places

    name, has_value, value = rest[0].partition("=")
    if not has_value:
        value = next((word for word in rest[1:2] if not word.startswith("-")), "VALUE")
    if "set" not in known:
        return None
    try:
        graph = invocation.undeclared().declared_graph
    except ForgatherError:
        return None
    found = near_paths(name.lstrip("-").replace("-", "_"), [path_text(path) for path, _ in walk_places(graph)])
    return f"did you mean --set {found[0]}={value}?" if found else None
