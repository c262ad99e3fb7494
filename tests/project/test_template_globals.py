"""Every name that the language promises to templates has the promised value, as a project's own template sees it."""

import importlib.metadata
import os
import platform
from datetime import UTC, datetime

import platformdirs
import pytest
from ruamel.yaml import YAML

from forgather.config._jinja.globals import Globals
from forgather.project.project import Project
from forgather.project.template_environment import STANDARD_VARIABLES
from tests.project.workbench import make_project

NOON = datetime(2026, 1, 31, 12, 30, 5, 123456)


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


VERSIONS = {
    "python": platform.python_version(),
    **{name: version(name) for name in ("torch", "transformers", "accelerate")},
}
UTC_NOON = NOON.astimezone(UTC).replace(tzinfo=None)
# What stands in a template, and its value; `{project}` is the project's folder.
VALUES = {
    "project_dir": "{project}",
    "workspace_root": "{workspace}",
    "config_stem": "c",
    "hostname": platform.node(),
    "uname.system": platform.system(),
    "uname.machine": platform.machine(),
    "versions.python": VERSIONS["python"],
    "versions['torch']": VERSIONS["torch"],
    "versions.transformers": VERSIONS["transformers"],
    "versions.accelerate": VERSIONS["accelerate"],
    "versions": VERSIONS,
    "versions | toyaml": VERSIONS,
    "versions | tojson": VERSIONS,
    "versions | list | join(' ')": "python torch transformers accelerate",
    "versions.keys() | list | length": 4,
    "versions | items | list | length": 4,
    "versions.get('numpy', 'no key')": "no key",
    "'torch' in versions": "True",
    "versions.numpy is defined": "False",
    "isotime()": "2026-01-31T12:30:05",
    "utcisotime()": UTC_NOON.isoformat(timespec="seconds"),
    "filetime()": "2026-01-31T12-30-05",
    "utcfiletime()": UTC_NOON.isoformat(timespec="seconds").replace(":", "-"),
    "now()": "2026-01-31 12:30:05.123456",
    "utcnow()": str(NOON.astimezone(UTC)),
    "joinpath('a', 'b')": os.path.join("a", "b"),
    "normpath('a//b/../c')": os.path.join("a", "c"),
    "abspath('x')": os.path.abspath("x"),
    "relpath('/a/b', '/a/c')": os.path.join("..", "b"),
    "dirname('/a/b.c')": "/a",
    "basename('/a/b.c')": "b.c",
    "splitext('b.c')[1]": ".c",
    "repr('a') | replace(\"'\", '-')": "-a-",
    "modname_from_path('/a/my_model.py')": "my_model",
    "user_home_dir()": os.path.expanduser("~"),
    "getcwd()": os.getcwd(),
    "forgather_config_dir()": lambda: platformdirs.user_config_dir("forgather"),
    "user_data_dir('x')": lambda: platformdirs.user_data_dir("x"),
    "user_cache_dir('x')": lambda: platformdirs.user_cache_dir("x"),
    "user_config_dir('x')": lambda: platformdirs.user_config_dir("x"),
    "site_data_dir('x')": platformdirs.site_data_dir("x"),
    "site_config_dir('x')": platformdirs.site_config_dir("x"),
    "env('GLOBALS_TEST_DIR', 'unset')": "set here",
    "env('NOT_SET_GLOBALS_DIR', 'unset')": "unset",
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The values of all expressions in one config, each as YAML reads it, and where the project is."""
    workspace = tmp_path_factory.mktemp("workspace")
    (workspace / "forgather_workspace").mkdir()
    lines = [
        f"v{number}: {{{{ {expression} }}}}"
        if isinstance(value, dict | int)
        else f"v{number}: '{{{{ {expression} }}}}'"
        for number, (expression, value) in enumerate(VALUES.items())
    ]
    project = make_project(workspace / "one", {"templates/configs/c.yaml": "\n".join(lines)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOBALS_TEST_DIR", "set here")
        opened = Project("c", project)
        opened.set_clock(NOON)
        found = YAML(typ="safe", pure=True).load(opened.rendered.text)
        assert found.keys() == opened.graph.targets.keys()
        # Where a user's folders are is told by the environment of now.
        promised = {name: value() if callable(value) else value for name, value in VALUES.items()}
    return list(found.values()), promised, project, workspace


@pytest.mark.parametrize("expression", VALUES)
def test_a_global_has_its_value(written, expression):
    values, promised, project, workspace = written
    expected = promised[expression]
    if isinstance(expected, str):
        expected = expected.format(project=project, workspace=workspace)

    assert expected == values[list(VALUES).index(expression)]


def test_every_global_is_in_the_table():
    words = {expression.split("(")[0].split(".")[0] for expression in VALUES}

    assert {*STANDARD_VARIABLES, *Globals(NOON).table()} <= words
