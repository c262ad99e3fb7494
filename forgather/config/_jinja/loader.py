"""Finds the text of a template by its name, in one load.

The inputs are the search path and the name of a template. The output is a `Definition`: the text of a file, or an
inline sub-template of a file that was read for the same load. Invariants: of several definitions of a name, the one in
the child template is found before the one in its parent; files are read from the folders of the search path only; two
loads share nothing.
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
    """The text of a template, and where it is stored.

    Args:
        name: the name of the template in this load.
        file: the path of the file that contains the template.
        line: the line of the file on which the template begins, counted from 1.
        text: the text of the template as the user wrote it.
        root: the position on the search path of the folder that contains the file; None if the template is an inline
            sub-template.
    """

    name: str
    file: str
    line: int
    text: str
    root: int | None = None

    def span(self, line: int) -> Span:
        """Returns the place of a line in the file; `line` is counted from 1 at the beginning of the template."""
        return Span(self.file, self.line - 1 + line)


@dataclass(frozen=True, slots=True)
class TemplateRequest:
    """The statement that asks for a template.

    Args:
        by: the template that contains the statement.
        line: the line of the statement in that template.
        why: the kind of the statement: "extends", "include" or "import".
        use: the index in `Library.uses` of the template that contains the statement.
    """

    by: Definition
    line: int
    why: str
    use: int

    @property
    def span(self) -> Span:
        """The place of the statement in the user's file."""
        return self.by.span(self.line)


class Library:
    """All templates of one load.

    Args:
        environment: the inputs of the load, whose search path is used.
    """

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
        """Adds a text and its inline sub-templates to the load, and returns a `Definition`.

        The definition contains the part of the text before the first sub-template.

        Args:
            name: the name of the template.
            file: the path of the file that contains the text, or a pseudo name.
            text: the text, with line ends of any system.

        Raises:
            SyntaxFault: FG124 if the text is too long; FG105 if it defines one sub-template twice.
        """
        if len(text) > MAX_FILE_CHARS:
            message = f"the template has {len(text):,} characters; at most {MAX_FILE_CHARS:,} are read"
            raise too_large(message, Span(file, 1))
        # Rewriting and Jinja count lines by "\n".
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        if text.count("\n") > _MAX_LINES:
            raise too_large(f"the template has more than {_MAX_LINES:,} lines", Span(file, _MAX_LINES))
        self.sources[file] = SourceFile(file, text)
        # The sub-templates belong to this load as soon as the file is read, before anything asks for them.
        own, *parts = split(text)
        if len(parts) > _MAX_PARTS:
            raise SyntaxFault(
                f"the file contains {len(parts):,} sub-templates; at most {_MAX_PARTS:,} are read",
                code="FG124",
                span=Span(file, parts[_MAX_PARTS].line - 1),
                hint="spread them over several files",
            )
        seen: dict[str, int] = {}
        for part in parts:
            found = Definition(part.name or "", file, part.line, part.text)
            if found.name in seen:
                raise SyntaxFault(
                    f"the sub-template '{found.name}' is defined twice in one file",
                    code="FG105",
                    span=Span(file, part.line - 1),
                    hint=f"the first one is on line {seen[found.name]}; rename one of them",
                )
            seen[found.name] = part.line - 1
            # In the order of loading, which is child before parent: the first definition wins.
            self.inline.setdefault(found.name, []).append(found)
        return Definition(name, file, 1, own.text)

    def _add_file(self, name: str, path: str, root: int, ask: TemplateRequest | None) -> Definition:
        if path not in self._files:
            own = self.add_text(name, path, read_text(path, ask.span if ask else None))
            self._files[path] = Definition(name, path, 1, own.text, root)
        return self._files[path]

    # -- looking up

    def find(self, name: str, ask: TemplateRequest | None = None) -> Definition | None:
        """Returns the definition of a template that a statement asks for; None if there is no template of that name.

        Args:
            name: the name of a template.
            ask: the statement that asks for the template; None for the config itself.

        Raises:
            RenderError: FG114 if the name leads outside the search path; FG115 if the file cannot be read.
            SyntaxFault: FG106 if the file is not a text; FG124 if it is too large.
        """
        self.asked.add(name)
        outward = ask is not None and ask.why == "extends" and ask.by.name == name
        inline = self.inline.get(name, [])
        first_root = 0
        if outward and ask is not None:
            if ask.by in inline:
                # Inside sub-template X, `extends 'X'` means the next definition outward.
                inline = inline[inline.index(ask.by) + 1 :]
            elif ask.by.root is not None:
                # A file that extends its own name means the one in a later folder of the search path.
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
                raise _unreadable(path, "it is not a regular file", ask.span if ask else None)
        if directory is not None:
            raise _unreadable(directory, "it is a folder", ask.span if ask else None)
        return None

    def _candidates(self, name: str, first_root: int, ask: TemplateRequest | None) -> Iterator[tuple[int, str]]:
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

    def _refuse_outside(self, name: str, path: str, ask: TemplateRequest | None) -> None:
        # Links may lead within the search path only: a project must not read other files of the user.
        real = os.path.realpath(path)
        for root in self.roots:
            if real.startswith(os.path.join(os.path.realpath(root), "")):
                return
        raise RenderError(
            f"the template '{name}' is a link to a file outside the search path",
            code="FG114",
            span=ask.span if ask else Span(path, 1),
            hint=f"it points to {real}; copy the file, or add its folder to the search path",
        )

    def on_search_path(self, name: str) -> str | None:
        """Returns the first file with a template's name on the search path; None if there is none.

        Inline sub-templates are ignored.
        """
        for root in self.roots:
            path = os.path.join(root, *name.split("/"))
            if os.path.isfile(path):
                return path
        return None

    # -- what was used

    def note_use(self, found: Definition, ask: TemplateRequest | None) -> int:
        """Records which statement loaded a template; returns the index of the record in `uses`."""
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
        """Returns the index `use` and those of the templates that led to it by `extends`, nearest first."""
        chain = [use]
        while self.uses[chain[-1]].why == "extends" and (parent := self.uses[chain[-1]].parent) is not None:
            chain.append(parent)
        return chain

    def story(self, use: int) -> str:
        """Returns the statements that led to a template, as text: "config tiny.yaml, extends project.yaml"."""
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
            # A message is one screen; the first steps and the last two show how the chain began and where it failed.
            steps[3:-2] = [f"... {len(steps) - 5} more ..."]
        return ", ".join(steps)

    def missing(self, name: str, ask: TemplateRequest | None) -> RenderError:
        """Returns the error for a missing template; its hint has the nearest names and the searched folders."""
        if ask is not None and ask.why == "extends" and ask.by.name == name:
            return RenderError(
                f"'{name}' extends itself, and there is no other template of that name further out",
                code="FG113",
                span=ask.span,
                found=name,
                hint="name the template that this one builds on",
            )
        # A template that extends a wrong name cannot have meant itself.
        own = {ask.by.name} if ask is not None and ask.why == "extends" else set()
        names = [*self.inline]
        with suppress(TooManyEntriesError):
            # A huge folder on the search path must not delay the error; suggestions are best effort.
            names += self._listed()
        names = [other for other in names if other not in own]
        # A difference in case only works on some file systems, and is certainly the same name.
        close = [other for other in names if other.lower() == name.lower()]
        tail = os.path.basename(name)
        if not close and "/" not in name:
            close = [other for other in names if os.path.basename(other) == tail][:3]
            # `trainer.yaml` more likely means that of `trainers` than that of `options`.
            close.sort(key=lambda other: not other.startswith(os.path.splitext(tail)[0]))
        close = close or _of_other_tools(name, names) or close_matches(name, names, n=2, cutoff=0.7)
        close = close or [other for other in names if os.path.basename(other) == tail][:3]
        hint = ("did you mean " + " or ".join(f"'{other}'" for other in close) + "? ") if close else ""
        if self.roots:
            hint += "looked in " + ", ".join(self.roots[:4])
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
    """Returns a list with the template that corresponds to a name from another tool, or an empty list."""
    alias = alias_of("template", os.path.splitext(os.path.basename(name))[0])
    # A word may belong to several kinds: `models/pretrained.yaml` and `tokenizers/pretrained.yaml`.
    same_kind = alias is not None and os.path.dirname(name) in ("", os.path.dirname(alias.name))
    return [alias.name] if alias is not None and same_kind and alias.name in names else []


def read_text(path: str, span: Span | None = None) -> str:
    """Returns the text of a file.

    Args:
        path: the path of the file.
        span: the place of the statement that names the file, to which errors point; if it is None, they point to the
            file.

    Raises:
        RenderError: FG115 if the file cannot be read.
        SyntaxFault: FG106 if the content is not UTF-8 text.
    """
    try:
        with open(path, "rb") as stream:
            # One byte more than any text of the allowed length can have, so that a larger file is noticed.
            data = stream.read(MAX_FILE_CHARS * 4 + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__, span) from error
    # UTF-8 accepts NUL, but no text has one.
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


def too_large(message: str, span: Span) -> SyntaxFault:
    """Returns the error for a template that exceeds a size limit."""
    hint = "a config is a few hundred lines; keep data in files of its own"
    return SyntaxFault(message, code="FG124", span=span, hint=hint)


def _unreadable(path: str, why: str, span: Span | None) -> RenderError:
    return RenderError(
        f"the template '{os.path.basename(path)}' cannot be read: {why}",
        code="FG115",
        span=span or Span(path, 1),
        hint=f"the path is {path}",
    )
