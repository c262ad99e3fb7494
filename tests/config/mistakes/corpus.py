"""The corpus of seeded mistakes: records read from `data/`, and the edits carried out.

Takes the records, gives copies of the project with one mistake each, the places where a tool has to point, and a
verdict on what it said. Needs Python and ruamel.yaml, and nothing of the project that it is part of.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

HERE = Path(__file__).parent
PROJECT = HERE / "project"
SEVERITIES = ("lint", "note", "warning", "error")


@dataclass(frozen=True)
class Finding:
    """One finding of a tool: a file relative to the project, or absolute where it lies elsewhere."""

    file: str | None
    line: int | None
    code: str
    severity: str
    message: str
    hint: str = ""


@dataclass(frozen=True)
class Mistake:
    """One record of the corpus; `README.md` explains the fields."""

    id: str
    title: str
    category: str
    edits: tuple[Mapping[str, str], ...]
    config: str | None
    expect: Mapping[str, Any]
    also: tuple[str, ...] = ()
    other_end: Mapping[str, str] | None = None

    @property
    def file(self) -> str:
        """The file that the finding has to name."""
        return self.expect.get("file") or self.edits[0]["file"]

    def seed(self, folder: Path) -> None:
        """Makes a copy of the project with this mistake in `folder`, which must not exist."""
        shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
        self.carry_out(folder)

    def carry_out(self, folder: Path) -> None:
        """Makes this mistake in a copy of the project."""
        for edit in self.edits:
            path = folder / edit["file"]
            if "text" in edit:
                text = edit["text"]
            elif "append" in edit:
                text = path.read_text(encoding="utf-8") + edit["append"]
            else:
                text = path.read_text(encoding="utf-8")
                if text.count(edit["find"]) != 1:
                    raise ValueError(f"{self.id}: {edit['find']!r} occurs {text.count(edit['find'])} times")
                text = text.replace(edit["find"], edit["replace"])
            path.write_text(text, encoding="utf-8")

    def places(self, folder: Path) -> list[tuple[str, int]]:
        """Returns the place that the finding has to name; several where a contradiction has two ends."""
        if "line" in self.expect:
            return [(self.file, self.expect["line"])]
        marks = self.expect["mark"]
        ends = [(self.file, mark) for mark in ([marks] if isinstance(marks, str) else marks)]
        if self.other_end:
            ends.append((self.other_end["file"], self.other_end["mark"]))
        return [(file, self._line(folder / file, mark)) for file, mark in ends]

    def _line(self, path: Path, mark: str) -> int:
        text = path.read_text(encoding="utf-8")
        if text.count(mark) != 1:
            raise ValueError(f"{self.id}: the mark {mark!r} occurs {text.count(mark)} times in {path.name}")
        return text[: text.index(mark)].count("\n") + 1

    def shortfalls(self, findings: Iterable[Finding], folder: Path) -> list[str]:
        """Returns what is inexact about the findings of a tool; nothing where they are exact."""
        places = self.places(folder)
        findings = list(findings)
        hits = [item for item in findings if (item.file, item.line) in places and item.code == self.expect["code"]]
        least = SEVERITIES.index(self.expect["severity"])
        right = [hit for hit in hits if SEVERITIES.index(hit.severity) >= least]
        short = []
        if not right:
            wanted = f"{self.expect['severity']}[{self.expect['code']}] at {_listed(places)}"
            short.append(f"wanted {wanted}, found {[describe(found) for found in findings] or 'nothing'}")
        for hit in right[:1]:
            said = f"{hit.message} {hit.hint}"
            short += [f"{word!r} is not in {said!r}" for word in self.expect.get("words", ()) if word not in said]
            short += [] if hit.hint else [f"no hint: {hit.message!r}"]
        short += [
            f"besides: {describe(found)}"
            for found in findings
            if found.severity == "error" and found not in hits and found.code not in self.also
        ]
        return short


def _listed(places: Iterable[tuple[str, int]]) -> str:
    return " or ".join(f"{file}:{line}" for file, line in places)


def describe(found: Finding) -> str:
    """Returns a finding as one short text."""
    return f"{found.severity}[{found.code}] {found.file}:{found.line} {found.message}"


def read_mistakes(data: Path = HERE / "data") -> list[Mistake]:
    """Returns all mistakes, category by category."""
    return [
        Mistake(
            id=record["id"],
            title=record["title"],
            category=file.stem,
            edits=tuple(record["edits"]),
            config=record["config"],
            expect=record["expect"],
            also=tuple(record.get("also", ())),
            other_end=record.get("or"),
        )
        for file in sorted(data.glob("*.yaml"))
        for record in _plain(file)
    ]


def read_innocent() -> list[Mistake]:
    """Returns edits that are right, so that a tool must find no error and no warning."""
    return [
        Mistake(record["id"], record["title"], "innocent", tuple(record["edits"]), record["config"], {})
        for record in _plain(HERE / "innocent.yaml")
    ]


def read_known_gaps() -> dict[str, str]:
    """Returns the ids of the mistakes that this project's own check does not meet exactly, with the reason."""
    return dict(_plain(HERE / "known_gaps.yaml") or {})


def _plain(file: Path) -> Any:
    return YAML(typ="safe").load(file.read_text(encoding="utf-8"))
