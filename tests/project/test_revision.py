"""A config of a Git revision: the files of then, the names of now."""

import os
import subprocess
from pathlib import Path

import pytest

from forgather.config.path import format_path
from forgather.errors import ForgatherError, ProjectError
from forgather.project.comparison import compare
from forgather.project.comparison_sides import open_sides, split_revision
from forgather.project.git_repository import open_tree
from forgather.project.git_state import git_state
from tests.project.workbench import make_project

PROJECT = "meta: {output_dir: {{ project_dir }}/out}\nmain: !singleton:toy.py:f\n-- block main\n  lr: 1\n-- endblock\n"
FILES = {
    "templates/project.yaml": PROJECT,
    "templates/configs/a.yaml": "-- extends 'project.yaml'\n",
    "templates/configs/b.yaml": "-- extends 'project.yaml'\n[main]\n  lr: 2\n",
    "toy.py": "def f(lr): pass\n",
}


def git(folder, *arguments):
    settings = ["-c", "user.name=x", "-c", "user.email=x", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", "-C", str(folder), *settings, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a project in a folder of it, committed and tagged v1; the project is the working folder."""
    top = tmp_path / "top"
    project = make_project(top / "work/bench", FILES)
    git(top, "init", "-q")
    commit(top, "v1")
    monkeypatch.chdir(project)
    return project


def commit(top, tag):
    git(top, "add", "-A")
    git(top, "commit", "-qm", tag)
    git(top, "tag", tag)


def told(a, b=None, **given):
    old, new = open_sides(a, b, given.get("config"), given.get("folder"))
    spans = [(d, d.old.origin, d.new.origin) for d in compare(old, new)]
    return [
        (
            format_path(d.path),
            d.old.text,
            d.new.text,
            before and f"{old.place(before.span.file)}:{before.span.line}",
            after and f"{new.place(after.span.file)}:{after.span.line}",
        )
        for d, before, after in spans
    ]


def test_nothing_changed_since_the_last_commit(repository):
    assert [] == told("a") == told("a@HEAD") == told("a@v1", "a") == told("a@v1", "@HEAD")


def test_a_change_of_the_working_tree_has_its_place_on_both_sides(repository):
    (repository / "templates/project.yaml").write_text(PROJECT.replace("  lr: 1", "\n  lr: 3"))

    change = ("main.lr", "1", "3", "templates/project.yaml:4", "templates/project.yaml:5")
    assert [change] == told("a") == told("a@v1") == told("templates/configs/a.yaml@v1")
    assert [] == told("b")


def test_two_revisions_of_one_config_and_a_bare_revision(repository):
    (repository / "templates/configs/b.yaml").write_text(FILES["templates/configs/b.yaml"].replace("2", "4"))
    commit(repository, "v2")

    change = ("main.lr", "2", "4", "templates/configs/b.yaml:3", "templates/configs/b.yaml:3")
    assert [change] == told("b@v1", "@v2") == told("@v1", "@v2", config="b") == told("b@HEAD~1", "b")
    assert [("main.lr", "2", "1")] == [item[:3] for item in told("b@v1", "a@v2")]


def test_a_changed_source_file_of_a_constructor_is_reported(repository):
    (repository / "toy.py").write_text("def f(lr): return lr\n")

    ((path, old, new, _, place),) = told("a")

    assert ("main", "toy.py", "has changed", "templates/project.yaml:2") == (path, old, new, place)


def test_a_search_folder_outside_of_the_project_and_a_workspace_are_those_of_the_revision(repository):
    top = repository.parents[1]
    (top / "shared").mkdir()
    (top / "shared/far.yaml").write_text("main: far\n")
    (repository.parent / "forgather_workspace").mkdir()
    (repository.parent / "forgather_workspace/near.yaml").write_text(
        "near: {{ relpath(project_dir, workspace_root) }}\n"
    )
    (repository / "meta.yaml").write_text("searchdir: [templates, ../../shared]\n")
    (repository / "templates/configs/c.yaml").write_text("-- include 'near.yaml'\n-- include 'far.yaml'\n")
    commit(top, "v2")
    assert [] == told("c")
    (top / "shared/far.yaml").write_text("main: further\n")
    (repository.parent / "forgather_workspace/near.yaml").write_text("near: here\n")

    found = told("c")

    assert [("near", "bench", "here"), ("main", "far", "further")] == [item[:3] for item in found]
    assert (os.path.join(str(top), "shared/far.yaml:1"),) * 2 == found[1][3:]


def test_a_library_of_the_same_repository_is_that_of_the_revision(repository, monkeypatch):
    from forgather.project import locations

    library = repository.parents[1] / "lib"
    library.mkdir()
    (library / "base.yaml").write_text("main: 1\n")
    (repository / "templates/configs/c.yaml").write_text("-- extends 'base.yaml'\n")
    commit(repository.parents[1], "v2")
    for module in ("metadata_file", "path_display", "comparison_sides"):
        monkeypatch.setattr(f"forgather.project.{module}.library_dir", lambda: str(library))
    monkeypatch.setattr(locations, "library_dir", lambda: str(library))
    (library / "base.yaml").write_text("main: 2\n")

    assert [("main", "1", "2", "lib:base.yaml:1", "lib:base.yaml:1")] == told("c")


def test_links_inside_of_the_repository_are_followed_and_others_are_not(repository, tmp_path):
    (tmp_path / "secret.yaml").write_text("main: secret\n")
    (repository.parent / "other").mkdir()
    (repository.parent / "other/base.yaml").write_text("main: other\n")
    (repository / "templates/inside").symlink_to("../../other")
    (repository / "templates/outside.yaml").symlink_to("../../../../secret.yaml")
    (repository / "meta.yaml").write_text("searchdir: [templates, templates/inside]\n")
    (repository / "templates/configs/c.yaml").write_text("-- extends 'base.yaml'\n")
    (repository / "templates/configs/d.yaml").write_text("-- extends 'outside.yaml'\n")
    commit(repository.parents[1], "v2")

    assert [] == told("c@v2", "c@v2")
    with pytest.raises(ForgatherError, match=r"\[FG112\] there is no template 'outside.yaml'"):
        told("d@v2")


def test_nothing_of_a_revision_is_left_behind(repository, private_folders):
    told("a@v1")

    assert [] == [path for path in private_folders.rglob("tree-*")]
    assert [] == list((private_folders / "cache/forgather/revisions").iterdir())


@pytest.mark.parametrize(
    ("word", "code", "message", "hint"),
    [
        ("a@v9", "FG434", "there is no revision 'v9' in", "one of: HEAD, main, v1"),
        ("a@HEAD~7", "FG434", "there is no revision 'HEAD~7'", "'HEAD' exists, but its history does not reach that far"),
        ("a@--all", "FG434", "there is no revision '--all'", "one of: HEAD, main, v1"),
        ("a@", "FG434", "no revision is named after the '@'", "one of: HEAD, main, v1"),
        ("a@^HEAD", "FG434", "there is no revision '^HEAD'", "did you mean 'HEAD'?"),
        ("a@HEAD:work", "FG434", "there is no revision 'HEAD:work'", "'HEAD:work' is not a commit: name only the commit, HEAD"),
        ("a@-odd", "FG434", "there is no revision '-odd'", "git reads it as something else; write it in full"),
        ("nosuch", "FG405", "has no config or run 'nosuch'", "one of: a, b, new"),
        ("c@v1", "FG405", "has no config 'c'", "one of: a, b"),
        ("templates/configs/new.yaml@v1", "FG436", "is not a config of project 'Bench' at v1", "configs there: a.yaml, b.yaml"),
        ("../new", "FG436", "the project is not in Git yet: the last commit has no 'work/new/meta.yaml'", "commit it"),
        ("../new@v1", "FG436", "'../new' is in no project at v1", "no 'meta.yaml' there at that revision"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_reported(repository, word, code, message, hint):
    (repository / "templates/configs/new.yaml").write_text("main: 1\n")
    make_project(repository.parent / "new")
    if word == "a@-odd":
        git(repository, "update-ref", "refs/tags/-odd", "HEAD")

    with pytest.raises(ProjectError) as caught:
        told(word)

    assert code == caught.value.code
    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)


def test_a_config_that_is_broken_at_a_revision_is_reported_at_its_line_then(repository):
    (repository / "templates/configs/a.yaml").write_text("main: 1\n\nx: [1\n")
    commit(repository, "v2")
    (repository / "templates/configs/a.yaml").write_text(FILES["templates/configs/a.yaml"])

    with pytest.raises(ForgatherError) as caught:
        told("a@v2")

    assert ("work/bench/templates/configs/a.yaml@v2", 3) == (caught.value.span.file, caught.value.span.line)
    assert "at revision v2" in caught.value.context
    assert "revisions/tree-" not in str(caught.value)


def test_a_project_outside_of_any_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    with pytest.raises(ProjectError, match=r"\[FG433\] .* is not in a Git repository that can be read"):
        told("plain@HEAD")


def test_without_git(repository, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")

    with pytest.raises(ProjectError, match=r"\[FG433\] git cannot be run: No such file or directory"):
        told("a@HEAD")


def test_a_damaged_repository_is_reported(repository):
    blob = subprocess.run(
        ["git", "rev-parse", "HEAD:./templates/project.yaml"], capture_output=True, text=True, check=True
    )
    name = blob.stdout.strip()
    (repository.parents[1] / ".git/objects" / name[:2] / name[2:]).unlink()

    with pytest.raises(ProjectError, match=r"\[FG433\] Git cannot read 'work/bench/templates/project.yaml'"):
        told("a@HEAD")


def test_a_config_with_the_sign_in_its_name_is_a_config(repository):
    (repository / "templates/configs/x@v1.yaml").write_text("main: 1\n")

    assert ("x@v1", None) == split_revision("x@v1", None)
    assert ("x", "v2") == split_revision("x@v2", None)
    assert ("x", "main@{1}") == split_revision("x@main@{1}", None)
    assert ("x@v1", "main@{1}") == split_revision("x@v1@main@{1}", None)
    assert ("x@v1", "v2") == split_revision("x@v1@v2", None)


def test_a_repository_without_a_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(make_project(tmp_path))
    git(tmp_path, "init", "-q")

    with pytest.raises(ProjectError, match="FG434") as caught:
        told("plain@HEAD")

    assert "the repository has no commit yet: git commit" == caught.value.hint


HOSTILE = ("core.fsmonitor", "core.sshCommand", "core.pager", "core.askPass", "core.alternateRefsCommand",
           "filter.x.smudge", "filter.x.process", "diff.x.textconv", "diff.x.command")  # fmt: skip


def test_an_untracked_file_of_the_project_is_a_change_and_what_runs_write_is_none(repository):
    output_dir = str(repository / "output_models/a")
    assert not git_state(str(repository))["dirty"]

    (repository / "output_models/a").mkdir(parents=True)
    (repository / "output_models/a/model").write_text("weights")
    (repository.parent / "beside").write_text("not of the project")
    assert not git_state(str(repository), output_dir)["dirty"]
    assert git_state(str(repository))["dirty"]

    (repository / "new.py").write_text("")
    assert git_state(str(repository), output_dir)["dirty"]


def test_nothing_that_a_repository_names_is_run(repository, tmp_path):
    top = repository.parents[1]
    (top / ".gitattributes").write_text("* filter=x diff=x export-subst\n")
    (repository / "templates/configs/a.yaml").write_text("main: {id: '$Format:%H$', lr: 1}\n")
    commit(top, "v2")
    for number, name in enumerate(HOSTILE):
        git(top, "config", name, f"touch {tmp_path}/ran-{number}; cat")
    for name in ("post-index-change", "post-checkout", "reference-transaction", "pre-auto-gc"):
        hook = top / ".git/hooks" / name
        hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran-{name}\n")
        hook.chmod(0o755)

    assert [] == told("a@v2")
    assert "$Format:%H$" in str(open_sides("a@v2", None, None, None)[0].graph.targets)
    assert git_state(str(repository))["commit"]
    assert [] == [*tmp_path.glob("ran-*")]


def test_what_was_never_fetched_is_not_fetched(repository, tmp_path):
    top = repository.parents[1]
    blob = subprocess.run(["git", "rev-parse", "HEAD:./toy.py"], capture_output=True, text=True, check=True).stdout
    (top / ".git/objects" / blob[:2] / blob[2:].strip()).unlink()
    settings = {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f'ext::sh -c "touch% {tmp_path}/ran"',
        "protocol.ext.allow": "always",
    }
    for name, value in settings.items():
        git(top, "config", name, value)

    with pytest.raises(ProjectError, match=r"\[FG433\] Git cannot read"):
        told("a@HEAD")

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["GIT_DIR", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_INDEX_FILE"])
def test_the_repository_is_that_of_the_folder_inside_of_a_hook_too(repository, tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, str(tmp_path / "another"))

    assert [] == told("a@v1")


def test_a_tree_lays_out_what_is_asked_for_and_no_more(repository):
    top = repository.parents[1]
    (top / "data").mkdir()
    (top / "data/large.bin").write_bytes(b"x" * 2_000_001)
    commit(top, "v2")
    with open_tree(str(repository), "v2") as tree:
        folder = Path(tree.folder)
        assert [] == list(folder.iterdir())
        assert tree.is_folder(str(folder / "work/bench/templates"))
        assert ["work"] == sorted(os.listdir(folder))
        assert not tree.is_folder(str(folder / "data"))
        assert str(top / "work") == tree.real(str(folder / "work"))
    assert not folder.exists()


def test_the_name_of_a_run_alone_names_its_folder(repository, monkeypatch):
    run = repository / "output_models/bench/runs/20250102T030405Z-a"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "graph.yaml").write_text("{}")
    monkeypatch.chdir(repository)
    place = os.path.relpath(run)
    for word, hint in ((run.name, f"did you mean {place}?"), ("zzz", f"one of: a, b; runs, newest first: {place}")):
        with pytest.raises(ProjectError) as caught:
            told(word)
        assert ("FG405", hint) == (caught.value.code, caught.value.hint)
