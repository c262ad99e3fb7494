"""Checks the settings of calls by the rules that the packages under `forgather/ml` ship as data.

The input is calls and rules; the output is findings. Only literals and the defaults of signatures are checked; a rule
that depends on any other value is listed as unchecked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, partial
from inspect import Parameter
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from forgather.aliases import alias_of
from forgather.config.graph import Call, CallKind, ContainerKind, Entry, Graph, Mapped, Node, Scalar, Sequence
from forgather.config.lint.argument_check import binds
from forgather.config.lint.call_check import Called, Judgement, Unchecked
from forgather.config.path import GraphPath, Key, format_path
from forgather.errors import Diagnostic, ForgatherError, Severity
from forgather.project.constructor_rules import rules_of
from forgather.project.setting_precedence import Precedence
from forgather.rule_conditions import AUTO, SOMETHING, UNKNOWN, misfit
from forgather.rules import Rules, Violation, shipped_rules
from forgather.signatures.results import Callee, Default
from forgather.source import Span

if TYPE_CHECKING:
    from forgather.signatures.reader import Reader


def check_settings(
    graph: Graph, judgement: Judgement, reader: Reader, precedence: Precedence, *, processes: int | None = None
) -> tuple[list[Diagnostic], list[Unchecked], list[Scalar]]:
    """Returns three lists: findings about settings, rules that were not checked, and strings that a setting accepts.

    Args:
        graph: the graph.
        judgement: the calls of the graph, with their signatures.
        reader: the reader of signatures.
        precedence: the order of the templates, which decides which of two settings has precedence.
        processes: the number of processes on one machine; None if it is unknown.
    """
    judge = _Settings(graph, judgement, reader, precedence, processes)
    findings: list[Diagnostic] = []
    for called in judgement.calls.values():
        if called.node.kind is CallKind.PARTIAL:
            findings += judge.check_partial(called)
        elif called.node.kind is not CallKind.META:
            findings += judge.check_call(called)
    return findings, judge.unchecked, judge.texts


class _Settings:
    """The check of the settings of all calls in one graph."""

    def __init__(
        self, graph: Graph, judgement: Judgement, reader: Reader, precedence: Precedence, processes: int | None
    ) -> None:
        main = graph.targets.get("main")
        self._main = main.value if main else None
        self._calls = judgement.calls
        self._reader = reader
        self._precedence = precedence
        self._around = {"nproc_per_node": processes}
        self.unchecked: list[Unchecked] = []
        self.texts: list[Scalar] = []

    def check_call(self, called: Called) -> Iterator[Diagnostic]:
        """Yields the findings about the settings of one call."""
        for rules in rules_about(called):
            given, settings, found = self._settings(called, rules)
            facts = {**settings, **self._inner(called, rules)}
            # A derived class may compute settings that the rules do not know of.
            facts["derived"] = called.node.constructor not in rules.about
            judged = (name for name in rules.settings if name in given or ("." in name and name in facts))
            found += rules.values({name: self._names_known(name, facts[name], called, rules) for name in judged})
            self.texts += _accepted_texts(called, rules)
            # A setting with a wrong value would give a second finding if it took part in a conflict.
            wrong = {violation.argument for violation in found if violation.severity is Severity.ERROR}
            facts |= dict.fromkeys({rules.renamed.get(name, name) for name in wrong}, UNKNOWN)
            stands = partial(self._takes_effect, called.node, rules)
            found += rules.broken(facts, given, main=called.node is self._main, stands=stands)
            for violation in found:
                yield _finding(violation, called, rules)
            undecided = rules.undecided(facts)
            if undecided:
                names = dict.fromkeys(_setting_of(name) for name in undecided)
                reason = f"rules about {', '.join(names)}: known only when it is built"
                self._add_unchecked(called, reason)

    def check_partial(self, called: Called) -> Iterator[Diagnostic]:
        """Yields the findings about the values in a partial, whose caller may give it further settings."""
        for rules in rules_about(called):
            given = {name: self._plain_value(node) for name, node in arguments_of(called).items()}
            for violation in rules.values(given):
                yield _finding(violation, called, rules)

    def _names_known(self, name: str, value: Any, called: Called, rules: Rules) -> Any:
        """Returns the value of a setting; in a mapping, `SOMETHING` or `UNKNOWN` stands for each unknown value."""
        _, entry = _place_of_setting(called.node, name, rules) if value is SOMETHING else ((), None)
        return value if entry is None else self._partly(entry.value)

    def _partly(self, node: Node) -> Any:
        if isinstance(node, Mapped) and node.kind is ContainerKind.DICT:
            return {str(entry.key): self._partly(entry.value) for entry in node.entries}
        return self._plain_value(node)

    def _takes_effect(self, node: Call, rules: Rules, rule: Mapping[str, Any]) -> bool:
        """Returns whether the user wrote the setting that a rule reports as having no effect.

        The result is False if the setting that overrides it has a higher precedence, because the override is then
        intended.
        """
        argument = rule["argument"]
        _, setting = _place_of_setting(node, argument, rules)
        if setting is None or setting.key != argument.rpartition(".")[2]:
            return False
        _, other = _place_of_setting(node, str(rule.get("after") or rule["beside"]), rules)
        return self._precedence.takes_effect(setting, other, given_only="beside" in rule)

    def _settings(self, called: Called, rules: Rules) -> tuple[frozenset[str], dict[str, Any], list[Violation]]:
        """Returns the names of the given settings, all settings under their current names, and findings about names."""
        written = {name: self._plain_value(node) for name, node in arguments_of(called).items()}
        given, found = written, list[Violation]()
        if rules.closed:
            given, found = rules.names(written, self._elsewhere(called, rules, written))
            found = [_contradiction(violation, called.node, rules) or violation for violation in found]
        given = {name: _still_open(value, rules.settings.get(name, {})) for name, value in given.items()}
        whole = rules.complete({**self._around, **_defaults(called.callee), **given}, given)
        return frozenset(given), whole, found

    def _inner(self, called: Called, rules: Rules) -> dict[str, Any]:
        """Returns the settings of calls that are arguments of this call, as `args.lr`, if a rule reads them."""
        facts: dict[str, Any] = {}
        for name, node in arguments_of(called).items():
            inner = self._calls.get(id(node))
            if rules.reads(name):
                facts[f"{name}.rows"] = tuple(_functions_of_rows(node))
            if inner is None or not rules.reads(name) or inner.node.kind is CallKind.META:
                continue
            if inner.node.kind is CallKind.PARTIAL:
                facts |= {f"{name}.{fact}": value for fact, value in self._of_partial(inner).items()}
                continue
            theirs = rules_about(inner) or (Rules(about=(inner.node.constructor,)),)
            _, settings, _ = self._settings(inner, theirs[0])
            facts |= {f"{name}.{setting}": value for setting, value in settings.items()}
            facts[f"{name}.calls"] = inner.node.constructor.lower()
            facts[f"{name}.is_built"] = True
        return facts

    def _of_partial(self, called: Called) -> dict[str, Any]:
        """Returns facts about a partial: its arguments by name, and the facts `calls`, `is_built`, `takes` and `sets`.

        `calls` is the constructor, `is_built` is False, `takes` contains the names of the constructor's parameters, and
        `sets` those of the arguments.
        """
        values = {name: self._plain_value(node) for name, node in arguments_of(called).items()}
        facts = {**values, "calls": called.node.constructor.lower(), "sets": tuple(values)}
        # Rules about a constructed object apply to a partial only if the config writes the setting that they read.
        if called.callee is not None:
            facts["is_built"] = False
        if called.callee is not None and len(called.callee.signatures) == 1:
            parameters = called.callee.signatures[0].parameters.values()
            if any(p.kind is not Parameter.VAR_KEYWORD for p in parameters):
                facts["takes"] = tuple(p.name for p in parameters)
        return facts

    def _elsewhere(self, called: Called, rules: Rules, written: Iterable[str]) -> Mapping[str, Any] | None:
        known_names = {*rules.settings, *rules.renamed, *rules.without_effect}
        if rules.elsewhere is None or known_names.issuperset(written):
            return {}
        try:
            callee = self._reader.read(rules.elsewhere)
        except ForgatherError:
            callee = None
        if isinstance(callee, Callee):
            return _defaults(callee)
        self._add_unchecked(called, f"settings of {rules.elsewhere}, which is not known")
        return None

    def _add_unchecked(self, called: Called, reason: str) -> None:
        node = called.node
        self.unchecked.append(
            Unchecked(path=format_path(called.path), constructor=node.constructor, reason=reason, span=node.span)
        )

    def _plain_value(self, node: Node) -> Any:
        """Returns the value of a node if the value is plain data.

        Otherwise returns `SOMETHING` if the value is certainly not None, and `UNKNOWN` if it may be None.
        """
        if isinstance(node, Scalar):
            return node.value
        if isinstance(node, Sequence):
            items = [self._plain_value(item) for item in node.items]
            return SOMETHING if _unknown(items) else items
        if isinstance(node, Mapped):
            pairs = {entry.key: self._plain_value(entry.value) for entry in node.entries}
            if _unknown(pairs.values()):
                return SOMETHING
            return [v for v in pairs.values() if v is not None] if node.kind is ContainerKind.DLIST else pairs
        if not isinstance(node, Call) or node.kind is CallKind.META:
            return UNKNOWN
        called = self._calls.get(id(node))
        if node.kind is CallKind.PARTIAL or (called and called.callee and _is_never_none(called.callee)):
            return SOMETHING
        return UNKNOWN


def _still_open(value: Any, rule: Mapping[str, Any]) -> Any:
    """Returns a value with `UNKNOWN` in place of each "auto" that is found before the run, and is no value itself."""
    if isinstance(value, Mapping):
        return {key: _still_open(inner, rule.get("keys", {}).get(key, {})) for key, inner in value.items()}
    return UNKNOWN if value == AUTO and rule.get("found") and misfit(AUTO, rule) is not None else value


def _accepted_texts(called: Called, rules: Rules) -> Iterator[Scalar]:
    """Yields the strings among the arguments that are an accepted value of their setting."""
    for name, node in arguments_of(called).items():
        present = rules.renamed.get(name, name)
        rule = rules.settings.get(present)
        if rule is None or not isinstance(node, Scalar) or not isinstance(node.value, str):
            continue
        is_word = rule["type"] == "word" or isinstance(rules.defaults.get(present), str)
        if is_word and misfit(node.value, rule) is None:
            yield node


def _setting_of(name: str) -> str:
    """Returns the setting of a name in a rule: `loss_fn` of `loss_fn.is_built`, which is a fact about the setting."""
    setting, _, fact = name.rpartition(".")
    return setting if setting and fact in _FACTS else name


_FACTS = ("calls", "is_built", "takes", "sets", "rows")
_DATA = "forgather.ml.data"
# They choose rows or join data sets: what a row is does not change.
_KEEP_ROWS = frozenset({"getitem", "values", "list", "tuple", "dict", "named_list", "named_tuple", "named_dict"})
_KEEP_ROWS |= {"datasets:concatenate_datasets", "datasets:interleave_datasets", "datasets:DatasetDict"}
_KEEP_ROWS |= {f"{_DATA}:split", f"{_DATA}.train_eval_split:split", f"{_DATA}:mix", f"{_DATA}.mixture:mix"}
_KEEP_ROWS |= {f"torch.utils.data:{name}" for name in ("Subset", "ConcatDataset", "ChainDataset", "random_split")}
_METHODS = ("select", "shuffle", "filter", "train_test_split", "take", "skip", "shard", "sort", "flatten_indices")
_KEEP_ROWS |= {f"datasets:{kind}.{name}" for kind in ("Dataset", "IterableDataset", "DatasetDict") for name in _METHODS}


def _functions_of_rows(node: Node) -> Iterator[str]:
    """Yields the names, in lower case, of the functions of `forgather.ml.data` that made the rows of an argument.

    Functions that only choose rows or join data sets are passed through; what another function makes is not known.
    """
    if isinstance(node, Call) and node.constructor.startswith(_DATA) and node.constructor not in _KEEP_ROWS:
        yield node.constructor.rpartition(":")[2].lower()
    elif isinstance(node, Call) and node.constructor in _KEEP_ROWS:
        for inner in (*node.args, *(entry.value for entry in node.kwargs)):
            yield from _functions_of_rows(inner)
    elif isinstance(node, Sequence | Mapped):
        for inner in node.items if isinstance(node, Sequence) else (entry.value for entry in node.entries):
            yield from _functions_of_rows(inner)


def _is_never_none(callee: Callee) -> bool:
    return callee.kind == "class" or (callee.gives.accepts is not None and "none" not in callee.gives.accepts)


def _unknown(values: Iterable[Any]) -> bool:
    return any(value is UNKNOWN or value is SOMETHING for value in values)


def rules_about(called: Called) -> tuple[Rules, ...]:
    """Returns the rules about a called object or its base class; an empty tuple if there are none."""
    rules = shipped_rules()
    if found := rules_of(called.node.constructor):
        return found
    gives = called.callee.gives.accepts if called.callee and called.callee.kind == "class" else None
    return next((rules[word[9:]] for word in gives or () if word.removeprefix("instance:") in rules), ())


def arguments_of(called: Called) -> dict[str, Node]:
    """Returns the arguments of a call by the names of their parameters."""
    values = {str(entry.key): entry.value for entry in (*called.node.kwargs, *called.node.named_latent_args)}
    for signature in called.callee.signatures if called.callee else ():
        # Missing arguments are reported by the check of calls.
        bound = binds(signature, called.node.args, {}, partial=True)
        if bound is not None:
            return {**{name: node for name, node in bound.arguments.items() if isinstance(node, Node)}, **values}
    return values


def _defaults(callee: Callee | None) -> dict[str, Any]:
    """Returns the defaults of a callable's parameters: the values of literals, and `UNKNOWN` for other defaults."""
    found: dict[str, Any] = {}
    for parameter in callee.signatures[0].parameters.values() if callee and callee.signatures else ():
        default = parameter.default
        if isinstance(default, Default):
            found[parameter.name] = default.value if type(default.value) in _LITERALS else UNKNOWN
    return found


_LITERALS = (str, int, float, bool, type(None), list, tuple, dict)


def _contradiction(violation: Violation, node: Call, rules: Rules) -> Violation | None:
    """Returns an error for another tool's word that replaces our setting, if one file has both; None otherwise.

    Below a template's setting the word is the user's choice. In one file, the two are two answers to one question.
    """
    word = violation.argument
    alias = None if word in rules.settings or word in rules.renamed else alias_of("setting", word)
    entries = {str(entry.key): entry for entry in node.kwargs}
    own, other = entries.get(alias.name if alias is not None else ""), entries.get(word)
    if violation.code != "FG825" or alias is None or own is None or other is None or own.span is None:
        return None
    if other.span is None or own.span.file != other.span.file:
        return None
    message = f"{alias.name!r} is given twice, once as {word!r}"
    return Violation(code="FG812", message=message, argument=word, hint=violation.hint)


def _finding(violation: Violation, called: Called, rules: Rules) -> Diagnostic:
    path, entry = _place_of_setting(called.node, violation.argument, rules)
    return Diagnostic(
        code=violation.code,
        message=violation.message,
        severity=violation.severity,
        span=place_to_fix(entry) or called.node.span,
        path=format_path((*called.path, *path)),
        hint=violation.hint,
    )


def place_to_fix(entry: Entry | None) -> Span | None:
    """Returns the location at which the user changes the value of an entry; None if `entry` is None."""
    if entry is None:
        return None
    # The value of an alias is written at its anchor.
    return entry.value.span if entry.alias else entry.span


def _place_of_setting(node: Call, argument: str, rules: Rules) -> tuple[GraphPath, Entry | None]:
    """Returns the path and the entry of a setting, which may be written under an old name.

    If the setting itself is not written, the result is the path and the entry of the argument that contains the
    setting.
    """
    first, _, inner = argument.partition(".")
    at = _entries_of(node)
    spellings = {first, *(old for old, present in rules.renamed.items() if present == first)}
    _, entry = min((at[name] for name in spellings if name in at), key=itemgetter(0), default=(0, None))
    if entry is None:
        return (), None
    if inner and isinstance(entry.value, Mapped):
        inside = _within(entry.value, inner)
        return (Key(entry.key), *inside[0]), inside[1] or entry
    if inner and isinstance(entry.value, Call):
        theirs = (rules_of(entry.value.constructor) or (rules,))[0]
        path, nested = _place_of_setting(entry.value, inner, theirs)
        return (Key(entry.key), *path), nested or entry
    return (Key(entry.key),), entry


@lru_cache(maxsize=4)
def _entries_of(node: Call) -> dict[object, tuple[int, Entry]]:
    """Returns the keyword arguments of a call with their positions, by name.

    The result is cached, because every finding about the call looks one of them up.
    """
    found: dict[object, tuple[int, Entry]] = {}
    for position, entry in enumerate((*node.kwargs, *node.named_latent_args)):
        found.setdefault(entry.key, (position, entry))
    return found


def _within(mapping: Mapped, setting: str) -> tuple[GraphPath, Entry | None]:
    """Returns the path and the entry of a setting inside a mapping; the entry is None if the setting is not given."""
    # A key may contain dots itself, as the name of a module does.
    entry = next((one for one in mapping.entries if setting == one.key), None)
    if entry is not None:
        return (Key(entry.key),), entry
    first, _, inner = setting.partition(".")
    entry = next((one for one in mapping.entries if first == one.key), None)
    if entry is None or not isinstance(entry.value, Mapped):
        return ((Key(entry.key),), entry) if entry else ((), None)
    path, nested = _within(entry.value, inner)
    return (Key(entry.key), *path), nested or entry
