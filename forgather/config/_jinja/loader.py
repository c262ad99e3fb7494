"""Which text a template name means, in one load.

Takes the search path, gives definitions: a file's own text, or an inline sub-template of a file that this
load has met. Keeps true: names resolve child before parent, files come from declared folders only, and
two loads share nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from forgather.aliases import alias_of
from forgather.bounded import TooManyEntriesError, walk_folders
from forgather.config.environment import ConfigEnvironment, TemplateUse
from forgather.config.split import split
from forgather.errors import RenderError, SyntaxFault
from forgather.source import SourceFile, Span
from forgather.spelling import close_matches

MAX_FILE_CHARS = 500_000
_MAX_LINES = 60_000
_MAX_LISTED = 2_000
_MAX_PARTS = 500
_BAD_NAME = re.compile(r"[\x00-\x1f\x7f\\]|^[/~]|^\w+:")


@dataclass(frozen=True, slots=True, eq=False)
class Definition:
    """A template's text, and where it stands.

    Args:
        name: the name it is known under.
        file: file that holds it.
        line: line of the file on which it begins.
        text: its text as the user wrote it.
        root: position of its folder on the search path; None for an inline sub-template.
    """

    name: str
    file: str
    line: int
    text: str
    root: int | None = None

    def span(self, line: int) -> Span:
        """Returns the place of a line of the template in its file."""
        return Span(self.file, self.line - 1 + line)


@dataclass(frozen=True, slots=True)
class Ask:
    """The statement that asks for a template: who, on which line, and why."""

    by: Definition
    line: int
    why: str
    use: int

    @property
    def span(self) -> Span:
        """The place of the statement."""
        return self.by.span(self.line)


class Library:
    """All templates of one load."""

    def __init__(self, environment: ConfigEnvironment) -> None:
        self.roots = [os.path.abspath(root) for root in environment.searchpath]
        self.sources: dict[str, SourceFile] = {}
        self.inline: dict[str, list[Definition]] = {}
        self.uses: list[TemplateUse] = []
        self.used: list[Definition] = []
        self.asked: set[str] = set()
        self._files: dict[str, Definition] = {}

    # -- reading

    def add_text(self, name: str, file: str, text: str) -> Definition:
        """Takes in a text that no file holds, or that was read already, with its inline sub-templates."""
        if len(text) > MAX_FILE_CHARS:
            raise SyntaxFault(
                f"the template has {len(text):,} characters; at most {MAX_FILE_CHARS:,} are read",
                code="FG124",
                span=Span(file, 1),
                hint="a config is a few hundred lines; keep data in files of its own",
            )
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        if text.count("\n") > _MAX_LINES:
            raise SyntaxFault(
                f"the template has more than {_MAX_LINES:,} lines",
                code="FG124",
                span=Span(file, _MAX_LINES),
                hint="a config is a few hundred lines; keep data in files of its own",
            )
        self.sources[file] = SourceFile(file, text)
        own, *parts = split(text)
        if len(parts) > _MAX_PARTS:
            raise SyntaxFault(
                f"the file holds {len(parts):,} sub-templates; at most {_MAX_PARTS:,} are read",
                code="FG124",
                span=Span(file, parts[_MAX_PARTS].line - 1),
                hint="spread them over several files",
            )
        seen: dict[str, int] = {}
        for part in parts:
            found = Definition(part.name or "", file, part.line, part.text)
            if found.name in seen:
                raise SyntaxFault(
                    f"the sub-template '{found.name}' stands twice in one file",
                    code="FG105",
                    span=Span(file, part.line - 1),
                    hint=f"the first one is on line {seen[found.name]}; rename one of them",
                )
            seen[found.name] = part.line - 1
            self.inline.setdefault(found.name, []).append(found)
        return Definition(name, file, 1, own.text)

    def _add_file(self, name: str, path: str, root: int, ask: Ask | None) -> Definition:
        if path not in self._files:
            own = self.add_text(name, path, read_text(path, ask.span if ask else None))
            self._files[path] = Definition(name, path, 1, own.text, root)
        return self._files[path]

    # -- looking up

    def find(self, name: str, ask: Ask | None = None) -> Definition | None:
        """Returns what `name` means for the statement that asks; None where nothing has the name."""
        self.asked.add(name)
        outward = ask is not None and ask.why == "extends" and ask.by.name == name
        inline = self.inline.get(name, [])
        first_root = 0
        if outward and ask is not None:
            if ask.by in inline:
                inline = inline[inline.index(ask.by) + 1 :]
            elif ask.by.root is not None:
                inline, first_root = [], ask.by.root + 1
        if inline:
            return inline[0]
        directory: str | None = None
        for root, path in self._candidates(name, first_root, ask):
            if os.path.isfile(path):
                self._refuse_outside(name, path, ask)
                return self._add_file(name, path, root, ask)
            if os.path.isdir(path):
                directory = path
            elif os.path.lexists(path):
                raise _unreadable(path, "is not a regular file", ask.span if ask else None)
        if directory is not None:
            raise _unreadable(directory, "is a folder", ask.span if ask else None)
        return None

    def _candidates(self, name: str, first_root: int, ask: Ask | None) -> Iterator[tuple[int, str]]:
        pieces = [piece for piece in name.split("/") if piece not in ("", ".")]
        if not pieces or ".." in pieces or _BAD_NAME.search(name) or len(name) > 1000:
            raise RenderError(
                f"{name[:80]!r} is not a template name",
                code="FG114",
                span=ask.span if ask else Span("<config>", 1),
                hint="a name is relative to the search path: no '..', no leading '/' or '~', no backslash",
            )
        for root in range(first_root, len(self.roots)):
            yield root, os.path.join(self.roots[root], *pieces)

    def _refuse_outside(self, name: str, path: str, ask: Ask | None) -> None:
        real = os.path.realpath(path)
        for root in self.roots:
            if real.startswith(os.path.join(os.path.realpath(root), "")):
                return
        raise RenderError(
            f"the template '{name}' is a link that leads out of the search path",
            code="FG114",
            span=ask.span if ask else Span(path, 1),
            hint=f"it leads to {real}; copy the file, or add its folder to the search path",
        )

    def on_search_path(self, name: str) -> str | None:
        """Returns the file that `name` would mean without inline sub-templates."""
        for root in self.roots:
            path = os.path.join(root, *name.split("/"))
            if os.path.isfile(path):
                return path
        return None

    # -- what was used

    def note_use(self, found: Definition, ask: Ask | None) -> int:
        """Records that a template was loaded, and why; returns its position."""
        use = TemplateUse(
            name=found.name,
            file=found.file,
            line=found.line,
            why=ask.why if ask else "config",
            by=ask.span if ask else None,
            parent=ask.use if ask else None,
        )
        self.uses.append(use)
        self.used.append(found)
        return len(self.uses) - 1

    def extends_chain(self, use: int) -> list[int]:
        """Returns the uses that led to `use` by `extends` alone, nearest first, itself included."""
        chain = [use]
        while self.uses[chain[-1]].why == "extends" and (parent := self.uses[chain[-1]].parent) is not None:
            chain.append(parent)
        return chain

    def story(self, use: int) -> str:
        """Returns how a template was reached, on one line: "config tiny.yaml, extends project.yaml"."""
        chain: list[TemplateUse] = []
        position: int | None = use
        while position is not None:
            chain.append(self.uses[position])
            position = self.uses[position].parent
        words = {"config": "config", "extends": "extends", "include": "includes", "import": "imports"}
        steps = [
            f"{words[item.why]} {item.name}"
            + (f" ({os.path.basename(item.by.file)}:{item.by.line})" if item.by else "")
            for item in reversed(chain)
        ]
        if len(steps) > 6:
            steps[3:-2] = [f"... {len(steps) - 5} more ..."]
        return ", ".join(steps)

    def missing(self, name: str, ask: Ask | None) -> RenderError:
        """Returns the error for a name that nothing has, with the nearest names and where was looked."""
        # The asker itself is never what was meant.
        own = {ask.by.name} if ask is not None and ask.why == "extends" else set()
        names = [*self.inline]
        with suppress(TooManyEntriesError):
            names += self._listed()
        names = [other for other in names if other not in own]
        close = [other for other in names if other.lower() == name.lower()]
        tail = os.path.basename(name)
        if not close and "/" not in name:
            close = [other for other in names if os.path.basename(other) == tail][:3]
            # `trainer.yaml` is rather that of `trainers` than that of `options`.
            close.sort(key=lambda other: not other.startswith(os.path.splitext(tail)[0]))
        close = close or _of_other_tools(name, names) or close_matches(name, names, n=2, cutoff=0.7)
        close = close or [other for other in names if os.path.basename(other) == tail][:3]
        hint = ("did you mean " + " or ".join(f"'{other}'" for other in close) + "? ") if close else ""
        if self.roots:
            hint += "looked in " + ", ".join(self.roots[:4])
        if ask is not None and ask.why == "extends" and ask.by.name == name:
            return RenderError(
                f"'{name}' extends itself, and no other template of that name stands further out",
                code="FG113",
                span=ask.span,
                found=name,
                hint="name the template that this one builds on",
            )
        return RenderError(
            f"there is no template '{name}'",
            code="FG112",
            span=ask.span if ask else Span("<config>", 1),
            found=name,
            hint=hint or None,
        )

    def _listed(self) -> Iterator[str]:
        count = 0
        for root in self.roots:
            for folder, folders, files in walk_folders(root):
                folders[:] = sorted(item for item in folders if not item.startswith("."))
                count += len(folders)
                for file in sorted(files):
                    count += 1
                    if count > _MAX_LISTED:
                        return
                    yield os.path.relpath(os.path.join(folder, file), root).replace(os.sep, "/")


def _of_other_tools(name: str, names: Sequence[str]) -> list[str]:
    """Returns the template that other tools call so, as `trainers/ddp.yaml`."""
    alias = alias_of("template", os.path.splitext(os.path.basename(name))[0])
    # A word may be that of several kinds: `models/pretrained.yaml` and `tokenizers/pretrained.yaml`.
    same_kind = alias is not None and os.path.dirname(name) in ("", os.path.dirname(alias.name))
    return [alias.name] if alias is not None and same_kind and alias.name in names else []


def read_text(path: str, span: Span | None = None) -> str:
    """Returns the text of a file. Raises a located error for anything but text."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_CHARS * 4 + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__, span) from error
    if b"\0" in data:
        line = data[: data.index(b"\0")].count(b"\n") + 1
        raise SyntaxFault(
            f"'{os.path.basename(path)}' is a binary file",
            code="FG106",
            span=Span(path, line),
            hint="a template is text in UTF-8",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise SyntaxFault(
            f"'{os.path.basename(path)}' is not UTF-8: byte 0x{data[error.start]:02x} on line {line}",
            code="FG106",
            span=Span(path, line),
            hint="save the file as UTF-8",
        ) from error


def _unreadable(path: str, why: str, span: Span | None) -> RenderError:
    return RenderError(
        f"the template '{os.path.basename(path)}' cannot be read: {why}",
        code="FG115",
        span=span or Span(path, 1),
        hint=f"the path is {path}",
    )
