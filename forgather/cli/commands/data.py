"""`fgcli data`: shows rows as the model gets them, or prepares tokens. Runs the code that the data of a config name."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from forgather.cli.data_output import DataScreen
from forgather.cli.data_preparation import ACTIONS, count, refuse_options_of_others
from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_var, construction_variables, path_and_value
from forgather.cli.output import columns, print_findings, write_json, write_lines, write_text
from forgather.cli.palette import wants_color
from forgather.cli.trusting import ask_trust
from forgather.config.graph import Node
from forgather.errors import Diagnostic, ForgatherError, ProjectError, Severity, nearest
from forgather.project.data_targets import ChosenSet, DataTargets, with_targets
from forgather.project.project import Project

CONFIG_OPTIONS = True
EXECUTES = True
OPTIONS_UNTOLD = True
DESCRIPTION = """'show' prints rows of a data set as the model gets them, after the collator: which tokens are trained,
masked or padding, where documents start, how long rows are, which are duplicates. This builds the data set, the
collator and the tokenizer of a config, and no model. 'prepare FOLDER' tokenizes the texts of a config in parallel and
writes them as shards, which 'datasets/prepared.yaml' reads without tokenizing; the same command goes on after a kill.
'verify FOLDER' compares every byte of the shards with their digests; the exit status is 1 if anything differs."""
EXAMPLES = """examples:
  fgcli -t tiny.yaml data show                       the first five rows of the training set
  fgcli -t tiny.yaml data show --rows 0:1            the first row; rows are numbered from 0
  fgcli -t tiny.yaml data show --set eval --row 7    row 7 of the evaluation set, however long
  fgcli -t tiny.yaml data show --all --html data.html
  fgcli -t tiny.yaml data show --set raw_dataset     a target of the config, before it is tokenized
  fgcli -t tiny.yaml data show --set train_dataset.block_size=64 --json
  fgcli -t tiny.yaml data prepare tokens/train --num-proc 8
  fgcli -t tiny.yaml data prepare tokens/eval --set eval
  fgcli data verify tokens/train

A set is a name, without '='; PATH=VALUE changes a value, as in other commands."""
_ROWS = "0:5"
_STATISTICS_ROWS = 10_000
_WIDTH = 80  # of a file or a pipe


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "action", choices=["show", *ACTIONS], help="show rows, write shards of tokens, or verify shards"
    )
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="the folder of shards, for prepare and verify")
    parser.add_argument(
        "--set",
        action=_SetOrValue,
        metavar="NAME",
        help="data set: train (default), eval, or a target of the config; with PATH=VALUE, a change of the graph",
    )
    rows = parser.add_mutually_exclusive_group()
    rows.add_argument(
        "--rows",
        type=_range,
        metavar="A:B",
        help=f"rows from A to before B, numbered from 0 (default: {_ROWS}, the first five)",
    )
    rows.add_argument("--row", dest="rows", type=_one_row, metavar="N", help="row N alone, however long")
    parser.add_argument(
        "--all", action="store_true", help=f"read all rows for the statistics (default: at most {_STATISTICS_ROWS:,})"
    )
    parser.add_argument("--no-collator", action="store_true", help="show the rows as the data set gives them")
    parser.add_argument("--html", metavar="FILE", help="write a page that shows the same to FILE")
    parser.add_argument("--num-proc", type=count, metavar="N", help="processes that prepare (default: one per core)")
    parser.add_argument("--num-shards", type=count, metavar="N", help="shards to prepare (default: by their size)")
    add_var(parser)
    add_json(parser)
    add_output(parser)


class _SetOrValue(argparse.Action):
    """Takes `--set NAME` as the data set, and `--set PATH=VALUE` as a change of the graph."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{**settings, "dest": "data_set", "default": None})

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Notes the value."""
        text = str(values)
        if "=" in text:
            try:
                change = path_and_value(text)
            except argparse.ArgumentTypeError as error:
                raise argparse.ArgumentError(self, str(error)) from None
            namespace.overrides = [*(getattr(namespace, "overrides", None) or ()), change]
        elif not text:
            raise argparse.ArgumentError(self, "'' names no data set")
        elif namespace.data_set not in (None, text):
            raise argparse.ArgumentError(self, f"two data sets are named: {namespace.data_set} and {text}")
        else:
            namespace.data_set = text


def _range(text: str) -> tuple[int, int]:
    """Converts a command-line argument `A:B` to the first row and the row after the last, as an argparse type.

    Example:
        >>> _range("2:5"), _range(":3")
        ((2, 5), (0, 3))
    """
    if found := re.fullmatch(r"(\d*):(\d+)", text, re.ASCII):
        start, stop = int(found[1] or 0), int(found[2])
        if start < stop:
            return start, stop
    # A number alone could mean how many rows, or which one.
    if text.isascii() and text.isdecimal():
        first = "the first row" if int(text) == 1 else f"the first {text} rows"
        which = f" --rows 0:{text} shows {first}, and" if int(text) else ""
        raise argparse.ArgumentTypeError(f"{text!r} is not a range:{which} --row {text} shows row {text} (from 0)")
    raise argparse.ArgumentTypeError(f"{text!r} is not a range of rows, such as 0:5")


def _one_row(text: str) -> tuple[int, int]:
    """Converts a command-line argument `N` to the row and the one after it, as an argparse type.

    Example:
        >>> _one_row("7")
        (7, 8)
    """
    if text.isascii() and text.isdecimal():
        return int(text), int(text) + 1
    raise argparse.ArgumentTypeError(f"{text!r} is not the number of a row, such as 7")


def run(invocation: Invocation) -> int:
    """Runs the command: builds the data, shows or prepares them, and returns the exit status."""
    options = invocation.options
    refuse_options_of_others(options)
    if options.action in ACTIONS:
        return ACTIONS[options.action](invocation)
    project = invocation.open_project()
    project.refuse_errors()
    print_findings(project.diagnostics, project.meta.project_dir)
    found = DataTargets(project.graph)
    chosen = found.chosen(options.data_set or "train")
    view = _view(project, found, chosen, invocation)
    warnings = [
        Diagnostic(code="FG484", message=text, severity=Severity.WARNING, span=chosen.span) for text in view.warnings
    ]
    print_findings(warnings, project.meta.project_dir)
    if options.html:
        page = import_module("forgather.ml.report.data_page").data_page(view, _title(project, chosen))
        write_text(page, options.html)
    if options.json:
        write_json({"config": project.config_name, **view.as_dict()}, options.output)
    elif not options.html or options.output:
        to_file = options.output is not None or sys.stdout is None
        screen = DataScreen(
            view,
            _title(project, chosen),
            width=_WIDTH if to_file else columns() or _WIDTH,
            has_color=not to_file and wants_color(sys.stdout),
            encoding="utf-8" if to_file else getattr(sys.stdout, "encoding", None) or "utf-8",
        )
        write_lines(screen.lines(), options.output)
    return 0


def _title(project: Project, chosen: ChosenSet) -> str:
    return f"{project.meta.name} · {project.config_name} · {chosen.name}"


def _view(project: Project, found: DataTargets, chosen: ChosenSet, invocation: Invocation) -> Any:
    """Builds the data set, the collator and the tokenizer in one construction, and returns their view."""
    options = invocation.options
    is_collated = not options.no_collator
    nodes: dict[str, Node] = {chosen.name: chosen.node}
    if found.tokenizer is not None:
        nodes["the tokenizer"] = found.tokenizer
    if is_collated and found.collator is not None:
        nodes["the data collator"] = found.collator
    # Which tokens of preferences are trained depends on the loss.
    if chosen.role and found.loss is not None:
        nodes["the loss"] = found.loss
    if chosen.role and found.class_names is not None:
        nodes["the names of the classes"] = found.class_names
    for name, node in nodes.items():
        found.refuse_model(node, name)
    project.graph, names = with_targets(project.graph, nodes)
    ask_trust(project, list(names.values()))
    built = project(list(names.values()), **construction_variables(invocation))
    dataset = _selected(built[names[chosen.name]], chosen)
    tokenizer = built.get(names.get("the tokenizer", ""))
    collate = built.get(names.get("the data collator", ""))
    loss = built.get(names.get("the loss", ""))
    if is_collated and collate is None:
        collate = import_module("forgather.ml.trainer.collation").default_collate(tokenizer)
    views = import_module("forgather.ml.data.data_view")
    start, stop = options.rows or _range(_ROWS)
    asked = views.ViewOptions(
        name=chosen.name,
        start=start,
        stop=stop,
        most_rows=None if options.all else _STATISTICS_ROWS,
        batch_rows=found.batch_rows(chosen.role),
        shuffles=chosen.role == "train",
        is_causal=found.is_causal,
        trained_part=getattr(loss, "trained_part", "answers"),
        loss="" if loss is None else views.collator_name(loss),
        removes_columns=found.removes_columns,
        only_tokens=not chosen.role,
        class_names=built.get(names.get("the names of the classes", "")),
    )
    try:
        return views.view_data(dataset, collate if is_collated else None, tokenizer, asked)
    except ForgatherError as error:
        of_collator = getattr(error, "is_of_collator", False) and found.collator is not None
        error.span = error.span or (found.collator.span if of_collator and found.collator else chosen.span)
        error.context = error.context or project.lineage
        raise


def _selected(built: Any, chosen: ChosenSet) -> Any:
    """Returns the data set to which the keys after a name lead.

    Raises:
        ProjectError: FG480 if a key is missing or unknown.
    """
    keys = list(chosen.keys)
    while isinstance(built, Mapping):
        known = [str(key) for key in built]
        if not keys and len(built) == 1:
            keys = known
        key = keys.pop(0) if keys else None
        if key not in known:
            what = f"{chosen.base} has no data set {key!r}" if key else f"{chosen.base} has {len(known)} data sets"
            hint = f"name one of them: {', '.join(f'--set {chosen.role or chosen.base}.{one}' for one in known[:9])}"
            raise ProjectError(what, code="FG480", span=chosen.span, hint=(key and nearest(key, known)) or hint)
        built = next(value for name, value in built.items() if str(name) == key)
    if keys:
        raise ProjectError(
            f"{chosen.base} is one data set, without a part {keys[0]!r}", code="FG480", span=chosen.span,
            hint=f"leave out '.{'.'.join(keys)}'",
        )  # fmt: skip
    return built
