"""Every constructor that the shipped projects and templates name."""

import re
from pathlib import Path

import pytest

from forgather.config.graph import Call
from forgather.config.traverse import roots, walk
from forgather.project import Project
from forgather.signatures import Callee, Reader, Unknown

ROOT = Path(__file__).parents[2]
# A name that a template makes with Jinja is seen in the configs.
TAG = re.compile(r"!(?:singleton|call|factory|partial|lambda):([\w.]*\w(?::[\w.]+)?)(?![\w.]|:\{\{)")
EXTRAS = ("torchao.", "trl:")
"""The packages that the tests do not install."""
WRITTEN = sorted(
    {
        name
        for folder in ("templatelib", "projects")
        for file in (ROOT / folder).rglob("*.yaml")
        for name in TAG.findall(file.read_text())
        # The project's own files are found by `test_every_call_of_the_shipped_configs_is_accepted`.
        if not name.startswith(EXTRAS) and ".py:" not in name
    }
)
CONFIGS = [(file.parents[2], file.name) for file in sorted((ROOT / "projects").glob("*/templates/configs/*.yaml"))]


def constructor(written):
    return written if ":" in written or "." not in written else ":".join(written.rsplit(".", 1))


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    return Reader(str(tmp_path_factory.mktemp("project")))


def test_every_constructor_of_the_templates_is_known(reader):
    answers = {written: reader.read(constructor(written)) for written in WRITTEN}
    assert {} == {written: answer for written, answer in answers.items() if not isinstance(answer, Callee)}


@pytest.mark.parametrize(("folder", "config"), CONFIGS, ids=lambda value: getattr(value, "name", value))
def test_every_call_of_the_shipped_configs_is_accepted(folder, config):
    project = Project(config, str(folder))
    reader = Reader(str(folder))
    calls = [(str(path), node) for path, node in walk(roots(project.graph)) if isinstance(node, Call)]
    assert calls
    for path, node in calls:
        if node.constructor.startswith(EXTRAS):
            continue
        callee = reader.read(node.constructor)
        assert not isinstance(callee, Unknown), (path, callee)
        keywords = [entry.key for entry in (*node.kwargs, *node.latent_args)]
        assert any(binds(signature, node, keywords) for signature in callee.signatures), (path, node.constructor)


def binds(signature, node, keywords):
    try:
        signature.bind_partial(*node.args, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
