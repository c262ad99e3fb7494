"""Command-line options that several commands have in common, and options that a config declares.

The functions add options to an argparse parser. A config cannot declare an option whose name any command uses.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forgather.cli.invocation import Invocation
from forgather.cli.output import plural
from forgather.cli.source_excerpt import visible
from forgather.planner.memory_plan import SIZE_UNITS, parse_size

if TYPE_CHECKING:
    from forgather.project.dynamic_args import Declared, DeclaredOption

# Of all commands: a config is used with each of them, so its options must not collide with those of any.
OWN_NAMES = frozenset(
    {"-p", "--project", "-t", "--config", "--version", "-h", "--help", "--set", "--json", "-o", "--output", "--map",
     "--format", "--dry-run", "-r", "--recursive", "--extends", "--var", "--annotate", "--depth", "-v",
     "--verbose", "--all", "--strict", "--no-check", "--open", "--verify", "--force",
     "--nproc-per-node", "--nproc_per_node", "-d", "--devices", "--nnodes", "--node-rank", "--node_rank",
     "--master-addr", "--master_addr", "--master-port", "--master_port", "--print", "--world-size",
     "--rows", "--html", "--no-collator", "--gpus", "--nodes", "--hardware", "--no-plan", "--memory", "--calibrate",
     "--resume", "--allow-missing", "--allow_missing", "--allow-changed", "--allow_changed"}
)  # fmt: skip


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--json` to a parser."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def a_name(text: str) -> str:
    """Converts a command-line argument to a name; an empty text, as from an unset shell variable, is an error."""
    if text:
        return text
    raise argparse.ArgumentTypeError("'' is not a name")


NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
"""A decimal number, without the words for infinity and NaN."""


def a_time(text: str) -> float:
    """Returns the value of an option that is a time in seconds.

    Raises:
        argparse.ArgumentTypeError: if it is not a finite number above 0.
    """
    if NUMBER.fullmatch(text) and 0 < float(text) < 1e9:
        return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def column_names(text: str) -> dict[str, str]:
    """Converts `text=review,label=stars` to a mapping, as an argparse type."""
    pairs = [pair.partition("=") for pair in text.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    if twice := next((name for name in names if name and names.count(name) > 1), None):
        raise argparse.ArgumentTypeError(f"{text!r} names a column for {twice!r} twice")
    if all(name and column for name, (_, _, column) in zip(names, pairs, strict=True)):
        return {name.strip(): column for name, _, column in pairs}
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=COLUMN, as in text=review,label=stars")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--checkpoint WHICH` to a parser, for a command that takes the weights of a run."""
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        type=a_name,
        help="a step, 'best', 'last' (the newest intact one) or 'model' (the model that the run saved at its end); "
        "default: last, or model if there is no checkpoint",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Adds the option `-o FILE` to a parser."""
    parser.add_argument("-o", "--output", metavar="FILE", help="write to FILE instead of the terminal")


def add_set(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--set PATH=VALUE` to a parser."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        type=path_and_value,
        metavar="PATH=VALUE",
        help="change a value of the graph, as trainer_args.max_steps=10; +PATH=VALUE adds one",
    )


def add_var(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--var NAME=VALUE` to a parser."""
    parser.add_argument(
        "--var",
        dest="construction_variables",
        action="append",
        type=path_and_value,
        metavar="NAME=VALUE",
        help="value for a !var of the config, as YAML",
    )


def construction_variables(invocation: Invocation) -> dict[str, object]:
    """Returns the values of the `--var` options, by variable.

    Raises:
        ForgatherError: if a value is not plain YAML data.
    """
    from forgather.config.load import load_value
    from forgather.errors import ForgatherError
    from forgather.project.literal import plain_value

    found: dict[str, object] = {}
    for name, text in invocation.options.construction_variables or ():
        try:
            found[name] = plain_value(load_value(text), f"--var {name}")
        except ForgatherError as error:
            error.context = (f"--var {name}={text}",)
            raise
    return found


def path_and_value(text: str) -> tuple[str, str]:
    """Converts a command-line argument `path=value` to the pair (path, value), as an argparse type.

    Example:
        >>> path_and_value("optimizer.lr=3e-4")
        ('optimizer.lr', '3e-4')
    """
    from forgather.config.override import split_assignment
    from forgather.errors import GraphError

    with suppress(GraphError):
        path, value = split_assignment(text)
        if path.strip("+"):
            return path, value
    raise argparse.ArgumentTypeError(f"{text!r} is not PATH=VALUE, as in trainer_args.max_steps=10")


def memory_size(text: str) -> int:
    """Converts a command-line argument such as 24GB or 22.5GiB to a number of bytes, as an argparse type.

    Example:
        >>> memory_size("24GB")
        24000000000
    """
    size = parse_size(text)
    if size is None:
        units = ", ".join(SIZE_UNITS)
        raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0 with a unit ({units}), as in 24GB")
    return size


def comma_separated(text: str) -> tuple[str, ...]:
    """Converts a comma-separated command-line argument to a tuple of words, as an argparse type."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def add_declared_options(parser: argparse.ArgumentParser, invocation: Invocation, *, shown: bool = True) -> Declared:
    """Adds the options that a config declares to a parser, and returns these options.

    Args:
        parser: the parser of the command.
        invocation: the parsed arguments, which name the config.
        shown: True to list the options in the help. If False, no option is added, and the help says which command
            lists them.

    Raises:
        ForgatherError: if the config cannot be read.
    """
    from forgather.project.dynamic_args import Declared, read_options

    project = invocation.undeclared()
    declared = read_options(project.declared_graph, reserved=OWN_NAMES)
    options = declared.options
    if options and not shown:
        names = f"{project.config_name} declares {plural(len(options), 'option')}"
        parser.epilog = f"{parser.epilog}\n\n{names}, which can be used here, too: see 'fgcli train --help'"
        return Declared([], declared.faults)
    if options:
        group = parser.add_argument_group(f"options of {project.config_name}")
        for option in options:
            group.add_argument(*option.names, **_settings(option))
    return declared


def _settings(option: DeclaredOption) -> dict[str, Any]:
    shown = "" if option.default is None else f"(default: {option.default})"
    settings: dict[str, Any] = {
        # Without a prefix, a variable of the config could replace an option of the command in the namespace.
        "dest": f"declared_{option.variable}",
        # None marks an option that was not given; the template then uses its own default.
        "default": None,
        # argparse formats a help text with `%`.
        "help": visible(" ".join(part for part in (option.help, shown) if part)).replace("%", "%%"),
    }
    if option.action.is_flag:
        return settings | {"action": option.action.value}
    if option.type is bool:
        return settings | {"action": argparse.BooleanOptionalAction}
    settings["action"] = option.action.value
    settings["type"] = option.type
    settings["metavar"] = option.variable.upper()
    if option.choices:
        read: Callable[[Any], Any] = option.type
        settings["choices"] = [read(choice) for choice in option.choices]
        settings["metavar"] = visible("{" + ",".join(str(choice) for choice in option.choices) + "}")
    return settings
