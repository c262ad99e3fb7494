"""Commit and state of a repository are told without running anything of it."""

import os
import subprocess
import time

import pytest

from forgather.project.git_state import git_state

PROGRAMS = ("filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.textconv",
            "diff.evil.command", "diff.external", "core.fsmonitor", "core.pager", "core.editor", "core.sshCommand",
            "core.askPass", "core.alternateRefsCommand", "core.gitProxy", "credential.helper", "gpg.program",
            "merge.evil.driver", "interactive.diffFilter", "alias.status", "alias.ls-files", "uploadpack.packObjectsHook",
            "trailer.x.command", "submodule.sub.update")  # fmt: skip
HOOKS = ("post-index-change", "fsmonitor-watchman", "reference-transaction", "pre-commit", "post-checkout")
ATTRIBUTES = "* filter=evil diff=evil merge=evil\n"


def git(folder, *arguments):
    words = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x", "-c", "protocol.file.allow=always"]
    return subprocess.run([*words, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    (folder / "inside").mkdir(parents=True)
    git(folder, "init", "-q")
    for name, text in {"a.txt": "one\n", "inside/b.txt": "two\r\nthree\r\n", "run.sh": "#!/bin/sh\n"}.items():
        (folder / name).write_bytes(text.encode())
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("a.txt")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "x")
    return folder


def touch_all(folder):
    """Gives files another time, so that Git asks what they hold."""
    for file in folder.rglob("*"):
        if file.is_file() and ".git" not in file.parts:
            os.utime(file, (time.time() + 5, time.time() + 5))


def by_attributes_of_the_tree(top):
    (top / ".gitattributes").write_text(ATTRIBUTES)
    git(top, "add", ".gitattributes")
    git(top, "commit", "-qm", "attributes")


def by_attributes_of_git(top):
    (top / ".git/info").mkdir(exist_ok=True)
    (top / ".git/info/attributes").write_text(ATTRIBUTES)


def by_attributes_of_the_user(top):
    (top.parent / "attributes").write_text(ATTRIBUTES)
    git(top, "config", "core.attributesFile", str(top.parent / "attributes"))


@pytest.mark.parametrize("attributes", [by_attributes_of_the_tree, by_attributes_of_git, by_attributes_of_the_user])
@pytest.mark.parametrize("include", [False, True], ids=["in the config", "in an included file"])
def test_no_program_of_the_repository_runs(repository, tmp_path, attributes, include):
    attributes(repository)
    canary = tmp_path / "CANARY"
    words = []
    if include:
        git(repository, "config", f"includeIf.gitdir:{repository}/.path", str(tmp_path / "more"))
        words = ["-f", str(tmp_path / "more")]
    for name in PROGRAMS:
        git(
            repository,
            "config",
            *words,
            name,
            f"!touch {canary}" if name.startswith("alias") else f"touch {canary}; cat",
        )
    git(repository, "config", *words, "filter.evil.required", "true")
    for name in HOOKS:
        hook = repository / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {canary}\n")
        hook.chmod(0o755)
    touch_all(repository)

    assert not git_state(str(repository))["dirty"], "the bytes are those of the commit"
    assert not canary.exists()
    (repository / "a.txt").write_text("two\n")
    assert git_state(str(repository))["dirty"] is None, "a filter decides what a changed file is"
    (repository / "a.txt").write_text("another size\n")
    assert git_state(str(repository))["dirty"] is True
    assert not canary.exists()
    subprocess.run(["git", "-C", str(repository), "status"], capture_output=True, check=False)
    assert canary.exists(), "the control: 'git status' runs them"


def test_no_program_of_a_submodule_runs(repository, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q")
    (other / "c.txt").write_text("c\n")
    git(other, "add", "-A")
    git(other, "commit", "-qm", "x")
    git(repository, "submodule", "add", "-q", str(other), "sub")
    git(repository, "commit", "-qm", "sub")
    assert git_state(str(repository))["dirty"] is False
    (repository / ".git/modules/sub/info/attributes").write_text(ATTRIBUTES)
    for name in ("filter.evil.clean", "core.fsmonitor"):
        git(repository / "sub", "config", name, f"touch {tmp_path}/CANARY; cat")
    touch_all(repository)

    assert git_state(str(repository))["dirty"] is False
    assert not (tmp_path / "CANARY").exists()
    (repository / "sub/d.txt").write_text("d\n")
    git(repository / "sub", "add", "d.txt")
    assert git_state(str(repository))["dirty"] is True


def replaced(folder):
    (folder / "link").unlink()
    (folder / "link").write_text("a.txt")


def unminded(folder):
    git(folder, "config", "core.fileMode", "false")
    (folder / "a.txt").chmod(0o755)


def staged(folder):
    (folder / "a.txt").write_text("staged\n")
    git(folder, "add", "a.txt")
    (folder / "a.txt").write_text("one\n")


def same_size(folder):
    facts = (folder / "a.txt").stat()
    (folder / "a.txt").write_text("two\n")
    os.utime(folder / "a.txt", ns=(facts.st_atime_ns, facts.st_mtime_ns))
    os.utime(folder / ".git/index", ns=(facts.st_atime_ns, facts.st_mtime_ns))


CHANGES = {
    "none": lambda folder: None,
    "touched": touch_all,
    "another text": lambda folder: (folder / "a.txt").write_text("another\n"),
    "in the same moment, of the same size": same_size,
    "gone": lambda folder: (folder / "a.txt").unlink(),
    "executable": lambda folder: (folder / "a.txt").chmod(0o755),
    "another link": lambda folder: ((folder / "link").unlink(), (folder / "link").symlink_to("run.sh")),
    "no link any more": replaced,
    "executable, which nobody minds": unminded,
    "staged alone": staged,
    "removed from the index": lambda folder: git(folder, "rm", "-q", "--cached", "a.txt"),
    "new": lambda folder: (folder / "new.txt").write_text("x"),
    "new and ignored": lambda folder: ((folder / ".git/info/exclude").write_text("new*\n"), (folder / "new").touch()),
    "not looked at": lambda folder: (
        git(folder, "update-index", "--assume-unchanged", "a.txt"),
        (folder / "a.txt").write_text("x\n"),
    ),
    "in a new folder": lambda folder: ((folder / "n").mkdir(), (folder / "n/f").touch()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_it_says_what_git_status_says(repository, change):
    change(repository)
    ours = git_state(str(repository))
    told = git(repository, "status", "--porcelain")

    assert bool(told) == ours["dirty"]
    assert git(repository, "rev-parse", "HEAD").strip() == ours["commit"]


def test_no_repository_has_no_state(tmp_path):
    assert git_state(str(tmp_path)) is None
