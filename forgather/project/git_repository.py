"""Read-only access to Git, and to the files of a revision, in a repository that is not trusted.

The input is a folder and arguments; the output is that of Git, or a `Tree` with the files of a revision. Git only
reads: it does not fetch, prompt, start a pager or refresh the index, and no hook or file system monitor of the
repository runs. `git status` and `git diff` are not used, because they run filters. Git uses the repository of the
folder, even if environment variables of the caller name another one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from forgather.errors import ProjectError, nearest
from forgather.project.locations import cache_dir

# Git sets these for its hooks, and they would redirect Git to another repository or index.
_LOCAL = frozenset(
    ("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE",
     "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_REPLACE_REF_BASE",
     "GIT_SHALLOW_FILE", "GIT_WORK_TREE")
)  # fmt: skip
_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    # An older Git ignores GIT_NO_LAZY_FETCH; GIT_ALLOW_PROTOCOL leaves it no protocol to fetch with.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_PAGER": "cat",
    "LC_ALL": "C",
}
_SETTINGS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


def run_git(
    folder: str, *arguments: str, given: bytes = b"", seconds: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """Runs Git in a folder and returns the finished process.

    Args:
        folder: the folder in which Git runs.
        *arguments: the arguments of Git.
        given: the standard input.
        seconds: the time limit in seconds.

    Raises:
        OSError: if Git is not installed.
        subprocess.TimeoutExpired: if Git does not finish within the time limit.
    """
    kept = {name: value for name, value in os.environ.items() if name not in _LOCAL}
    return subprocess.run(
        ["git", *_SETTINGS, "-C", folder, *arguments],
        input=given,
        capture_output=True,
        timeout=seconds,
        check=False,
        env={**kept, **_QUIET},
    )


# Bytes of the largest file that is read; templates and modules are smaller, only data is larger.
_MAX_BYTES = 2_000_000
_LINK, _FILES = "120000", ("100644", "100755", "120000")


class Tree:
    """The files of a Git revision.

    Args:
        top: the absolute folder of the working tree.
        revision: the revision as the user wrote it.
        commit: the full hash of the revision's commit.
        folder: the private folder into which files are written, at the same relative paths as in `top`.
    """

    def __init__(self, top: str, revision: str, commit: str, folder: str) -> None:
        self.top, self.revision, self.commit, self.folder = top, revision, commit, folder
        self._blobs = {path: (mode, blob) for path, mode, blob in _listing(top, commit)}
        self._written_out: set[str] = set()

    def has(self, file: str) -> bool:
        """Returns whether the revision contains a file, given by its absolute path in the working tree."""
        return self._inside(file) in self._blobs

    def is_folder(self, folder: str) -> bool:
        """Returns whether a folder exists.

        If the folder is inside the private folder, its files at the revision are written first. Any other folder is
        looked up in the file system.
        """
        inside = _below(folder, self.folder)
        if inside is None:
            return os.path.isdir(folder)
        # A parent may be a symbolic link, which then has to exist first.
        for parent in (*_parents(inside), inside):
            if parent == inside or parent in self._blobs:
                self.write_out(parent)
        return os.path.isdir(self._target(inside))

    def write_out(self, part: str) -> str:
        """Writes a file or folder of the revision into the private folder, and returns the path of the copy.

        Args:
            part: the path relative to `top`; "" for all files.
        """
        if not any(part == done or part.startswith(f"{done}/") for done in self._written_out):
            prefix = f"{part}/" if part else ""
            wanted = {
                path: entry
                for path, entry in self._blobs.items()
                if (path == part or path.startswith(prefix)) and not os.path.lexists(self._target(path))
            }
            self._write(wanted)
            self._written_out.add(part)
        return self._target(part)

    def private_path(self, path: str) -> str:
        """Returns the path in the private folder for a path in the working tree; other paths are unchanged."""
        inside = self._inside(path)
        return path if inside is None else self._target(inside)

    def real(self, path: str) -> str:
        """Returns the path in the working tree for a path in the private folder; other paths are unchanged."""
        inside = _below(path, self.folder)
        return path if inside is None else os.path.normpath(os.path.join(self.top, inside))

    def _inside(self, path: str) -> str | None:
        return _below(path, self.top)

    def _target(self, path: str) -> str:
        return os.path.join(self.folder, *path.split("/")) if path else self.folder

    def _write(self, wanted: dict[str, tuple[str, str]]) -> None:
        for path, content in _contents(self.top, {path: blob for path, (_, blob) in wanted.items()}):
            target = self._target(path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if wanted[path][0] != _LINK:
                # Fails if the path exists: an earlier entry may be a link.
                with open(target, "xb") as stream:
                    stream.write(content)
            else:
                self._link(target, os.fsdecode(content))

    def _link(self, target: str, link: str) -> None:
        """Creates a symbolic link and writes its target; a link that leads out of the private folder is skipped."""
        leads_to = _below(os.path.normpath(os.path.join(os.path.dirname(target), link)), self.folder)
        if leads_to and not os.path.isabs(link):
            os.symlink(link, target)
            self.write_out(leads_to)


@contextmanager
def open_tree(folder: str, revision: str) -> Iterator[Tree]:
    """Context manager that yields the files of a revision, and removes them afterwards.

    Args:
        folder: a folder inside the repository.
        revision: a commit, a tag, a branch, or an expression such as `HEAD~3`.

    Raises:
        ProjectError: FG433 if there is no repository, or Git is not installed; FG434 if there is no such revision.
    """
    top = _toplevel(folder)
    commit = _commit(top, revision)
    private = tempfile.mkdtemp(prefix="tree-", dir=cache_dir("revisions"))
    try:
        # The real path: other paths are compared with it as texts, and the folder of temporary files may be a link.
        yield Tree(top, revision, commit, os.path.realpath(private))
    finally:
        with suppress(OSError):
            shutil.rmtree(private)


def _toplevel(folder: str) -> str:
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    done = _git(folder, "rev-parse", "--show-toplevel")
    if done.returncode != 0:
        found = os.fsdecode(done.stderr).strip().split("\n")[0]
        raise ProjectError(
            f"{folder!r} is not in a Git repository that can be read",
            code="FG433",
            hint=(f"git says: {found}" if found else "a revision needs a repository: git init")
            + "; two configs or runs are compared without Git: fgcli diff A B",
        )
    return os.path.realpath(os.fsdecode(done.stdout).rstrip("\n"))


def _commit(top: str, revision: str) -> str:
    # A revision that begins with a dash would be read as an option.
    if revision and not revision.startswith("-"):
        done = _git(top, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        found = os.fsdecode(done.stdout).strip()
        # `^HEAD` excludes a commit, so it names none.
        if done.returncode == 0 and found.isalnum():
            return found
    message = f"there is no revision {revision!r} in {top!r}" if revision else "no revision is named after the '@'"
    raise ProjectError(message, code="FG434", hint=_revisions(top, revision), found=revision)


def _revisions(top: str, revision: str) -> str:
    """Returns a hint for a revision that does not exist."""
    named = os.fsdecode(_git(top, "for-each-ref", "--format=%(refname:short)").stdout).split()
    born = _git(top, "rev-parse", "--verify", "--quiet", "HEAD").returncode == 0
    if not born and not named:
        return "the repository has no commit yet: git commit"
    refs = [*(["HEAD"] if born else []), *named]
    if revision in refs:
        return f"git reads it as something else; write it in full, as refs/heads/{revision} or refs/tags/{revision}"
    base = re.split(r"[~^@:]", revision)[0]
    if base in refs and ":" in revision:
        return f"{revision!r} is not a commit: name only the commit, {base}"
    if base in refs:
        return f"{base!r} exists, but its history does not reach that far"
    return nearest(revision, refs) or f"{len(refs)} names; 'git log --oneline' lists commits"


def _listing(top: str, commit: str) -> Iterator[tuple[str, str, str]]:
    """Yields path, mode and blob hash of each file of a commit, without unsafe paths and files that are too large."""
    done = _git(top, "ls-tree", "-r", "-z", "--long", "--full-tree", commit)
    for record in os.fsdecode(done.stdout).split("\0"):
        facts, _, path = record.partition("\t")
        if not path or not {"", ".", ".."}.isdisjoint(path.split("/")):
            continue
        mode, _, blob, size = facts.split()
        # A missing blob (of a partial clone) has no size; it is an error only if that file is needed.
        if mode in _FILES and not (size.isdigit() and int(size) > _MAX_BYTES):
            yield path, mode, blob


def _contents(top: str, blobs: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    if not blobs:
        return
    asked = "".join(f"{blob}\n" for blob in blobs.values()).encode()
    data, at = _git(top, "cat-file", "--batch", given=asked).stdout, 0
    for path in blobs:
        end = data.find(b"\n", at)
        facts = data[at:end].split()
        if end < 0 or len(facts) != 3 or facts[1] != b"blob":
            raise ProjectError(
                f"Git cannot read {path!r} of the revision",
                code="FG433",
                hint="the repository may be damaged, or a part of it was never fetched: git fsck",
            )
        size = int(facts[2])
        yield path, data[end + 1 : end + 1 + size]
        # `cat-file --batch` writes a line end after each content.
        at = end + size + 2


def _git(folder: str, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return run_git(folder, *arguments, given=given)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProjectError(
            f"git cannot be run: {getattr(error, 'strerror', None) or error}",
            code="FG433",
            hint="a revision is read with git; install it, or compare files",
        ) from error


def _parents(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _below(path: str, folder: str) -> str | None:
    """Returns the path relative to `folder`, with slashes; None if the path is not inside the folder.

    The result is "" if the path is the folder itself.
    """
    if path == folder:
        return ""
    if not path.startswith(os.path.join(folder, "")):
        return None
    return os.path.relpath(path, folder).replace(os.sep, "/")
