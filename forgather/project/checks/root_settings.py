"""Checks top-level keys of a config that look like settings of the trainer but that nothing reads.

The input is a graph and its calls; the output is findings. A top-level key that an alias or a calculation uses is not
reported. The targets of a config without trainer arguments may have any name; such a config is reported only if it has
no `main` and at least two of its keys are settings of a trainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from forgather.aliases import alias_of
from forgather.config.calc import names_in, parse_calc
from forgather.config.graph import Calc, Call, CallKind, Entry, Graph, Mapped, Scalar, Sequence
from forgather.config.lint.call_check import Called
from forgather.config.path import Key, format_path
from forgather.config.traverse import roots, walk
from forgather.config.yaml.events import Refusal
from forgather.errors import Diagnostic, Severity, closest
from forgather.project.checks.setting_rules import rules_about
from forgather.project.constructor_rules import home_of
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments
from forgather.rules import Rules, shipped_rules

_OWN = frozenset({"main", "meta", "dynamic_args"})
# High, because a target may have any name: only an almost equal one is a typing error.
_A_SLIP = 0.85
_MAIN = "main"
_TEMPLATE = "trainers/trainer.yaml"
_BLOCK = "trainer_args"
_ARGUMENTS = "forgather.ml:TrainingArguments"
_TRAINERS = tuple(f"forgather.ml:{name}" for name in ("Trainer", "AccelTrainer", "PipelineTrainer"))
_MANY = 6


def check_root_settings(graph: Graph, calls: Mapping[int, Called]) -> Iterator[Diagnostic]:
    """Yields a warning for each top-level key that seems to be meant as a trainer setting, or as another target.

    Args:
        graph: the graph.
        calls: the calls of the graph, by `id(node)`.
    """
    arguments = trainer_arguments(graph)
    called = calls.get(id(arguments.call)) if arguments else None
    if arguments is None or called is None or called.callee is None:
        return
    # `**settings` of the constructor is not a setting.
    settings = {name for signature in called.callee.signatures for name in signature.parameters} - {"settings"}
    for rules in rules_about(called):
        settings |= {*rules.settings, *rules.renamed, *rules.without_effect}
    for name, entry in graph.targets.items():
        if name in _OWN or not isinstance(entry.value, Scalar) or is_read(name, entry, graph):
            continue
        # The graph of a run, used as a config, has the targets of the templates that are empty.
        if entry.value.value is None:
            continue
        hint = _hint(name, arguments, settings, graph)
        if hint is not None:
            yield Diagnostic(
                code="FG250",
                message=f"{name!r} is at the root: it is a target that nothing reads, and it changes no setting",
                severity=Severity.WARNING,
                span=entry.span,
                hint=hint,
            )


def _hint(name: str, arguments: TrainerArguments, settings: set[str], graph: Graph) -> str | None:
    block = arguments.path(name).lstrip("+").partition(".")[0]
    if name in settings:
        return f"put it into the block [{block}], indented as the settings there are"
    alias = alias_of("setting", name)
    if alias is not None:
        return f"in the block [{block}]: {alias.hint}" if alias.name in settings else alias.hint
    near = closest(name, [other for other in graph.targets if other != name], cutoff=_A_SLIP)
    return f"did you mean {near!r}?" if near else None


def is_read(name: str, entry: Entry, graph: Graph) -> bool:
    """Returns whether another value of the graph is the value of a target, or calculates with it."""
    others = [((Key(key),), other.value) for key, other in graph.targets.items() if key != name]
    for _, node in walk([*others, *(item for item in roots(graph) if item[1] is not entry.value)]):
        if node is entry.value or (isinstance(node, Calc) and name in _names(node)):
            return True
    return False


def _names(node: Calc) -> set[str]:
    try:
        return set(names_in(parse_calc(node.expression)))
    except Refusal:
        # The calculation is reported at its own place.
        return set()


# configs without a run


class _ForeignSetting(NamedTuple):
    """A key that is a trainer setting of Forgather or of another tool.

    `hint` says what to write instead; it is None for the current name of a setting of Forgather.
    """

    path: tuple[str, ...]
    entry: Entry
    hint: str | None


def check_missing_run(graph: Graph, *, for_run: bool) -> Iterator[Diagnostic]:
    """Yields findings about a config without `main` whose keys look like settings of a trainer.

    Args:
        graph: the graph.
        for_run: whether `main` is about to be run, so that a missing `main` is an error.
    """
    if _MAIN in graph.targets:
        return
    severity = Severity.ERROR if for_run else Severity.WARNING
    trainer = next((name for name, entry in graph.targets.items() if _builds_a_trainer(entry)), None)
    if trainer is not None:
        message = f"{trainer!r} builds a trainer, but a run uses the target {_MAIN!r}, which this config does not have"
        hint = f"name it {_MAIN!r}, or extend {_TEMPLATE!r}, which has one"
        yield _finding("FG251", message, severity, (trainer,), graph.targets[trainer], hint)
        return
    meant = list(_foreign_settings(graph))
    if len(meant) < 2:  # a single such name can be a target of the user
        return
    names = [repr(name) for name in dict.fromkeys(one.path[0] for one in meant)]
    shown = ", ".join(names[:_MANY]) + (f" and {len(names) - _MANY} more" if len(names) > _MANY else "")
    message = f"no target {_MAIN!r} to run: {shown} are separate targets, and nothing reads them"
    ours = list(dict.fromkeys(one.path[-1] for one in meant if one.hint is None))
    put = f" (here: {', '.join(ours[:_MANY])}{', ...' if len(ours) > _MANY else ''})" if ours else ""
    hint = (
        f"begin the file with the line `-- extends '{_TEMPLATE}'`, and write settings of the trainer{put} "
        f"below the lines `[{_BLOCK}]` and `== super()`, indented like the latter"
    )
    first = next(iter(graph.targets.values()))
    yield _finding("FG251", message, severity, (), first, hint)
    for one in meant:
        if one.hint is not None:
            message = f"other tools call it {one.path[-1]!r}"
            yield _finding("FG251", message, Severity.WARNING, one.path, one.entry, one.hint)


def _foreign_settings(graph: Graph) -> Iterator[_ForeignSetting]:
    """Yields the keys of a config that name settings of a trainer, including keys inside plain mappings."""
    rules = shipped_rules()[_ARGUMENTS][0]
    ours = {*rules.settings, *rules.renamed, *rules.without_effect, *rules.former}
    for name, entry in graph.targets.items():
        if name not in _OWN and not is_read(name, entry, graph):
            yield from _foreign_settings_of((name,), entry, ours, rules)


def _foreign_settings_of(
    path: tuple[str, ...], entry: Entry, ours: set[str], rules: Rules
) -> Iterator[_ForeignSetting]:
    name = path[-1]
    if isinstance(entry.value, Mapped):
        inner = entry.value.entries
        inside = [found for one in inner for found in _foreign_settings_of((*path, str(one.key)), one, ours, rules)]
        if inside:
            yield from inside
            return
    if not isinstance(entry.value, (Scalar, Sequence, Mapped)):
        return
    if name in ours:
        present = rules.renamed.get(name)
        yield _ForeignSetting(
            path, entry, f"in the block [{_BLOCK}]: {present}" if present else rules.instead.get(name)
        )
        return
    tag = alias_of("tag", name) if name.startswith("_") else None
    alias = tag or alias_of("setting", name)
    if tag is not None:
        hint = f"an object is written with a tag: !{tag.name}:module:Class, with its arguments as keys below"
        yield _ForeignSetting(path, entry, hint)
    elif alias is not None:
        yield _ForeignSetting(
            path, entry, f"in the block [{_BLOCK}]: {alias.name}" if alias.verdict == "same" else alias.why
        )


def _builds_a_trainer(entry: Entry) -> bool:
    node = entry.value
    if not isinstance(node, Call) or node.kind in (CallKind.PARTIAL, CallKind.META):
        return False
    known, home = shipped_rules(), home_of(node.constructor)
    return any(home in rules.about for name in _TRAINERS for rules in known.get(name, ()))


def _finding(code: str, message: str, severity: Severity, path: tuple[str, ...], entry: Entry, hint: str) -> Diagnostic:
    return Diagnostic(
        code=code,
        message=message,
        severity=severity,
        span=entry.span,
        path=format_path(tuple(map(Key, path))) or None,
        hint=hint,
    )
