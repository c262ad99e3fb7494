"""The commit of a repository, and whether its working tree has changes, without running a program of the repository.

The input is a folder; the output is commit and state. `git status` and `git diff` run filters, which are programs that
a repository can name. So Git only lists the index and the commit, and files that may have changed are hashed by this
module. If a filter would change such a file, the state is unknown.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha1, sha256

from forgather.project.git_repository import run_git

_MAX_DEPTH = 5
_MAX_BYTES = 1 << 30
# The index stores the lower 32 bits of a size.
_SIZE = 0xFFFFFFFF
_LINK, _SUBMODULE = b"120000", b"160000"
_CONVERSIONS = ("filter", "working-tree-encoding", "ident")
# The format of `ls-files --debug` is not stable; if the details do not match, files are hashed instead.
_ENTRY = re.compile(
    rb"(?P<flag>\S) (?P<mode>\d+) (?P<digest>[0-9a-f]+) \d\t(?P<path>[^\0]+)\0"
    rb"(?:  ctime: \d+:\d+\n  mtime: (?P<seconds>\d+):(?P<nanoseconds>\d+)\n"
    rb"  dev: .*\n  uid: .*\n  size: (?P<size>\d+)\tflags: .*\n)?"
)


class _Unknown(Exception):  # it only ends the search
    """The state cannot be determined without running a program of the repository."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A file in Git's index.

    Args:
        mode: the mode of the file, as Git writes it.
        digest: the hash of the file's blob.
        path: the path relative to the top of the working tree.
        watched: whether Git compares the index with the file.
        seen: the size and time of the file when Git last compared it; None if they are unknown.
    """

    mode: bytes
    digest: bytes
    path: bytes
    watched: bool
    seen: tuple[int, int] | None


def git_state(folder: str, output_dir: str | None = None) -> dict[str, object] | None:
    """Returns the commit of a repository, and whether the working tree has changes; None outside a repository.

    The result has the keys "commit" and "dirty"; the value of "dirty" is None if it cannot be determined.

    Args:
        folder: the project's folder; an untracked file in this folder is a change, too.
        output_dir: the folder that runs write to; untracked files in it are ignored.
    """
    commit, top = _git_line(folder, "rev-parse", "HEAD"), _git_line(folder, "rev-parse", "--show-toplevel")
    if commit is None or top is None:
        return None
    dirty: bool | None
    try:
        dirty = _has_changes(top) or _has_untracked(folder, output_dir)
    except (_Unknown, OSError, subprocess.TimeoutExpired):
        dirty = None
    return {"commit": commit, "dirty": dirty}


def _git_line(folder: str, *arguments: str) -> str | None:
    try:
        done = run_git(folder, *arguments, seconds=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(done.stdout).rstrip("\n") if done.returncode == 0 else None


def _git_output(folder: str, *arguments: str, given: bytes = b"") -> bytes:
    done = run_git(folder, *arguments, given=given, seconds=20)
    if done.returncode != 0:
        raise _Unknown
    return done.stdout


def _has_changes(top: str, depth: int = 0) -> bool:
    """Returns whether the index or the files of a working tree differ from its commit.

    Raises:
        _Unknown: if this cannot be determined without running a program of the repository.
    """
    entries = list(_index(top))
    if {entry.path: (entry.mode, entry.digest) for entry in entries} != _committed(top):
        return True
    index_time = os.stat(_file_of_git(top, "index")).st_mtime_ns
    touched = [entry for entry in entries if entry.watched and not _is_untouched(top, entry, index_time)]
    if any(_is_another(top, entry) for entry in touched):
        return True
    submodules = [entry for entry in touched if entry.mode == _SUBMODULE]
    files = [entry for entry in touched if entry.mode != _SUBMODULE]
    _refuse_many_bytes(top, files)
    differ = [entry for entry in files if not _is_as_stored(top, entry)]
    unclear = _converted(top, differ)
    if any(entry.path not in unclear for entry in differ) or any(_has_moved(top, it, depth) for it in submodules):
        return True
    if unclear:
        raise _Unknown
    return False


def _index(top: str) -> Iterator[_Entry]:
    listed, at = _git_output(top, "ls-files", "-s", "-v", "-z", "--debug"), 0
    while found := _ENTRY.match(listed, at):
        at = found.end()
        seen = None
        if found["size"] is not None:
            seen = int(found["size"]), int(found["seconds"]) * 10**9 + int(found["nanoseconds"])
        # A lower-case flag means "assume unchanged", and S "skip worktree".
        watched = found["flag"].isupper() and found["flag"] != b"S"
        yield _Entry(found["mode"], found["digest"], found["path"], watched, seen)
    if at != len(listed):
        raise _Unknown


def _committed(top: str) -> dict[bytes, tuple[bytes, bytes]]:
    """Returns mode and blob hash of each file of the commit, by path."""
    found = {}
    for record in _git_output(top, "ls-tree", "-r", "-z", "HEAD").split(b"\0")[:-1]:
        facts, _, path = record.partition(b"\t")
        mode, _, digest = facts.split(b" ")
        found[path] = mode, digest
    return found


def _file_of_git(top: str, name: str) -> str:
    found = _git_line(top, "rev-parse", "--git-path", name)
    if found is None:
        raise _Unknown
    return os.path.join(top, found)


def _stat(top: str, entry: _Entry) -> os.stat_result | None:
    try:
        return os.lstat(os.path.join(os.fsencode(top), entry.path))
    except OSError:
        return None


def _kind(facts: os.stat_result) -> bytes:
    if stat.S_ISREG(facts.st_mode):
        return b"100755" if facts.st_mode & stat.S_IXUSR else b"100644"
    return _LINK if stat.S_ISLNK(facts.st_mode) else b""


def _is_another(top: str, entry: _Entry) -> bool:
    """Returns whether a file is gone or has another mode or size, so that Git reports it without comparing contents."""
    facts = _stat(top, entry)
    if facts is None:
        return True
    if entry.mode == _SUBMODULE:
        return False
    kind = _kind(facts)
    if kind != entry.mode and (kind == b"" or _LINK in (kind, entry.mode) or _compares_modes(top)):
        return True
    return entry.seen is not None and entry.seen[0] not in (0, facts.st_size & _SIZE)


def _compares_modes(top: str) -> bool:
    return _git_line(top, "config", "--type=bool", "core.fileMode") != "false"


def _is_untouched(top: str, entry: _Entry, index_time: int) -> bool:
    """Returns whether a file has the size and time that Git recorded, and is older than the index."""
    facts = _stat(top, entry)
    if facts is None or entry.seen is None or entry.mode != _kind(facts):
        return False
    # A file that was written in the same moment as the index may have changed after Git read it ("racy Git").
    return entry.seen == (facts.st_size & _SIZE, facts.st_mtime_ns) and facts.st_mtime_ns < index_time


def _refuse_many_bytes(top: str, entries: Sequence[_Entry]) -> None:
    if sum(facts.st_size for entry in entries if (facts := _stat(top, entry)) is not None) > _MAX_BYTES:
        raise _Unknown


def _is_as_stored(top: str, entry: _Entry) -> bool:
    """Returns whether the content of a file has the hash in the index, as it is or with LF as line ends."""
    path = os.path.join(os.fsencode(top), entry.path)
    if entry.mode == _LINK:
        return entry.digest == _blob(os.readlink(path), entry)
    with open(path, "rb") as stream:
        content = stream.read()
    # With `core.autocrlf`, Git stores LF for a CRLF in the working tree.
    return entry.digest in (_blob(content, entry), _blob(content.replace(b"\r\n", b"\n"), entry))


def _blob(content: bytes, entry: _Entry) -> bytes:
    header = b"blob %d\0" % len(content)
    # A repository can use SHA-256 for its object names.
    if len(entry.digest) == 2 * sha256().digest_size:
        return sha256(header + content).hexdigest().encode()
    return sha1(header + content, usedforsecurity=False).hexdigest().encode()


def _converted(top: str, entries: Sequence[_Entry]) -> set[bytes]:
    """Returns the paths whose content Git would convert before hashing it; this module does not do such conversions."""
    if not entries:
        return set()
    given = b"".join(entry.path + b"\0" for entry in entries)
    answers = _git_output(top, "check-attr", "-z", "--stdin", *_CONVERSIONS, given=given).split(b"\0")
    triples = zip(answers[::3], answers[2::3], strict=False)
    return {path for path, value in triples if value not in (b"unspecified", b"unset")}


def _has_moved(top: str, entry: _Entry, depth: int) -> bool:
    """Returns whether a submodule is at another commit, or its working tree has changes."""
    folder = os.path.join(top, os.fsdecode(entry.path))
    if not os.path.lexists(os.path.join(folder, ".git")):
        return False
    if depth >= _MAX_DEPTH:
        raise _Unknown
    return _git_line(folder, "rev-parse", "HEAD") != entry.digest.decode() or _has_changes(folder, depth + 1)


def _has_untracked(folder: str, output_dir: str | None) -> bool:
    inside = os.path.relpath(os.path.realpath(output_dir), os.path.realpath(folder)) if output_dir else os.pardir
    excluded = [] if inside.startswith(os.pardir) else [f":(exclude,literal){inside}"]
    words = ["ls-files", "--others", "--exclude-standard", "--directory", "--no-empty-directory", "-z"]
    return bool(_git_output(folder, *words, "--", ".", *excluded))
