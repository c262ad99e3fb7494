"""Translation of another tool's words into our settings.

The inputs are the words that a user wrote and the name of the tool that they come from; the output is our settings,
with a violation for each word that has no counterpart and a note for each word that was translated. The records are
those of `forgather.aliases`; there is no second table. A word that is one of our own settings keeps its value.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from forgather.aliases import Alias, alias_of, read_aliases, suggest
from forgather.errors import nearest
from forgather.rules import Violation
from forgather.value_text import are_equal, is_one_of, json_word, shown


class Translation(NamedTuple):
    """What the words of another tool are in ours.

    Args:
        settings: our settings by name.
        notes: one line for each word that was translated, as "gradient_clip_val=0.5 is max_grad_norm: 0.5".
        violations: one error for each word that is unknown, that has no counterpart, or that sets what another word
            has set.
        origins: the word from which each setting comes, by the name of the setting.
    """

    settings: dict[str, Any]
    notes: list[str]
    violations: list[Violation]
    origins: dict[str, str]


def translate(words: Mapping[str, Any], *, tool: str, known: Collection[str]) -> Translation:
    """Returns our settings for the words of another tool.

    None means "not given", as it does in all tools whose words are translated.

    Args:
        words: the words as the user wrote them, with their values.
        tool: the tool whose words they are, as in the records: "lightning", "deepspeed", "accelerate", "transformers"
            or "seeds".
        known: the names of our settings.

    Example:
        >>> translate({"max_epochs": 3}, tool="lightning", known=["num_train_epochs"]).settings
        {'num_train_epochs': 3}
    """
    found = Translation({}, [], [], {})
    for word, value in words.items():
        if value is None:
            continue
        alias = alias_of("setting", word, tool)
        if alias is not None and (tool in alias.tools or word not in known):
            meant = _settings_of(alias, word, value, tool)
        elif word in known:
            meant = {word: value}
        else:
            hint = suggest("setting", word, sorted({*known, *_words_of(tool)}))
            meant = Violation("FG810", f"{tool} has no word {word!r}, and neither has Forgather", word, hint)
        if isinstance(meant, Violation):
            found.violations.append(meant)
            continue
        if meant != {word: value}:
            written = ", ".join(f"{name}: {_written(of)}" for name, of in meant.items())
            found.notes.append(f"{word}={shown(value)} is {written or 'the default'}")
        _add(found, word, meant)
    return found


def _add(found: Translation, word: str, meant: Mapping[str, Any]) -> None:
    for name, of in meant.items():
        if name in found.settings and not are_equal(found.settings[name], of):
            message = f"{word!r} and {found.origins[name]!r} both set {name!r}"
            found.violations.append(Violation("FG812", message, word, "keep one of them"))
        found.settings[name] = of
        found.origins[name] = word


def translate_inside(owner: str, words: Mapping[str, Any], *, tool: str) -> Translation:
    """Returns our settings for the arguments of a class of another tool, or for the keys of one of its files.

    A word that says how processes start becomes a note: it is an option of the launch, and no setting.

    Args:
        owner: the name of the class, as in the records: "DeepSpeedPlugin".
        words: the arguments by name. None means "not given", and so does an empty list or mapping.
        tool: the tool that has the class.

    Returns:
        The settings are named by their paths, as in `fsdp_config.cpu_offload`.

    Example:
        >>> translate_inside("DeepSpeedPlugin", {"zero_stage": 3}, tool="accelerate").settings
        {'deepspeed.zero_optimization.stage': 3}
    """
    found = Translation({}, [], [], {})
    known = {name.partition(".")[2] for name in read_aliases()["inner"] if name.startswith(f"{owner}.")}
    of_launch: dict[str, list[str]] = {}
    for word, value in words.items():
        if value is None or is_one_of(value, ([], {}, "")):
            continue
        alias = alias_of("inner", f"{owner}.{word}", tool)
        if alias is None:
            hint = nearest(word, sorted(known))
            found.violations.append(Violation("FG810", f"{owner} of {tool} has no {word!r}", word, hint))
        elif alias.to.startswith("option:"):
            of_launch.setdefault(alias.why, []).append(f"{word}={shown(value)}")
        else:
            meant = _settings_of(alias, word, value, tool)
            if isinstance(meant, Violation):
                found.violations.append(meant)
                continue
            _add(found, word, meant)
    found.notes.extend(f"{', '.join(named)}: {why}" for why, named in of_launch.items())
    return found


def _written(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else json_word(value)


def _words_of(tool: str) -> list[str]:
    return [word for word, record in read_aliases()["setting"].items() if tool in record["tools"]]


def _settings_of(alias: Alias, word: str, value: Any, tool: str) -> dict[str, Any] | Violation:
    """Returns the settings that a word and its value mean, or the violation if they mean none."""
    if alias.values:
        meant = alias.values.get(json_word(value))
        if isinstance(meant, str):
            return Violation("FG811", f"{word}={shown(value)} of {tool} is not available", word, meant, found=value)
        if meant is not None:
            return dict(meant)
        expected = ", ".join(alias.values)
        if alias.verdict != "same":
            hint = f"expected {expected}" + (f": {alias.why}" if alias.why else "")
            return Violation("FG811", f"{word}={shown(value)} is no value of {tool}'s {word!r}", word, hint)
    if alias.verdict == "same":
        return {alias.name: value}
    return Violation("FG811", f"{word!r} of {tool} is not available", word, alias.why, found=value)
