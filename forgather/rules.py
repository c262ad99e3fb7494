"""Rules about the settings of a constructor: data in, what breaks them out.

Takes the data of a rules file (JSON, kept by the side that owns the constructor) and the settings of a call; gives
`Violation`s. Keeps true: the check before a run and the refusal inside one read the same data through these functions;
a setting that is not known (`UNKNOWN`) breaks nothing.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from forgather.aliases import alias_of, suggest, suggest_inside
from forgather.compatibility import combination_facts, read_matrix
from forgather.errors import Severity, nearest
from forgather.parallel_sizes import layout_facts
from forgather.rule_conditions import SOMETHING, UNKNOWN, holds, misfit, names_of

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "rules")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Violation(NamedTuple):
    """Settings that break a rule.

    Args:
        code: stable code.
        message: what was found.
        argument: the setting to point at; `args.lr` is the setting `lr` of the call that is given as `args`.
        hint: what can be done.
        severity: how bad it is; a run refuses errors.
        expected: what would have been accepted.
        found: the value.
    """

    code: str
    message: str
    argument: str
    hint: str | None = None
    severity: Severity = Severity.ERROR
    expected: str | None = None
    found: Any = None


class Rules(NamedTuple):
    """What holds for the settings of a constructor.

    Args:
        about: the constructors, as configs name them.
        settings: by name, what a value must be, as `type`, `minimum`, `choices` and so on; see `misfit`.
        conflicts: conditions that must not hold, with code, message, hint and the setting to point at. With `after`,
            only where the user wrote that setting, and no child of it the setting `after`; with `beside`, only where no
            option of the command line gives the setting `beside`.
        derived: values of settings that follow from others: `when` and `value`, by name.
        defaults: values of settings that are not given.
        closed: a name outside `settings` is a mistake.
        renamed: present names of older spellings.
        quietly: older spellings that need no remark.
        old_values: what a value under an older spelling must be, where the present setting takes more.
        former: settings that a library had, with their defaults: such a value asks for what happens anyway.
        without_effect: settings that mean nothing, with the reason, and the one value (`only`) that may be given.
        elsewhere: constructor that has further settings; here they may be given with their default values alone.
        instead: what to do in place of such a setting.
        facts: what conditions may read beside settings: a name and its value.
        computed: what conditions may read beside settings, by the name of what computes it: "layout".
        needs: package that the constructor imports when it is called.
        arguments: what becomes of arguments, by name: `called_with` (how many by `positional`, further `keywords`, and
            how to call them: `as`), `object` (what is called, where a class would only be built), `items` (what a list
            must hold), `files` (the endings that count in a folder), `folder` (texts that are no folder),
            `installed` (packages by the words that need them), `keywords_of` (a mapping of keywords for one of its
            `callees`, by the word of the setting `chosen_by`; what is `given`, and the settings `instead` of it).
    """

    about: tuple[str, ...]
    settings: Mapping[str, Mapping[str, Any]] = _NOTHING
    conflicts: tuple[Mapping[str, Any], ...] = ()
    derived: Mapping[str, Mapping[str, str]] = _NOTHING
    defaults: Mapping[str, Any] = _NOTHING
    closed: bool = False
    renamed: Mapping[str, str] = _NOTHING
    quietly: tuple[str, ...] = ()
    old_values: Mapping[str, Mapping[str, Any]] = _NOTHING
    former: Mapping[str, Any] = _NOTHING
    without_effect: Mapping[str, Mapping[str, Any]] = _NOTHING
    elsewhere: str | None = None
    instead: Mapping[str, str] = _NOTHING
    facts: Mapping[str, Any] = _NOTHING
    computed: tuple[str, ...] = ()
    arguments: Mapping[str, Mapping[str, Any]] = _NOTHING
    needs: str = ""

    @property
    def name(self) -> str:
        """How messages call the constructor."""
        return self.about[0].rpartition(":")[2].rpartition(".")[2]

    def names(
        self, given: Mapping[str, Any], elsewhere: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[Violation]]:
        """Returns the settings under their present names, and what is wrong with the names.

        Args:
            given: settings as the user wrote them.
            elsewhere: the settings of the constructor `elsewhere`, with their defaults; None where they are not known.
        """
        settings: dict[str, Any] = {}
        found: list[Violation] = []
        others = {**self.former, **(elsewhere or {})}
        for name, value in given.items():
            present = name if name in self.settings else self.renamed.get(name)
            if present is None:
                found += self._without_place(name, value, others, is_known=elsewhere is not None)
                continue
            if name in self.old_values:
                found += _values(name, value, self.old_values[name])
            if name != present and name not in self.quietly:
                message = f"{self.name}: {name!r} is now {present!r}; {value!r} was taken for it"
                advice = f"write {present!r} in place of {name!r}"
                found.append(
                    Violation(code="FG825", message=message, argument=name, hint=advice, severity=Severity.WARNING)
                )
            elif name != present and value is None:
                continue
            if present in settings:
                message = f"{present!r} is given twice, once as {name!r}"
                found.append(Violation(code="FG812", message=message, argument=name, hint="keep one of them"))
            settings[present] = value
        return settings, found

    def _without_place(
        self, name: str, value: Any, others: Mapping[str, Any], *, is_known: bool
    ) -> Iterator[Violation]:
        """Yields what is wrong with a name that is no setting.

        Args:
            name: as the user wrote it.
            value: of it.
            others: settings of elsewhere, with their defaults.
            is_known: whether all of these are known.
        """
        if name in self.without_effect:
            rule = self.without_effect[name]
            if "only" in rule and value is not UNKNOWN and value != rule["only"]:
                message = f"{name}: {value!r} is not available"
                yield Violation(code="FG811", message=message, argument=name, hint=rule["why"])
            else:
                message = f"{self.name}: {name!r} has no effect: {rule['why']}"
                advice = "leave the setting out"
                yield Violation(code="FG825", message=message, argument=name, hint=advice, severity=Severity.WARNING)
        elif name in others:
            # What asks for the value that holds anyway asks for nothing.
            if value is not None and value is not UNKNOWN and others[name] not in (value, UNKNOWN):
                other = f"{_owner(self.elsewhere)} that this trainer does not have"
                message = f"{name!r} is a setting of {other} (found {value!r})"
                alias = alias_of("setting", name)
                hint = self.instead.get(name) or (alias.hint if alias else self.instead.get("*"))
                yield Violation(code="FG811", message=message, argument=name, hint=hint, found=value)
        elif self.closed and (is_known or self.elsewhere is None):
            message = f"{self.name} has no setting {name!r}"
            hint = self.instead.get(name) or self._in_other_words(name)
            hint = hint or suggest("setting", name, list(self.settings), owner=self.elsewhere or "")
            hint = hint or self.instead.get("unknown") or "see its documentation"
            yield Violation(code="FG810", message=message, argument=name, hint=hint)

    def _in_other_words(self, name: str) -> str | None:
        """Returns what to do where another tool's word means a setting that only another trainer has."""
        alias = alias_of("setting", name)
        if alias is None or alias.verdict != "same" or alias.name in self.settings:
            return None
        instead = self.instead.get(alias.name) or self.instead.get("*")
        return f"it is called {alias.name!r}" + (f"; {instead}" if instead else "")

    def values(self, settings: Mapping[str, Any]) -> Iterator[Violation]:
        """Yields the settings whose values do not fit, and the keys that a mapping among them does not have."""
        for name, rule in self.settings.items():
            yield from _values(name, settings.get(name, UNKNOWN), rule, self)

    def complete(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings with defaults, with what follows from others, and with further facts.

        A setting inside a mapping has the name `outer.inner`; it is None where the mapping leaves it out.
        """
        whole = {**self.facts, **self.defaults, **settings}
        for name, rule in self.derived.items():
            if whole.get(name) is None and holds(rule["when"], whole) is True:
                whole[name] = whole.get(rule["value"], UNKNOWN)
        for name, outer in self.settings.items():
            if "keys" in outer:
                whole |= _inside(name, whole.get(name), outer)
        for name in self.computed:
            whole |= _COMPUTED[name](whole)
        return whole

    def broken(
        self,
        settings: Mapping[str, Any],
        given: Collection[str] = (),
        *,
        main: bool = True,
        stands: Callable[[Mapping[str, Any]], bool] | None = None,
    ) -> Iterator[Violation]:
        """Yields the conflicts that hold.

        Args:
            settings: every setting, defaults included; what is missing counts as unknown.
            given: the settings that the user wrote.
            main: True where the object is what a run runs, which some rules are about.
            stands: tells whether the user wrote the setting of a rule with `after` or `beside`; None leaves these out.
        """
        facts = {**settings, "given": tuple(given)}
        for rule in self.conflicts:
            if rule.get("main_only") and not main:
                continue
            if _is_of_origins(rule) and (stands is None or not stands(rule)):
                continue
            if holds(rule["when"], facts) is True:
                yield Violation(
                    code=rule["code"],
                    message=_filled(rule["message"], facts),
                    argument=_pointed_at(rule["argument"], facts),
                    hint=_filled(rule["hint"], facts) if "hint" in rule else None,
                    severity=Severity(rule.get("severity", "error")),
                )

    def reads(self, argument: str) -> bool:
        """Returns whether a rule may look into the call that is given as `argument`."""
        named = re.compile(rf"(?<![\w.]){re.escape(argument)}\.")
        return any(map(named.match, self.settings)) or any(named.search(rule["when"]) for rule in self.conflicts)

    def undecided(self, settings: Mapping[str, Any]) -> list[str]:
        """Returns the names of unknown settings that keep a conflict from being judged."""
        names: dict[str, None] = {}
        for rule in self.conflicts:
            if not _is_of_origins(rule) and holds(rule["when"], {"given": (), **settings}) is UNKNOWN:
                for name in names_of(rule["when"]):
                    value = settings.get(name, UNKNOWN)
                    if name != "given" and (value is UNKNOWN or value is SOMETHING):
                        names[name] = None
        return list(names)


def is_path(text: str) -> bool:
    """Tells whether a text can only be a path of this machine: a name of the Hub is `name` or `owner/name`.

    Example:
        >>> [is_path(text) for text in ("./model", "~/model", "/model", "a/b/c", "owner/name", "s3://bucket/x")]
        [True, True, True, True, False, False]
    """
    return "://" not in text and (text.startswith((".", "/", "~")) or text.count("/") > 1 or os.sep + os.sep in text)


def read_rules(file: str) -> tuple[Rules, ...]:
    """Returns the rules of a file: a JSON list of objects with the fields of `Rules`.

    An object with `builds_on` ([file, constructor]) has the rules about that constructor too; its own entries win. One
    with `matrix` ("arguments" or "trainer") refuses what the compatibility matrix refuses of what these decide.
    """
    with open(file, encoding="utf-8") as stream:
        return tuple(_rules(facts, os.path.dirname(file)) for facts in json.load(stream))


@cache
def shipped_rules() -> Mapping[str, tuple[Rules, ...]]:
    """Returns the rules that come with the package, by the constructors that they are about."""
    found: dict[str, tuple[Rules, ...]] = {}
    for name in sorted(os.listdir(_FOLDER)):
        for rules in read_rules(os.path.join(_FOLDER, name)):
            for constructor in rules.about:
                found[constructor] = (*found.get(constructor, ()), rules)
    return found


def _rules(facts: dict[str, Any], folder: str) -> Rules:
    for name in ("about", "conflicts", "quietly", "computed"):
        facts[name] = tuple(facts.get(name, ()))
    if "matrix" in facts:
        facts["conflicts"] += tuple(read_matrix().refusals(facts.pop("matrix")))
    base = facts.pop("builds_on", None)
    if base is None:
        return Rules(**facts)
    file, constructor = base
    known = next(rules for rules in read_rules(os.path.join(folder, file)) if constructor in rules.about)
    return known._replace(**{name: _joined(name, getattr(known, name), own) for name, own in facts.items()})


def _joined(name: str, theirs: Any, own: Any) -> Any:
    if name in ("conflicts", "quietly", "computed"):
        return (*theirs, *own)
    return {**theirs, **own} if isinstance(own, Mapping) else own


def _is_of_origins(rule: Mapping[str, Any]) -> bool:
    """Says whether a rule hangs on who wrote the setting, which is known before a run alone."""
    return "after" in rule or "beside" in rule


def _owner(constructor: str | None) -> str:
    return "transformers.Trainer" if constructor == "transformers:TrainingArguments" else str(constructor)


def _wrong_value(name: str, value: Any, expected: str, rule: Mapping[str, Any]) -> Violation:
    hint = f"expected {expected}"
    if isinstance(value, str):
        close = nearest(value, rule.get("choices", ()))
        if close and close.startswith("did"):
            hint = f"{close} {hint}"
        elif "number" in expected:
            hint += "; a number in quotes is a text"
    found = repr(value)
    message = f"{name.rpartition('.')[2]} is {found[:80]}"
    return Violation(
        code="FG813",
        message=message,
        argument=name,
        hint=hint,
        severity=Severity(rule.get("severity", "error")),
        expected=expected,
        found=value,
    )


# values


def _values(name: str, value: Any, rule: Mapping[str, Any], rules: Rules | None = None) -> Iterator[Violation]:
    if value is UNKNOWN or value is SOMETHING:
        return
    expected = misfit(value, rule)
    if expected is not None:
        yield _wrong_value(name, value, expected, rule)
    elif isinstance(value, Mapping) and "keys" in rule:
        for key, inner in value.items():
            known = str(key).removeprefix(rule.get("prefix", ""))
            if known in rule["keys"]:
                yield from _values(f"{name}.{key}", inner, rule["keys"][known], rules)
            elif not rule.get("open"):
                yield Violation(
                    code="FG810",
                    message=f"{name} has no setting {key!r}",
                    argument=f"{name}.{key}",
                    hint=rule.get("instead", {}).get(key) or _inside_hint(name, known, rule, rules),
                    severity=Severity(rule.get("severity", "error")),
                )


def _inside_hint(name: str, key: str, rule: Mapping[str, Any], rules: Rules | None) -> str | None:
    outside, around = (tuple(rules.settings), rules.name) if rules else ((), "")
    return suggest_inside(name.rpartition(".")[2], key, list(rule["keys"]), outside=outside, around=around)


def _inside(name: str, value: Any, outer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings inside a mapping, as `outer.inner`."""
    found: dict[str, Any] = {}
    absent = None if value is None else UNKNOWN
    for key, rule in outer["keys"].items():
        known = isinstance(value, Mapping)
        inner = value.get(key, value.get(outer.get("prefix", "") + key)) if known else absent
        found[f"{name}.{key}"] = inner
        if "keys" in rule:
            found |= _inside(f"{name}.{key}", inner, rule)
    return found


_COMPUTED: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "layout": layout_facts,
    "combination": combination_facts,
}


def _pointed_at(argument: str | Collection[str], facts: Mapping[str, Any]) -> str:
    """Returns the setting to point at: of several the first that asks for anything."""
    if isinstance(argument, str):
        return argument
    asking = (name for name in argument if facts.get(name, UNKNOWN) not in (None, False, UNKNOWN))
    return next(asking, next(iter(argument)))


def _filled(message: str, facts: Mapping[str, Any]) -> str:
    """Returns a message with the values of the settings that it names, as `{args.lr}`."""
    return re.sub(r"\{([\w.]+)\}", lambda found: repr(facts.get(found[1], UNKNOWN)), message)
