"""Git, asked questions about a repository that may be anybody's.

Takes a folder and arguments, gives what Git answered. Keeps true: Git reads, it does not fetch, ask, page or refresh
the index, and no hook or monitor of the repository runs; `status` and `diff`, which run filters, are not asked; the
repository is that of the folder, whatever the environment of the caller says.
"""

from __future__ import annotations

import os
import subprocess

# What Git hands to its own hooks, say: another repository, another index. Settings of the caller stay.
_LOCAL = frozenset(
    ("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_DIR", "GIT_GRAFT_FILE", "GIT_IMPLICIT_WORK_TREE",
     "GIT_INDEX_FILE", "GIT_NAMESPACE", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_REPLACE_REF_BASE",
     "GIT_SHALLOW_FILE", "GIT_WORK_TREE")
)  # fmt: skip
_QUIET = {
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    # An older Git does not know the first of these; the second leaves it nothing to fetch by.
    "GIT_NO_LAZY_FETCH": "1",
    "GIT_ALLOW_PROTOCOL": "none",
    "GIT_PAGER": "cat",
    "LC_ALL": "C",
}
_SETTINGS = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")


def run_git(
    folder: str, *arguments: str, given: bytes = b"", seconds: float = 60
) -> subprocess.CompletedProcess[bytes]:
    """Runs Git in a folder.

    Raises:
        OSError: there is no Git.
        subprocess.TimeoutExpired: it took too long.
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
