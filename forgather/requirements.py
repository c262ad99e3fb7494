"""Distributions that parts of a config need, and whether they are installed.

Takes the table `ml/requirements.json`, and the constructor or a setting of a call. Gives the distribution that is
missing or too old, with the command that installs it. Only the metadata of installed distributions is read; nothing is
imported and nothing is installed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

_TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ml", "requirements.json")


class Requirement(NamedTuple):
    """A distribution that is needed.

    Args:
        distribution: its name on the package index.
        version: the oldest version that is known to work; "" for any.
        extra: the extra of Forgather that installs it; "" for none.
    """

    distribution: str
    version: str = ""
    extra: str = ""

    @property
    def hint(self) -> str:
        """The command that installs the distribution."""
        if self.extra:
            return f"pip install 'forgather[{self.extra}]'"
        version = f">={self.version}" if self.version else ""
        return f"pip install '{self.distribution}{version}'" if version else f"pip install {self.distribution}"

    def lack(self) -> str | None:
        """Returns what is missing, as in "peft >= 0.18, which is not installed"; None if nothing is.

        The distribution is looked up in `sys.path` by its metadata.
        """
        # Importing the module takes 60 ms, and most configs need no distribution of the table.
        from importlib.metadata import PackageNotFoundError, version

        wanted = f"{self.distribution} >= {self.version}" if self.version else self.distribution
        try:
            found = version(self.distribution)
        except PackageNotFoundError:
            return f"{wanted}, which is not installed"
        return f"{wanted}, and {found} is installed" if self.version and _is_older(found, self.version) else None


def needed_distribution(name: str) -> Requirement:
    """Returns the requirement of a distribution; any version of one that is not in the table will do.

    Args:
        name: the name of the distribution.

    Example:
        >>> needed_distribution("peft")
        Requirement(distribution='peft', version='0.18', extra='finetune')
    """
    facts = _table()["distributions"].get(name, {})
    return Requirement(name, facts.get("version", ""), facts.get("extra", ""))


def needed_by_call(constructor: str) -> Iterator[Requirement]:
    """Yields the distributions that a call needs, whatever its settings are.

    Args:
        constructor: the name of the constructor, as the config writes it.

    Example:
        >>> [found.distribution for found in needed_by_call("sklearn.metrics:f1_score")]
        ['scikit-learn']
    """
    package = constructor.partition(":")[0].partition(".")[0]
    for rule in _table()["needed_by"]:
        is_named = "setting" not in rule and _is_one_of(constructor, rule.get("calls", ()))
        if is_named or package in rule.get("modules", ()):
            yield needed_distribution(rule["distribution"])


def needed_by_setting(constructor: str, setting: str, value: Any) -> Iterator[Requirement]:
    """Yields the distributions that a setting of a call needs.

    Args:
        constructor: the name of the constructor.
        setting: the name of the setting, as in `optim`; for a key of a mapping, with the keys before it, as in
            `quantization.load_in_4bit`.
        value: the value. None and False need nothing.

    Example:
        >>> [found.hint for found in needed_by_setting("forgather.ml:TrainingArguments", "optim", "paged_adamw_8bit")]
        ["pip install 'forgather[quant]'"]
    """
    if value is None or value is False:
        return
    for rule in _table()["needed_by"]:
        name = rule.get("setting")
        if name is None or not (setting == name or setting.endswith(f".{name}")):
            continue
        if _is_one_of(constructor, rule.get("calls", ("*",))) and _fits(value, rule.get("values")):
            yield needed_distribution(rule["distribution"])


def _is_one_of(constructor: str, patterns: Any) -> bool:
    return any(fnmatchcase(constructor, pattern) for pattern in patterns)


def _fits(value: Any, wanted: list[Any] | None) -> bool:
    """Returns whether a value is one of those that need the distribution; texts are patterns."""
    if wanted is None:
        return True
    return any(
        fnmatchcase(value, one) if isinstance(one, str) and isinstance(value, str) else value is one for one in wanted
    )


def _is_older(found: str, wanted: str) -> bool:
    # A dependency of transformers, which is not needed before a version is compared.
    from packaging.version import InvalidVersion, Version

    try:
        return Version(found) < Version(wanted)
    except InvalidVersion:  # of a distribution that was built by hand; whether it fits is not known
        return False


@cache
def _table() -> Any:
    with open(_TABLE, encoding="utf-8") as stream:
        return json.load(stream)
