"""Rules about the settings of a constructor.

The inputs are the data of a rules file (JSON, stored next to the code that owns the constructor) and the settings of a
call; the output is a `Violation` for each rule that is broken. The check before a run and the constructor itself read
the same data through these functions, so that their verdicts cannot differ. A setting that is not known (`UNKNOWN`)
breaks no rule.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from forgather.aliases import alias_of, suggest, suggest_inside
from forgather.batch_triangle import batch_facts
from forgather.compatibility import combination_facts, read_matrix
from forgather.errors import Severity, nearest
from forgather.parallel_sizes import layout_facts
from forgather.parameter_settings import parameter_facts
from forgather.pipeline_schedules import with_schedules
from forgather.rule_conditions import AUTO, LARGEST_WHOLE, SOMETHING, UNKNOWN, holds, misfit, names_of
from forgather.value_text import are_equal, json_word, shown

_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "rules")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Violation(NamedTuple):
    """A broken rule.

    Args:
        code: the error code.
        message: a description of what was found.
        argument: the setting to point at; `args.lr` is the setting `lr` of the call that is the argument `args`.
        hint: a suggestion of what the user can do.
        severity: the severity of the report; only errors stop a run.
        expected: a description of what would have been accepted.
        found: the value of the setting.
    """

    code: str
    message: str
    argument: str
    hint: str | None = None
    severity: Severity = Severity.ERROR
    expected: str | None = None
    found: Any = None


class Rules(NamedTuple):
    """The rules for the settings of a constructor.

    Args:
        about: the names of the constructors, as configs write them.
        settings: the constraint of each setting, with `type`, `minimum`, `choices` and so on; see `misfit`.
        conflicts: the conditions that must not be true, each with a code, a message, a hint and the setting to point
            at (`argument`). `after` and `beside` name a setting that overrides `argument`. A rule with one of them
            applies only if the user wrote `argument`. With `after`, it does not apply if a file or option of higher
            precedence set the other setting; with `beside`, if a command-line option set it.
        derived: the settings that take the value of another setting (`value`) under a condition (`when`).
        defaults: the values of settings that are not given.
        closed: whether a name outside `settings` is an error.
        renamed: the current name of each setting that was renamed.
        quietly: the old names that give no warning.
        old_values: the constraint of a value under an old name, if the current setting accepts more.
        former: the settings that a library once had, with their defaults; giving the default changes nothing.
        without_effect: the settings that have no effect, with the reason, and the one value (`only`) that is accepted.
        elsewhere: another constructor, whose further settings are accepted with their default values only.
        instead: the hints on what to do in place of a setting that is not accepted, by name; its value may be None.
        facts: further names that conditions may read, with their values.
        computed: the functions whose results conditions may also read: "batch", "parameters", "layout" or
            "combination".
        arguments: the requirements on arguments, by name: `called_with` (how many by `positional`, further `keywords`,
            and the text `as` for messages), `object` (an object is called, so that a class would only be instantiated),
            `items` (what a list must contain), `files` (the suffixes that count in a folder), `folder` (texts that are
            not a folder), `trackers` (the value names trackers, see `forgather.trackers`), `keywords_of` (a mapping of
            keywords for one of its `callees`, which the setting `chosen_by` selects; the keywords that are `given`
            anyway, and the settings to use `instead` of some).
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

    @property
    def name(self) -> str:
        """The name that messages use for the constructor."""
        return self.about[0].rpartition(":")[2].rpartition(".")[2]

    def names(
        self, given: Mapping[str, Any], elsewhere: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[Violation]]:
        """Returns the settings under their current names, and the violations that concern names.

        Args:
            given: the settings as the user wrote them.
            elsewhere: the settings of the constructor `self.elsewhere` with their defaults; None if they are not known.
        """
        settings: dict[str, Any] = {}
        found: list[Violation] = []
        nested: dict[str, tuple[str, Any]] = {}
        written: dict[str, str] = {}
        others = {**self.former, **(elsewhere or {})}
        for name, value in self._in_own_words(given, found):
            present = name if name in self.settings else self.renamed.get(name) or self._accepted(name)
            if present is None and (inside := self._accepted_inside(name)) is not None:
                nested[name] = inside, value
                continue
            if present is None:
                found += self._without_place(name, value, others, is_known=elsewhere is not None)
                continue
            if isinstance(value, Mapping) and self.settings[present]["type"] == "flag":
                value, more = _switch_of(name, value)
                found += more
            if name in self.old_values:
                found += _values(name, value, self.old_values[name])
            is_word = name != present and name not in self.renamed
            # None under an old name or another tool's name means "not given", so it must not replace a default.
            if value is None and (is_word or name in self.quietly):
                continue
            # A template often gives the setting, and the word below it is the user's, as a repeated key would be.
            replaces = is_word and written.get(present) == present
            advice = f"write {present!r} in place of {name!r}"
            if name != present and name not in self.quietly:
                called = "is now" if name in self.renamed else "is called"
                instead = f"in place of {shown(settings[present])}" if replaces else "for it"
                message = f"{self.name}: {name!r} {called} {present!r}; {shown(value)} is used {instead}"
                found.append(Violation("FG825", message, name, advice, Severity.WARNING))
            if present in settings and not replaces:
                message = f"{present!r} is given twice, once as {name!r}"
                found.append(Violation(code="FG812", message=message, argument=name, hint=advice))
            settings[present] = value
            written[present] = name
        found += self._take_apart(settings)
        found += self._written_inside(settings, nested)
        return settings, found

    def _take_apart(self, settings: dict[str, Any]) -> Iterator[Violation]:
        """Takes apart the values that have several words, as `fsdp: "full_shard offload"`, and yields the violations.

        Args:
            settings: the settings, which are changed. A value with an unknown word remains, so that it is reported.
        """
        for name, rule in self.settings.items():
            value, parts = settings.get(name), rule.get("parts")
            words = value.replace(",", " ").split() if isinstance(value, str) else value
            if parts is None or not isinstance(words, list | tuple):
                continue
            named = [(word, parts.get(word.lower(), {}) if isinstance(word, str) else {}) for word in words]
            meant = [{"value": word, **known} for word, known in named]
            chosen = [one["value"] for one in meant if one["value"] is not None]
            if not all(isinstance(word, str) and word in rule["choices"] for word in chosen):
                continue
            if len({str(word).lower() for word in chosen}) > 1:
                message = f"{name} is {shown(value)}, which asks for both {chosen[0]} and {chosen[1]}"
                yield Violation("FG812", message, name, "keep one of them")
                continue
            settings[name] = chosen[0] if chosen else bool(words)
            for path, inner in (item for one in meant for item in one.get("inside", {}).items()):
                root, *keys = path.split(".")
                settings[root] = dict(settings.get(root) or {})
                if not _set_inside(settings[root], keys, inner, self.settings[root].get("prefix", "")):
                    yield Violation("FG812", f"{name} {shown(value)} and {path} differ", name, "keep one of them")

    def _written_inside(self, settings: dict[str, Any], nested: Mapping[str, tuple[str, Any]]) -> Iterator[Violation]:
        """Writes settings into the mappings to which they belong, and yields the violations.

        Args:
            settings: the settings, which are changed. A mapping is copied before it is changed.
            nested: the path inside a mapping and the value, by the name that the user wrote.
        """
        paths = {path for path, _ in nested.values()}
        for name, (path, value) in nested.items():
            root, *keys = path.split(".")
            outer, rule = settings.get(root), self.settings[root]
            if value is None or outer is UNKNOWN or outer is SOMETHING:
                continue
            # A setting of DeepSpeed alone must not start DeepSpeed; its stage does.
            if outer in (None, False) and "begins" in rule and paths.isdisjoint(rule["begins"]):
                # A switch that is off asks for nothing.
                if value is not False:
                    message = f"{name!r} is a setting inside of {root}, and {root} is not set"
                    yield Violation("FG811", message, name, rule["begin_with"], found=value)
                continue
            if isinstance(outer, str) and outer != AUTO:
                message = f"{name!r} is a setting inside of {root}, and {root} is the file {shown(outer)}"
                yield Violation("FG812", message, name, f"write it into the file, as {'.'.join(keys)}")
                continue
            settings[root] = dict(outer) if isinstance(outer, Mapping) else {}
            if not _set_inside(settings[root], keys, value, rule.get("prefix", "")):
                yield Violation("FG812", f"{name!r} and {path!r} differ", name, "keep one of them", found=value)
                continue
            message = f"{self.name}: {name!r} is called {path!r}; {shown(value)} is used for it"
            yield Violation("FG825", message, name, f"write {path!r} in place of {name!r}", Severity.WARNING)

    def _accepted_inside(self, name: str) -> str | None:
        """Returns the path of the setting inside a mapping that other tools write as `name`, next to the mapping."""
        alias = alias_of("setting", name) if self.closed else None
        if alias is None or not alias.is_accepted or not alias.to.startswith("inner:"):
            return None
        return alias.name if alias.name.partition(".")[0] in self.settings else None

    def _in_own_words(self, given: Mapping[str, Any], found: list[Violation]) -> Iterator[tuple[str, Any]]:
        """Yields the settings, in which an accepted value of another tool's word is replaced by what it sets here."""
        for name, value in given.items():
            alias = alias_of("setting", name) if self.closed and name not in self.settings else None
            word = json_word(value)
            meant = alias.values.get(word) if alias is not None and alias.is_accepted else None
            if not isinstance(meant, Mapping) or not meant.keys() <= self.settings.keys():
                yield name, value
                continue
            yield from meant.items()
            # A word that asks for the default asks for nothing.
            if written_out := ", ".join(f"{setting}: {json.dumps(of)}" for setting, of in meant.items()):
                message = f"{self.name}: {name}={shown(value)} is {written_out}"
                found.append(Violation("FG825", message, name, f"write {written_out}", Severity.WARNING))

    def _accepted(self, name: str) -> str | None:
        """Returns the setting that other tools call `name`, if the two differ in nothing but the name."""
        alias = alias_of("setting", name) if self.closed else None
        return alias.name if alias is not None and alias.is_accepted and alias.name in self.settings else None

    def _without_place(
        self, name: str, value: Any, others: Mapping[str, Any], *, is_known: bool
    ) -> Iterator[Violation]:
        """Yields the violations for a name that is not a setting.

        Args:
            name: the name that the user wrote.
            value: the value under that name.
            others: the settings of other constructors or releases, with their defaults.
            is_known: whether `others` contains all such settings.
        """
        if name in self.without_effect:
            rule = self.without_effect[name]
            if "only" in rule and value is not UNKNOWN and not are_equal(value, rule["only"]):
                message = f"{name}: {shown(value)} is not available"
                yield Violation(code="FG811", message=message, argument=name, hint=rule["why"])
            else:
                message = f"{self.name}: {name!r} has no effect: {rule['why']}"
                advice = "leave the setting out"
                yield Violation(code="FG825", message=message, argument=name, hint=advice, severity=Severity.WARNING)
        elif name in others:
            # A setting with its default value asks for nothing that would be missing.
            if (
                value is not None
                and value is not UNKNOWN
                and others[name] is not UNKNOWN
                and not are_equal(others[name], value)
            ):
                other = f"{_owner(self.elsewhere)} that this trainer does not have"
                message = f"{name!r} is a setting of {other} (found {shown(value)})"
                alias = alias_of("setting", name)
                hint = self.instead.get(name) or (alias.hint if alias else self.instead.get("*"))
                yield Violation(code="FG811", message=message, argument=name, hint=hint, found=value)
        elif self.closed and (is_known or self.elsewhere is None) and not (value is None and name in self.instead):
            message = f"{self.name} has no setting {name!r}"
            hint = self.instead.get(name) or self._in_other_words(name)
            hint = hint or suggest("setting", name, list(self.settings), owner=self.elsewhere or "")
            hint = hint or self.instead.get("unknown") or "see its documentation"
            yield Violation(code="FG810", message=message, argument=name, hint=hint)

    def _in_other_words(self, name: str) -> str | None:
        """Returns a hint about a setting that another tool calls `name` and that `settings` lacks; otherwise None."""
        alias = alias_of("setting", name)
        root = "" if alias is None else alias.name.partition(".")[0]
        if alias is None or alias.verdict != "same" or root in self.settings:
            return None
        instead = self.instead.get(root) or self.instead.get("*")
        return f"it is called {alias.name!r}" + (f"; {instead}" if instead else "")

    def values(self, settings: Mapping[str, Any]) -> Iterator[Violation]:
        """Yields a violation for each wrong value of a setting, and for each unknown key in a setting that is a
        mapping.
        """
        for name, rule in self.settings.items():
            yield from _values(name, settings.get(name, UNKNOWN), rule, self)

    def complete(self, settings: Mapping[str, Any], given: Collection[str] | None = None) -> dict[str, Any]:
        """Returns the settings, completed by defaults, derived settings and further facts.

        A setting inside a mapping gets the name `outer.inner`; its value is None if the mapping does not contain it.
        `given` are the names of the settings that the user gave; by default, all of them.
        """
        whole = {**self.facts, **self.defaults, **settings, "given": tuple(settings if given is None else given)}
        for name, rule in self.derived.items():
            # None means "not set"; the trainer then uses another setting, as it does for eval_steps.
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
        """Yields a violation for each conflict whose condition is true.

        Args:
            settings: all settings, including defaults; a setting that is missing is unknown.
            given: the names of the settings that the user wrote.
            main: whether the object is the one that a run executes; some rules apply to that object only.
            stands: a function that decides whether a rule with `after` or `beside` applies; None to skip such rules.
        """
        facts = {**settings, "given": tuple(given)}
        for rule in self.conflicts:
            if rule.get("main_only") and not main:
                continue
            # A trainer does not know which file wrote a setting, so such rules are skipped inside a run.
            if _is_of_origins(rule) and (stands is None or not stands(rule)):
                continue
            # A condition over an unknown setting is neither true nor false, and must not be reported as a conflict.
            if holds(rule["when"], facts) is True:
                yield Violation(
                    code=rule["code"],
                    message=_filled(rule["message"], facts),
                    argument=_pointed_at(rule["argument"], facts),
                    hint=_filled(rule["hint"], facts) if "hint" in rule else None,
                    severity=Severity(rule.get("severity", "error")),
                )

    def reads(self, argument: str) -> bool:
        """Returns whether a rule may read the settings of the call that is given as `argument`."""
        named = re.compile(rf"(?<![\w.]){re.escape(argument)}\.")
        return any(map(named.match, self.settings)) or any(named.search(rule["when"]) for rule in self.conflicts)

    def undecided(self, settings: Mapping[str, Any]) -> list[str]:
        """Returns the names of the unknown settings that keep a conflict from being evaluated."""
        names: dict[str, None] = {}
        for rule in self.conflicts:
            if not _is_of_origins(rule) and holds(rule["when"], {"given": (), **settings}) is UNKNOWN:
                for name in names_of(rule["when"]):
                    value = settings.get(name, UNKNOWN)
                    if name != "given" and (value is UNKNOWN or value is SOMETHING):
                        # A dict keeps the order in which the rules name the settings.
                        names[name] = None
        return list(names)


def is_path(text: str) -> bool:
    """Returns whether a text can only be a local path, and not the name of a repository on the Hub (`name`,
    `owner/name`).

    Example:
        >>> [is_path(text) for text in ("./model", "~/model", "/model", "a/b/c", "owner/name", "s3://bucket/x")]
        [True, True, True, True, False, False]
    """
    return "://" not in text and (text.startswith((".", "/", "~")) or text.count("/") > 1 or os.sep + os.sep in text)


def read_rules(file: str) -> tuple[Rules, ...]:
    """Returns the rules of a file: a JSON list of objects with the fields of `Rules`.

    An object with `builds_on` ([file, constructor]) inherits the rules about that constructor; its own entries take
    precedence. An object with `matrix` also has the conflicts of `Matrix.refusals(matrix)`.
    """
    with open(file, encoding="utf-8") as stream:
        return tuple(_rules(facts, os.path.dirname(file)) for facts in with_schedules(json.load(stream)))


@cache
def shipped_rules() -> Mapping[str, tuple[Rules, ...]]:
    """Returns the rules that are part of the package, by constructor."""
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
        # Lists of rules are added up; of mappings, the entries of the derived object win.
        return (*theirs, *own)
    return {**theirs, **own} if isinstance(own, Mapping) else own


def _is_of_origins(rule: Mapping[str, Any]) -> bool:
    """Returns whether a rule depends on the file or option that wrote a setting, which is known only before a run."""
    return "after" in rule or "beside" in rule


def _owner(constructor: str | None) -> str:
    return "transformers.Trainer" if constructor == "transformers:TrainingArguments" else str(constructor)


def _wrong_value(name: str, value: Any, expected: str, rule: Mapping[str, Any]) -> Violation:
    hint = f"expected {expected}"
    why = rule.get("unavailable", {}).get(value) if isinstance(value, str) else None
    if why:
        hint = f"{why}; {hint}"
    # Only a close word is worth a suggestion; `expected` lists all words anyway.
    elif isinstance(value, str):
        close = nearest(value, rule.get("choices", ()))
        if close and close.startswith("did"):
            hint = f"{close} {hint}"
        elif value == AUTO:
            hint += "; only `fgcli train` finds one" if rule.get("found") else "; nothing finds one for this setting"
        elif "number" in expected:
            hint += "; a number in quotes is a text"
    elif isinstance(value, float) and not math.isfinite(value):
        hint += "; infinity and NaN are no numbers to compute with"
    elif isinstance(value, int) and abs(value) > LARGEST_WHOLE:
        hint += f"; the largest whole number is {LARGEST_WHOLE}"
    message = f"{name.rpartition('.')[2]} is {shown(value)}"
    code, severity = rule.get("code", "FG813"), Severity(rule.get("severity", "error"))
    return Violation(code, message, name, hint=hint, severity=severity, expected=expected, found=value)


# values


def _values(name: str, value: Any, rule: Mapping[str, Any], rules: Rules | None = None) -> Iterator[Violation]:
    if value is UNKNOWN or value is SOMETHING:
        return
    expected = misfit(value, rule)
    if expected is not None:
        yield _wrong_value(name, value, expected, rule)
    elif "each" in rule and isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            for violation in _values(f"{name}.{key}", inner, rule["each"], rules):
                # The name of an item says nothing without that of the setting.
                yield violation._replace(message=f"{name.rpartition('.')[2]}.{violation.message}")
    elif isinstance(value, Mapping) and "keys" in rule:
        for key, inner in value.items():
            known = str(key).removeprefix(rule.get("prefix", ""))
            if known in rule["keys"]:
                yield from _values(f"{name}.{key}", inner, rule["keys"][known], rules)
            elif not rule.get("open"):
                yield Violation(
                    code="FG810",
                    message=f"{name} has no setting {shown(key)}",
                    argument=f"{name}.{key}",
                    hint=rule.get("instead", {}).get(key) or _inside_hint(name, known, rule, rules),
                    severity=Severity(rule.get("severity", "error")),
                )


def _inside_hint(name: str, key: str, rule: Mapping[str, Any], rules: Rules | None) -> str | None:
    outside, around = (tuple(rules.settings), rules.name) if rules else ((), "")
    return suggest_inside(name.rpartition(".")[2], key, list(rule["keys"]), outside=outside, around=around)


def _switch_of(name: str, section: Mapping[str, Any]) -> tuple[Any, list[Violation]]:
    """Returns the value of a switch that DeepSpeed writes as a section with `enabled`, and the violations of its keys.

    Args:
        name: the name of the switch, as in `activation_checkpointing`.
        section: the section. Without `enabled`, it is no value of a switch: in DeepSpeed, most sections are then off.
    """
    found: list[Violation] = []
    for key, value in section.items():
        if key == "enabled" or value is None or value is False:
            continue
        alias = alias_of("setting", str(key))
        hint = alias.why if alias is not None and alias.why else f"write {name}: true"
        found.append(Violation("FG811", f"{shown(key)} of {name} is not available", name, hint, found=value))
    return section.get("enabled", section), found


def _set_inside(mapping: dict[str, Any], keys: Sequence[str], value: Any, prefix: str) -> bool:
    """Sets a value inside a mapping and its mappings, which are copied; returns False if there is another value."""
    for key in keys[:-1]:
        inner = mapping.get(key)
        if inner is not None and not isinstance(inner, Mapping):
            return False
        mapping[key] = dict(inner or {})
        mapping = mapping[key]
    key = next((key for key in (keys[-1], prefix + keys[-1]) if mapping.get(key) is not None), keys[-1])
    if mapping.get(key) is not None and not are_equal(mapping[key], value):
        return False
    mapping[key] = value
    return True


def _inside(name: str, value: Any, outer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings inside a mapping, under names of the form `outer.inner`."""
    found: dict[str, Any] = {}
    absent = None if value is None else UNKNOWN
    for key, rule in outer["keys"].items():
        known = isinstance(value, Mapping)
        inner = value.get(key, value.get(outer.get("prefix", "") + key)) if known else absent
        found[f"{name}.{key}"] = inner
        if "keys" in rule:
            found |= _inside(f"{name}.{key}", inner, rule)
    return found


_COMPUTED: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]]
_COMPUTED = {
    "parameters": parameter_facts,
    "batch": batch_facts,
    "layout": layout_facts,
    "combination": combination_facts,
}


def _pointed_at(argument: str | Collection[str], facts: Mapping[str, Any]) -> str:
    """Returns the setting to point at: of several, the first with a known value other than None and False."""
    if isinstance(argument, str):
        return argument
    asking = (name for name in argument if facts.get(name, UNKNOWN) not in (None, False, UNKNOWN))
    return next(asking, next(iter(argument)))


def _filled(message: str, facts: Mapping[str, Any]) -> str:
    """Returns a message in which placeholders such as `{args.lr}` are replaced by the values of the settings."""
    return re.sub(r"\{([\w.]+)\}", lambda found: shown(facts.get(found[1], UNKNOWN), 300), message)
