"""What other tools call things: one table of words, and every suggestion about a name that does not exist.

Takes a word and the names that exist, gives a hint. Keeps true: the table is data (`ml/aliases.json`), read only where
a name is not found; spelling speaks only where the table does not; a deprecated name is never offered.

Verdicts: "same" (only the name differs), "near" (another setting does it, or it is written otherwise), "elsewhere" (it
is a block, a template or an option), "none" (there is no such thing; the reason says what to do).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

from forgather.errors import nearest

KINDS = ("setting", "inner", "block", "template", "constructor", "tag", "option", "variable", "field")
"""What a word can be looked up as; "keyword" has groups of names in place of records. Words of kind "inner" stand with
the mapping that they are written in, as `fsdp_config.sharding`."""
VERDICTS = ("same", "near", "elsewhere", "none")
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "aliases.json")


class Alias(NamedTuple):
    """A word of another tool.

    Args:
        word: the word.
        kind: what it was looked up as.
        verdict: one of `VERDICTS`.
        to: our name, as "setting:learning_rate"; empty where there is none.
        why: what to write, or the reason why there is nothing to write.
        tools: where the word comes from.
    """

    word: str
    kind: str
    verdict: str
    to: str = ""
    why: str = ""
    tools: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Our name, without its kind."""
        return self.to.partition(":")[2]

    @property
    def hint(self) -> str:
        """What to do about the word."""
        return f"did you mean {self.name!r}?" if self.verdict == "same" else self.why


@cache
def read_aliases() -> Mapping[str, Any]:
    """Returns the table: by kind, a record for each word; `keyword` and `deprecated` have forms of their own."""
    with open(_FILE, encoding="utf-8") as stream:
        found: dict[str, Any] = json.load(stream)
    return found


def alias_of(kind: str, word: str) -> Alias | None:
    """Returns what the table says of a word; None where it does not have it."""
    plain = word.lstrip("-").replace("-", "_")
    table = read_aliases()[kind]
    record = table.get(plain) or table.get(plain.lower())
    return None if record is None else _alias(kind, plain, record)


def aliases_of(word: str) -> list[Alias]:
    """Returns what the table says of a word under every kind, and as a keyword of a call."""
    found = [alias for kind in KINDS if (alias := alias_of(kind, word))]
    for group in _groups(word):
        name, owner = str(group["names"][0]), group["of"]
        if word != name:
            found.append(Alias(word, "keyword", "same", f"keyword:{name}", f"a keyword of {owner}"))
    return found


def other_words(setting: str) -> list[str]:
    """Returns the words that other tools have for a setting, where only the name differs."""
    aliases = (_alias("setting", word, record) for word, record in read_aliases()["setting"].items())
    return sorted(one.word for one in aliases if one.verdict == "same" and one.to == f"setting:{setting}")


def suggest(
    kind: str, word: str, candidates: Sequence[str], *, first: Sequence[str] = (), owner: str = ""
) -> str | None:
    """Returns what to write in place of a name that does not exist; None where nothing is near.

    Args:
        kind: what the name was to be: one of `KINDS`, or "keyword".
        word: what was written.
        candidates: names that exist.
        first: candidates that are meant rather than the others, where any of them is close.
        owner: the constructor that the candidates are parameters of.

    Example:
        >>> suggest("setting", "batch_size", ["per_device_train_batch_size", "eval_batch"])
        "did you mean 'per_device_train_batch_size'?"
        >>> suggest("setting", "learnign_rate", ["learning_rate"])
        "did you mean 'learning_rate'?"
    """
    if (same := _folded((*first, *candidates)).get(word.casefold())) is not None:
        return f"did you mean {same!r}?"
    if kind == "keyword":
        known = keyword_for(word, candidates)
        if known is not None:
            return f"did you mean {known!r}?"
    alias = alias_of("setting" if kind == "keyword" else kind, word)
    # A parameter may have the name of a setting: the arguments of another trainer, or a partial for them.
    is_told = alias is not None and kind != "keyword" and (alias.verdict != "same" or not candidates)
    if alias is not None and (is_told or alias.name in candidates):
        return alias.hint
    gone = read_aliases()["deprecated"].get(owner, {})
    return nearest(word, [name for name in candidates if name not in gone], first=first)


@lru_cache(maxsize=64)
def _folded(names: tuple[str, ...]) -> dict[str, str]:
    """Returns names by their small letters; of several the first."""
    return {name.casefold(): name for name in reversed(names)}


def suggest_inside(
    owner: str, word: str, candidates: Sequence[str], *, outside: Sequence[str] = (), around: str = ""
) -> str | None:
    """Returns what to write in place of a key that a mapping among the settings does not have.

    Args:
        owner: the setting that the mapping is the value of, or the mapping's own key in another.
        word: the key.
        candidates: keys that the mapping has.
        outside: settings that stand beside the mapping.
        around: what these are called.

    Example:
        >>> suggest_inside("fsdp_config", "sharding", ["shard_size", "sharding_strategy"])
        "did you mean 'sharding_strategy'?"
    """
    alias = alias_of("inner", f"{owner}.{word}")
    if alias is not None:
        name = alias.name.rpartition(".")[2]
        return f"did you mean {name!r}?" if alias.verdict == "same" else alias.why
    known = keyword_for(word, candidates)
    beside = alias_of("setting", word)
    known = known or (beside.name if beside is not None and beside.name in candidates else None)
    if known is not None:
        return f"did you mean {known!r}?"
    if word in outside:
        return f"it is a setting of {around}: write it beside {owner}, not inside"
    return nearest(word, candidates) or (f"its keys: {', '.join(candidates)}" if candidates else None)


def keyword_for(word: str, named: Sequence[str]) -> str | None:
    """Returns the parameter that another tool calls by that word.

    Example:
        >>> keyword_for("n_layer", ["hidden_size", "num_hidden_layers"])
        'num_hidden_layers'
    """
    for group in _groups(word):
        for name in map(str, group["names"]):
            if name in named and name != word:
                return name
    return None


def suggest_symbol(module: str, symbol: str) -> str | None:
    """Returns what to write in place of a symbol that a module does not have, as far as the table knows.

    Example:
        >>> suggest_symbol("transformers", "AdamW")
        "did you mean 'torch.optim:AdamW'?"
    """
    key = f"*:{symbol.rpartition('.')[2]}"
    record = read_aliases()["constructor"].get(key)
    found = None if record is None else _alias("constructor", key, record)
    return None if found is None or found.name == f"{module}:{symbol}" else found.hint


def suggest_module(module: str, symbol: str = "") -> str | None:
    """Returns what to write in place of a module that does not exist, as far as the table knows.

    Example:
        >>> suggest_module("forgather.ml.trainer.callbacks", "ProgressCallback")
        "did you mean 'forgather.ml.callbacks:ProgressCallback'?"
    """
    table = read_aliases()["constructor"]
    parts = module.split(".")
    for count in range(len(parts), 0, -1):
        record = table.get(".".join(parts[:count]))
        if record is None:
            continue
        found = _alias("constructor", module, record)
        if found.verdict != "same":
            return suggest_symbol(module, symbol) or found.hint
        inside = ".".join((found.name, *parts[count:]))
        return f"did you mean {inside + ':' + symbol if symbol else inside!r}?"
    return None


def _alias(kind: str, word: str, record: Mapping[str, Any]) -> Alias:
    return Alias(word, kind, record["verdict"], record.get("to", ""), record.get("why", ""), tuple(record["tools"]))


def _groups(word: str) -> Iterator[Mapping[str, Any]]:
    return (group for group in read_aliases()["keyword"] if word in group["names"])
