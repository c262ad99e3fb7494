import json
import os
from pathlib import Path

import pytest

from forgather.cache_file import with_digest
from forgather.cli.main import main
from forgather.project import listing
from forgather.project.locations import cache_dir
from tests.project.workbench import fgcli, make_project

CONFIGS = {
    "templates/base.yaml": "meta:\n  config_description: {{ text | default('base') }}\n",
    "templates/configs/a.yaml": "-- set text = 'first'\n-- extends 'base.yaml'\n",
    "templates/configs/b.yaml": "meta: {config_description: {{ env('BENCH_DIR', 'none') }}}\n",
}


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.delenv("BENCH_DIR", raising=False)
    return make_project(tmp_path / "bench", CONFIGS)


@pytest.fixture
def described(monkeypatch):
    """Names of the configs that were described anew since the last look; the project itself as ''."""
    names = []
    config, project = listing.describe_config, listing.describe_project
    monkeypatch.setattr(listing, "describe_config", lambda d, name, s: (names.append(name), config(d, name, s))[1])
    monkeypatch.setattr(listing, "describe_project", lambda d, s: (names.append(""), project(d, s))[1])
    return names


def ls(folder, capsys):
    main(["ls", str(folder), "--json"])
    (project,) = json.loads(capsys.readouterr().out)["projects"]
    return {config["name"]: config["description"] for config in project["configs"]}


def test_the_second_listing_renders_nothing(bench, described, capsys):
    first = ls(bench, capsys)
    assert ["", "a.yaml", "b.yaml"] == described
    described.clear()

    assert first == ls(bench, capsys) == {"a.yaml": "first", "b.yaml": "none"}
    assert [] == described


def test_a_changed_config_is_described_again_and_no_other(bench, described, capsys):
    ls(bench, capsys)
    described.clear()
    (bench / "templates/configs/a.yaml").write_text("meta: {config_description: second}\n")

    assert "second" == ls(bench, capsys)["a.yaml"]
    assert ["a.yaml"] == described


def test_a_changed_parent_is_noticed(bench, described, capsys):
    ls(bench, capsys)
    described.clear()
    (bench / "templates/base.yaml").write_text("meta: {config_description: of the parent}\n")

    assert "of the parent" == ls(bench, capsys)["a.yaml"]
    assert ["a.yaml"] == described


def test_a_template_that_now_hides_the_parent_is_noticed(tmp_path, described, capsys):
    folder = make_project(tmp_path / "p", {}, meta="searchdir: [templates, shared]\n")
    for name, text in {
        "templates/configs/a.yaml": "-- extends 'base.yaml'\n",
        "shared/base.yaml": "meta: {config_description: shared}\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    assert {"a.yaml": "shared"} == ls(folder, capsys)
    (folder / "templates/base.yaml").write_text("meta: {config_description: own}\n")

    assert {"a.yaml": "own"} == ls(folder, capsys)


def test_a_changed_environment_variable_is_noticed(bench, described, capsys, monkeypatch):
    ls(bench, capsys)
    monkeypatch.setenv("BENCH_DIR", "word")

    assert "word" == ls(bench, capsys)["b.yaml"]


def test_a_new_and_a_removed_config_are_noticed(bench, capsys):
    ls(bench, capsys)
    (bench / "templates/configs/c.yaml").write_text("main: 1\n")
    (bench / "templates/configs/a.yaml").unlink()

    assert ["b.yaml", "c.yaml"] == list(ls(bench, capsys))


def test_a_changed_meta_is_noticed(bench, described, capsys):
    ls(bench, capsys)
    (bench / "meta.yaml").write_text("name: Other\nconfig_prefix: runs\n")

    assert {} == ls(bench, capsys)


def test_a_workspace_that_appears_is_noticed(bench, described, capsys):
    ls(bench, capsys)
    described.clear()
    (bench.parent / "forgather_workspace").mkdir()
    ls(bench, capsys)

    assert "" in described


def test_a_config_that_looks_around_for_templates_is_never_kept(bench, described, capsys):
    (bench / "templates/configs/c.yaml").write_text("-- include 'extra.yaml' ignore missing\nmain: 1\n")
    ls(bench, capsys)
    (bench / "templates/extra.yaml").write_text("meta: {config_description: appeared}\n")

    assert "appeared" == ls(bench, capsys)["c.yaml"]


def entry():
    folder = cache_dir("listings")
    (name,) = os.listdir(folder)
    return Path(folder, name)


@pytest.mark.parametrize("damage", ["truncate", "flip", "garbage", "empty", "other form", "open to others", "a link"])
def test_a_damaged_or_foreign_entry_is_as_good_as_none(bench, described, capsys, tmp_path, damage):
    expected = ls(bench, capsys)
    described.clear()
    file = entry()
    content = file.read_bytes()
    if damage == "open to others":
        os.chmod(file, 0o666)
    elif damage == "a link":
        os.rename(file, tmp_path / "folder")
        os.mkdir(file)
    else:
        changed = {
            "truncate": content[:-20],
            "flip": content.replace(b"first", b"worst"),
            "garbage": b"\xff\x00garbage",
            "empty": b"",
            "other form": _resealed(content.replace(b'"form": 1', b'"form": 2')),
        }[damage]
        file.write_bytes(changed)

    assert expected == ls(bench, capsys)
    assert ["", "a.yaml", "b.yaml"] == described


def _resealed(content):
    body = content.partition(b"\n")[2]
    return with_digest(body)


def test_a_sound_entry_with_unknown_fields_is_as_good_as_none(bench, described, capsys):
    ls(bench, capsys)
    described.clear()
    file = entry()
    content = file.read_bytes()
    file.write_bytes(_resealed(content.replace(b'"description"', b'"descriptino"')))

    ls(bench, capsys)

    assert "" in described


def test_broken_configs_are_not_kept(bench, described, capsys):
    (bench / "templates/configs/c.yaml").write_text("main: {{ nope }}\n")
    ls(bench, capsys)
    described.clear()
    ls(bench, capsys)

    assert ["c.yaml"] == described


def test_with_the_cache_off_nothing_is_kept(bench, described, capsys, monkeypatch, private_folders):
    monkeypatch.setenv("FORGATHER_CACHE", "off")
    ls(bench, capsys)
    described.clear()
    ls(bench, capsys)

    assert ["", "a.yaml", "b.yaml"] == described
    assert not (private_folders / "cache").exists()


def test_a_kept_listing_needs_neither_stages_nor_libraries(bench):
    assert 0 == fgcli("ls", cwd=bench).returncode
    done = fgcli("ls", cwd=bench, env={"PYTHONPROFILEIMPORTTIME": "1"})

    loaded = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.split("\n") if line.startswith("import time:")}
    unwanted = ("jinja2", "ruamel", "torch", "numpy", "transformers", "importlib.metadata", "forgather.config")
    assert "forgather.project.listing_cache" in loaded
    assert [] == [name for name in sorted(loaded) if name.startswith(unwanted)]


def test_a_mistake_in_dynamic_args_is_listed(tmp_path, capsys):
    text = "dynamic_args:\n  - names: --width\n    hlep: how wide\nmain: 1\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text})

    assert 1 == main(["ls", str(folder), "--json"])

    (config,) = json.loads(capsys.readouterr().out)["projects"][0]["configs"]
    assert "error[FG408]: an option in 'dynamic_args' has no field 'hlep'" in config["error"]
    assert config["error"].endswith("a.yaml:3)")
