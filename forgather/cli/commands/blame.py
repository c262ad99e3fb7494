"""`fgcli blame`: prints the file and line that set each value, and the values that it replaced. Constructs nothing."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output, add_set
from forgather.cli.output import Line, columns, shortened, write_json, write_lines
from forgather.cli.palette import styled

if TYPE_CHECKING:
    from forgather.config.insight.blame import Blame, Writing
    from forgather.config.path import GraphPath
    from forgather.project.origin_labels import Labels
    from forgather.project.project import Project
    from forgather.source import Site, SourceFile, Span

CONFIG_OPTIONS = True
_WIDEST = 72
_SOURCE = 120
DESCRIPTION = """Print the file and line that set each value, and every earlier value that it replaced, nearest first.
Below a value: `set`, the last line that set a name it was printed from; `via`, the include, macro call or print that
led to the line; `alias` and `merge`, the lines by which a shared value got here; `inside`, the alias of a container
around it; `with`, further lines that wrote a part of it. A `~` marks a line whose text a filter has taken apart.
Nothing is imported or constructed."""
EXAMPLES = """examples:
  fgcli -t fast.yaml blame trainer_args.learning_rate
  fgcli -t fast.yaml blame optimizer 'trainer_args.*_steps' '**.seed'
  fgcli -t fast.yaml blame trainer_args.max_steps --max-steps 10 -v
  fgcli -t fast.yaml blame --depth 1 --set trainer_args.seed=1"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "paths",
        nargs="*",
        metavar="PATH",
        help="value or container, as trainer_args.seed or callbacks[0]; * is one key, ** any number (default: all)",
    )
    parser.add_argument("--depth", type=_steps, metavar="N", help="go N steps into containers (default: all the way)")
    parser.add_argument("-v", "--verbose", action="store_true", help="print the source lines, too")
    add_set(parser)
    add_json(parser)
    add_output(parser)


def _steps(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of steps, such as 0 or 2")
    return int(text)


def run(invocation: Invocation) -> int:
    """Runs the command: prints the origin of each value, and returns the exit status."""
    from forgather.project.origin_labels import Labels
    from forgather.project.path_display import Display

    options = invocation.options
    project = invocation.open_project()
    labels = Labels.of(project)
    found = list(_blamed(project, options.paths, options.depth))
    if options.json:
        facts = [labels.facts(blamed) for blamed in found]
        write_json({"config": project.config_name, "values": facts}, options.output)
        return 0
    sources = project.rendered.sources if options.verbose else None
    width = None if options.output else columns()
    display = Display(project.meta.project_dir, project.meta.workspace_root)
    # Only a terminal gets short paths: a value that another program reads is the one of the config.
    drawing = _Drawing(labels, sources, str if width is None else display.shorten)
    for blamed in _without_repeats(found):
        drawing.add(blamed)
    write_lines(drawing.lines(width), options.output, files=labels.named)
    return 0


def _blamed(project: Project, paths: list[str], depth: int | None) -> Iterator[Blame]:
    from forgather.config.insight.blame import blame
    from forgather.config.insight.path_lookup import find_values
    from forgather.config.traverse import walk_places

    graph = project.graph
    if not paths:
        yield from blame(graph, aliases=False, depth=depth)
        return
    known = list(walk_places(graph))
    for text in paths:
        stops = find_values(graph, text, known)
        yield from blame(graph, [(stop.path, stop.node) for stop in stops], aliases=False, depth=depth)


def _without_repeats(found: list[Blame]) -> Iterator[Blame]:
    """Yields the values, except those that the text of their container shows and that have the container's origin."""
    shown: dict[tuple[object, ...], Blame] = {}
    for blamed in found:
        around = shown.get(blamed.path[:-1])
        if around is not None and blamed.now.alias is None and blamed.now.origin == around.now.origin:
            continue
        if blamed.now.text.endswith(("]", "}")):
            shown[blamed.path] = blamed
        yield blamed


class _Drawing:
    """The rows of the output, each with a place in a file.

    A row shows a value, or a step by which the value got to its place in the graph.

    Args:
        labels: the object that makes labels for places in files.
        sources: the files whose source lines are also shown, by name, or None to show no source lines.
        shorten: a function that shortens the paths in the text of a value.
    """

    def __init__(self, labels: Labels, sources: Mapping[str, SourceFile] | None, shorten: Callable[[str], str]) -> None:
        self._labels, self._sources, self._shorten = labels, sources, shorten
        self._via: dict[GraphPath, tuple[Site, ...]] = {}
        self._rows: list[tuple[str, str, bool]] = []

    def add(self, blamed: Blame) -> None:
        from forgather.config.insight.path_lookup import path_text

        self._writing(f"{path_text(blamed.path)} = {blamed.now.text}", blamed.now, "", self._known_way(blamed))
        if blamed.path[:-1] not in self._via:
            for name, origin in blamed.around:
                self._row(
                    f"  inside {'merge <<' if name == '<<' else f'*{name}'}",
                    self._labels.origin(origin),
                    origin.span,
                    True,
                )
        for writing in blamed.was:
            self._writing(f"was {writing.text}", writing, "  ", False)

    def _known_way(self, blamed: Blame) -> bool:
        """Records the include and print lines of a value.

        Returns True if the container has the same lines, because the rows of the container show them already.
        """
        way = blamed.now.origin.sites[:-1] if blamed.now.origin is not None else ()
        self._via[blamed.path] = way
        return self._via.get(blamed.path[:-1]) == way

    def _writing(self, text: str, writing: Writing, indent: str, known_way: bool) -> None:
        span = writing.origin.span if writing.origin is not None else None
        self._row(indent + self._shorten(text), self._labels.origin(writing.origin), span, bool(indent))
        for word, place, span in self._labels.ways(writing):
            if word == "via" and known_way:
                continue
            self._row(f"{indent}  {word}", place, span, True)

    def _row(self, text: str, place: str, span: Span | None, dim: bool) -> None:
        self._rows.append((text, place, dim))
        source = self._sources.get(span.file) if self._sources is not None and span is not None else None
        if source is not None and span is not None:
            self._rows.append((f"      | {shortened(source.line(span.line).strip(), _SOURCE)}", "", True))

    def lines(self, columns: int | None) -> Iterator[Line]:
        """Yields the rows as lines.

        Args:
            columns: the width of the terminal in characters, which limits the width of the values; None if the output
                is not a terminal.
        """
        # A single long value must not move the places of all other rows to the right.
        widest = _WIDEST
        if columns is not None:
            widest = min(_WIDEST, columns - 2 - max((len(place) for _, place, _ in self._rows), default=0))
        width = max((len(text) for text, place, _ in self._rows if place and len(text) <= widest), default=0)
        for text, place, dim in self._rows:
            yield Line(f"{text:<{width}}  {place}".rstrip(), _paint_lost if dim else _paint_winner)


def _paint_lost(line: str) -> str:
    return styled("dim", line)


def _paint_winner(line: str) -> str:
    path, equals, rest = line.partition(" = ")
    value = re.match(r".*?(?=  +\S+(?: ~)?$)|.*", rest)
    shown = value[0] if value else rest
    return f"{styled('key', path)}{equals}{styled('strong', shown)}{rest[len(shown) :]}"
