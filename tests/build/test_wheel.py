"""The built wheel works outside the clone: templates and error pages are inside it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]


def run(*command, cwd, env=None):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def outside():
    """The environment, without the clone on any path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy without build output, by the setuptools at hand: nothing is downloaded."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("forgather", "templatelib", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = ("pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(sys.executable, "-m", *build, "-w", folder, source, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh virtual environment with the wheel, which sees the libraries of this one."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    pip = ("pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, "-m", *pip, wheel, cwd=folder)
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder


@pytest.fixture
def fgcli(installed, tmp_path):
    environment = outside() | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    def call(*arguments, cwd=tmp_path):
        return run(installed / "bin" / "fgcli", *arguments, cwd=cwd, env=environment)

    return call


def test_every_template_and_error_page_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    templates = {
        f"forgather/templatelib/{file.relative_to(ROOT / 'templatelib')}"
        for file in (ROOT / "templatelib").rglob("*.yaml")
    }
    pages = {f"forgather/_errors/{file.name}" for file in (ROOT / "docs" / "errors").glob("FG*.md")}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "forgather").rglob("*.py")}

    assets = {
        str(file.relative_to(ROOT))
        for pattern in ("*.js", "*.css", "*.html", "*.json", "*.jinja", "*.LICENSE")
        for file in (ROOT / "forgather").rglob(pattern)
    }

    assert set() == (templates | pages | modules | assets | {"forgather/py.typed"}) - names
    assert {"forgather/codegen/page/page.html", "forgather/ml/rules/trainer.json"} <= assets
    assert "forgather/templatelib/trainers/trainer.yaml" in names
    assert [] == sorted(name for name in names if name.startswith(("tests/", "projects/", "templatelib/", "docs/")))


def test_an_installed_fgcli_makes_and_prints_a_project_of_ones_own(fgcli, tmp_path):
    assert "made my_project/meta.yaml" in fgcli("new", "project", "my_project")
    assert "max_steps: 100" in fgcli("-p", "my_project", "pp")
    assert "lib:trainers/trainer.yaml" in fgcli("trefs", cwd=tmp_path / "my_project")
    assert "* default.yaml" in fgcli("ls", "-r")
    assert "<!doctype html>" in fgcli("-p", "my_project", "graph", "--format", "html")


def test_an_installed_fgcli_explains_errors(fgcli):
    assert fgcli("explain", "FG405").startswith("# FG405: ")


def test_the_installed_package_is_the_one_that_runs(fgcli, installed):
    text = run(
        installed / "bin" / "python", "-c", "import forgather; print(forgather.__file__)", cwd=installed, env=outside()
    )

    assert text.startswith(str(installed))


def test_an_editable_install_works_from_the_folder_above_a_clone_of_the_same_name(tmp_path):
    clone = tmp_path / "forgather"
    clone.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("forgather", "templatelib", "docs"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = environment / "bin" / "python"
    options = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "-e", clone)
    run(sys.executable, "-m", "pip", "--python", python, *options, cwd=tmp_path)
    found = run(
        python,
        "-c",
        "from forgather import Project; import forgather; print(forgather.__file__)",
        cwd=tmp_path,
        env=outside(),
    )
    assert str(clone / "forgather" / "__init__.py") == found.strip()
