"""Versions of Python and of libraries, each determined when it is read.

`VersionTable` is for templates, and `installed_versions` for the record of a run. Creating and listing the table
imports nothing; reading a version does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping

TEMPLATE_KEYS = ("python", "torch", "transformers", "accelerate")
RECORD_KEYS = (
    "forgather", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "jinja2",
    "ruamel.yaml",
)  # fmt: skip


class VersionTable(Mapping[str, str | None]):
    """The version of each library that templates can read; None for a library that is not installed.

    Args:
        recorded: the versions that a past run recorded; None for the installed versions.

    Example:
        >>> list(VersionTable())
        ['python', 'torch', 'transformers', 'accelerate']
    """

    def __init__(self, recorded: Mapping[str, str | None] | None = None) -> None:
        self._recorded = recorded

    def __getitem__(self, name: str) -> str | None:
        if name not in TEMPLATE_KEYS:
            raise KeyError(name)
        return _version(name) if self._recorded is None else self._recorded.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(TEMPLATE_KEYS)

    def __len__(self) -> int:
        return len(TEMPLATE_KEYS)

    def __repr__(self) -> str:
        """Returns the whole table as a YAML mapping on one line, for templates that print it."""
        return "{" + ", ".join(f"{name}: {_quoted(version)}" for name, version in self.items()) + "}"


def installed_versions(names: Iterable[str] = RECORD_KEYS) -> dict[str, str | None]:
    """Returns the versions of Python and of the named distributions; None for a distribution that is not installed."""
    return {"python": sys.version.split()[0]} | {name: _version(name) for name in names}


def _quoted(version: str | None) -> str:
    return "null" if version is None else f'"{version}"'


def _version(name: str) -> str | None:
    if name == "python":
        return sys.version.split()[0]
    # importlib.metadata takes longer to import than `fgcli --help` runs, and most templates never need it.
    from importlib.metadata import PackageNotFoundError, version

    if name == "forgather":
        from forgather import __version__

        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None
