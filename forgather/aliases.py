"""Names that other tools use, and suggestions for names that do not exist.

The inputs are a name and the names that exist; the output is a hint. The table of other tools' names is data
(`ml/aliases.json`) and is read only when a name is not found. A record in the table takes precedence over a name of
similar spelling, and a deprecated name is never suggested.

Each record has one of four verdicts. "same": only the name differs. "near": a different setting has this effect, or the
value is written in another form. "elsewhere": a block, a template or an option takes the place of the setting. "none":
Forgather has no counterpart, and the reason says what to do.

A record may have further entries. `accepted`: a trainer's arguments take the name, with a note; only the name differs,
or the place, where `to` is the path of a setting inside a mapping (`inner:deepspeed.zero_optimization.stage`), or
`values` says what each value sets.
`values`: our settings for each value of the other tool, or the reason why a value has no counterpart. `by_tool`: the
entries that replace those of the record where one tool uses the name differently.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from forgather.errors import nearest
from forgather.spelling import same_letters

KINDS = ("setting", "inner", "block", "template", "constructor", "tag", "option", "variable", "field")
"""The kinds of name that the table has records for. "keyword" is a further kind, with groups of names in place of
records. A name of kind "inner" includes the mapping that it belongs to, as in `fsdp_config.sharding`.
"""
VERDICTS = ("same", "near", "elsewhere", "none")
_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "aliases.json")


class Alias(NamedTuple):
    """A name that another tool uses.

    Args:
        word: the name that the other tool uses.
        kind: the kind under which the name was looked up, one of `KINDS`.
        verdict: the relation to our names, one of `VERDICTS`.
        to: our name with its kind, as in "setting:learning_rate"; empty if there is no counterpart.
        why: an explanation of what to write instead, or of why there is no counterpart.
        tools: the tools that use the name.
        is_accepted: True if the arguments of a trainer take the name.
        values: our settings for each value of the other tool, or a text with the reason why the value has no
            counterpart; keys are values as JSON writes them, and texts without quotes.
        tools_that_differ: the tools that use the name differently, each with a meaning of its own; empty if the meaning
            is that of one tool.
    """

    word: str
    kind: str
    verdict: str
    to: str = ""
    why: str = ""
    tools: tuple[str, ...] = ()
    is_accepted: bool = False
    values: Mapping[str, Mapping[str, Any] | str] = MappingProxyType({})
    tools_that_differ: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that Forgather uses, without its kind."""
        return self.to.partition(":")[2]

    @property
    def hint(self) -> str:
        """The hint that a message gives for this name."""
        # Where a word means a setting inside a mapping, the reason says what else the mapping needs. Of a name that
        # tools use differently, it says what each of them means.
        is_plain = self.verdict == "same" and not (self.to.startswith("inner:") and self.why)
        is_plain &= not (self.tools_that_differ and self.why)
        return f"did you mean {self.name!r}?" if is_plain else self.why


@cache
def read_aliases() -> Mapping[str, Any]:
    """Returns the records of all names, by kind; `keyword` and `deprecated` have their own formats."""
    with open(_FILE, encoding="utf-8") as stream:
        found: dict[str, Any] = json.load(stream)
    return found


def alias_of(kind: str, word: str, tool: str | None = None) -> Alias | None:
    """Returns the record of a name under one kind, or None if the table has no such record.

    Args:
        kind: the kind of the name, one of `KINDS`.
        word: the name. Leading dashes are ignored, and other dashes are read as underscores.
        tool: the tool whose meaning counts where tools differ; None for what holds for all of them.
    """
    # Options are written with dashes, settings with underscores; the table has one form.
    plain = word.lstrip("-").replace("-", "_")
    table = read_aliases()[kind]
    record = table.get(plain) or table.get(plain.lower())
    if record is not None and tool is not None:
        own = record.get("by_tool", {}).get(tool, {})
        record = {**{key: entry for key, entry in record.items() if key != "by_tool"}, **own}
    return None if record is None else _alias(kind, plain, record)


def aliases_of(word: str, tool: str | None = None) -> list[Alias]:
    """Returns the records of a name under every kind, in every mapping, and as a keyword argument.

    Args:
        word: the name.
        tool: the tool whose meaning counts where tools differ; None for what holds for all of them.
    """
    found = [alias for kind in KINDS if (alias := alias_of(kind, word, tool))]
    # A class of another tool, by its name alone: a logger, a callback.
    found += [alias._replace(word=word) for alias in [alias_of("constructor", f"*:{word}", tool)] if alias]
    inside = (path for path in read_aliases()["inner"] if path.rpartition(".")[2] == word)
    found += [alias for path in inside if (alias := alias_of("inner", path, tool))]
    for group in _groups(word):
        # The first name of a group is the one that our constructors use.
        name, owner = str(group["names"][0]), group["of"]
        if word != name:
            found.append(Alias(word, "keyword", "same", f"keyword:{name}", f"a keyword of {owner}"))
    return found


def other_words(setting: str) -> list[str]:
    """Returns the names that other tools use for a setting, if only the name differs."""
    aliases = (_alias("setting", word, record) for word, record in read_aliases()["setting"].items())
    return sorted(one.word for one in aliases if one.verdict == "same" and one.to == f"setting:{setting}")


def suggest(kind: str, word: str, candidates: Sequence[str], *, owner: str = "") -> str | None:
    """Returns a hint for a name that does not exist; None if no name is close.

    Args:
        kind: the kind of name that was expected: one of `KINDS`, or "keyword".
        word: the name that was written.
        candidates: the names that exist.
        owner: the constructor that has the candidates as parameters; "" if there is no constructor.

    Example:
        >>> suggest("setting", "micro_batch_size", ["per_device_train_batch_size", "eval_batch"])
        "did you mean 'per_device_train_batch_size'?"
        >>> suggest("setting", "learnign_rate", ["learning_rate"])
        "did you mean 'learning_rate'?"
    """
    # A difference in case only is certain, so it comes before the table.
    if (same := same_letters(word, candidates)) is not None:
        return f"did you mean {same!r}?"
    if kind == "keyword":
        known = keyword_for(word, candidates)
        if known is not None:
            return f"did you mean {known!r}?"
    alias = alias_of("setting" if kind == "keyword" else kind, word)
    # A parameter of any constructor can have the name of a setting by chance, so the record of a setting is used for a
    # keyword only if the constructor has the parameter that the record suggests.
    is_told = alias is not None and kind != "keyword" and (alias.verdict != "same" or not candidates)
    # Our own functions of data are never called with a setting of another tool by chance.
    is_told |= alias is not None and alias.verdict == "none" and owner.startswith("forgather.ml.data:")
    # A word that means a setting inside a mapping is explained by the place that it has there.
    known = "" if alias is None else alias.name.partition(".")[0] if alias.to.startswith("inner:") else alias.name
    is_told |= alias is not None and kind != "keyword" and known != alias.name
    if alias is not None and (is_told or known in candidates):
        return alias.hint
    # A deprecated name may be the most similar one, and would only lead to the next warning.
    gone = read_aliases()["deprecated"].get(owner, {})
    return nearest(word, [name for name in candidates if name not in gone])


def suggest_inside(
    owner: str, word: str, candidates: Sequence[str], *, outside: Sequence[str] = (), around: str = ""
) -> str | None:
    """Returns a hint for an unknown key of a mapping that is the value of a setting.

    Args:
        owner: the name of the setting. If the mapping is nested, this is the key of the mapping in the outer mapping.
        word: the unknown key.
        candidates: the keys that the mapping accepts.
        outside: the names of all settings of the constructor that has the setting `owner`.
        around: the name of this constructor, for the hint.

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
        return f"it is a setting of {around}: write it next to {owner}, not inside"
    return nearest(word, candidates) or (f"its keys: {', '.join(candidates)}" if candidates else None)


def keyword_for(word: str, named: Sequence[str]) -> str | None:
    """Returns the existing parameter that other tools call `word`; None if there is no such parameter.

    Args:
        word: the name that was written.
        named: the names of the parameters that exist.

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
    """Returns a hint for a symbol that a module does not have; None if the table has no record for the symbol.

    Example:
        >>> suggest_symbol("transformers", "AdamW")
        "did you mean 'torch.optim:AdamW'?"
    """
    key = f"*:{symbol.rpartition('.')[2]}"
    record = read_aliases()["constructor"].get(key)
    found = None if record is None else _alias("constructor", key, record)
    return None if found is None or found.name == f"{module}:{symbol}" else found.hint


def suggest_module(module: str, symbol: str = "") -> str | None:
    """Returns a hint for a module that does not exist.

    The hint is None if the table has no record of the module or of a parent package.

    Args:
        module: the dotted name of the module.
        symbol: the name that was to be imported from the module.

    Example:
        >>> suggest_module("forgather.ml.trainer.callbacks", "ProgressCallback")
        "did you mean 'forgather.ml.callbacks:ProgressCallback'?"
    """
    table = read_aliases()["constructor"]
    parts = module.split(".")
    # A package may have moved as a whole, so the longest known prefix of the name decides.
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
    return Alias(
        word,
        kind,
        record["verdict"],
        record.get("to", ""),
        record.get("why", ""),
        tuple(record["tools"]),
        record.get("accepted", False),
        record.get("values", {}),
        tuple(record.get("by_tool", ())),
    )


def _groups(word: str) -> Iterator[Mapping[str, Any]]:
    return (group for group in read_aliases()["keyword"] if word in group["names"])
