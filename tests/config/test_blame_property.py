"""Changing a plain `key: scalar` line changes exactly the values that are blamed on it.

Tried on a copy of everything that is shipped, one line of four (each with `--all-cells`): each config of `projects/`, one config for each template of
the library, and a config that is made of all the ways in which a line can reach a value.
"""

import re
import shutil
from pathlib import Path

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.graph import Call, Scalar
from forgather.config.insight.blame import blame
from forgather.config.load import load
from forgather.config.path import format_path
from forgather.config.render import render
from tests.matrix import thinned

ROOT = Path(__file__).parents[2]
PROJECTS, LIBRARY = ROOT / "projects", ROOT / "templatelib"
CONFIGS = [str(file.relative_to(ROOT)) for file in sorted(PROJECTS.glob("*/templates/configs/*.yaml"))]
FIRST = {
    min(name for name in CONFIGS if name.startswith(folder)) for folder in {c.split("configs/")[0] for c in CONFIGS}
}
FRAGMENTS = [
    str(file.relative_to(LIBRARY))
    for file in sorted(LIBRARY.rglob("*.yaml"))
    if file.read_text().startswith("## For [")
]
TRAINERS = [str(file.relative_to(LIBRARY)) for file in sorted((LIBRARY / "trainers").glob("*.yaml"))]
PLAIN = re.compile(
    r"""(?P<key>\s*(?:-\ )?[A-Za-z_.][\w.-]*:\s+(?:&\w+\ )?)(?P<scalar>"[^"]*"|'[^']*'|[^\s"'&*!|>\[{@`#%][^#{}\[\]]*?)(?P<rest>\s*)"""
)
WAYS = {
    "configs/ways.yaml": """\
-- from 'macros.yaml' import optimizer
-- extends 'middle.yaml'
[args]
== super()
  lr: 3
  nested:
    lr: 4
[twice]
first:
  == super() | indent(2)
second:
  == super() | indent(2)
[rest]
-- set captured
  shown: 5
  again: 6
-- endset
a:
  == captured
b:
  == captured | replace('shown', 'seen')
-- for name in ['x', 'y']
loop_{{ name }}:
  turn: 7
-- endfor
macro_a:
  == optimizer(1)
macro_b:
  == optimizer(2)
-- include 'part.yaml'
inner: !call:dict
  -- include 'part.yaml'
""",
    "middle.yaml": "-- extends 'base.yaml'\n[args]\n== super()\n  lr: 2\n  wd: 0.1\n",
    "base.yaml": """\
.common: &common
  eps: &eps 1e-8
  text: "quoted"
  list:
    - k: v
.more: &more
  <<: *common
  eps: 1e-6
args: &args
-- block args
  lr: 1
  old: 1
-- endblock
-- block twice
x:
  deep: 1
-- endblock
-- block rest
-- endblock
uses:
  <<: *more
  anchor: *eps
  many: [*eps, 1, *args]
  call: !call:dict [*eps, *common]
  own: 9
  text: replaced
main: !call:dict
  args: *args
  uses: !partial:dict {<<: *common, z: *eps}
""",
    "macros.yaml": "-- macro optimizer(lr)\n  lr: {{ lr }}\n  decay: 0.5\n-- endmacro\n",
    "part.yaml": "  included: 1\n",
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("copy")
    for part in (PROJECTS, LIBRARY):
        shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("output_models", "__pycache__"))
    for name, text in WAYS.items():
        file = folder / "ways" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


@pytest.fixture
def every(request):
    """One line of so many is tried; each of them with `--all-cells`."""
    return 1 if request.config.getoption("all_cells") else 4


class Config:
    """One config of the copy, loaded as often as it takes."""

    def __init__(self, copy, templates, name):
        variables = {"project_dir": "/project", "workspace_root": "/workspace", "hostname": "host"}
        folders = (copy / templates, (copy / templates).parent / "configs", copy / "templatelib")
        self.environment = ConfigEnvironment(searchpath=tuple(map(str, folders)), variables=variables)
        self.name = name

    def load(self):
        rendered = render(self.environment, self.name)
        blamed = {format_path(item.path): item for item in blame(load(rendered))}
        return rendered, blamed


def meaning(node):
    """What a node says itself, whatever is inside it."""
    if isinstance(node, Scalar):
        return type(node.value), node.value
    return type(node), getattr(node, "kind", None), node.constructor if isinstance(node, Call) else None


def lines_of(file):
    """The plain lines of a file, with the same lines saying something else."""
    for number, text in enumerate(Path(file).read_text().split("\n"), start=1):
        found = PLAIN.fullmatch(text)
        if found and not text.lstrip().startswith(("--", "==", "##")):
            scalar = found["scalar"]
            changed = f"{scalar[:-1]}zz{scalar[-1]}" if scalar[0] in "\"'" else f"{number}zz{scalar.strip('~')}"
            yield number, found["key"] + changed + found["rest"]


def blamed_on(blamed, file, number):
    return {
        path
        for path, item in blamed.items()
        if isinstance(item.node, Scalar)
        and any((site.span.file, site.span.line) == (file, number) for site in writers(item.now.origin))
    }


def writers(origin):
    return (*(() if origin.approximate else (origin.site,)), *origin.parts)


def changed_by(before, after):
    paths = before.keys() | after.keys()
    return {
        path
        for path in paths
        if path not in before or path not in after or meaning(before[path].node) != meaning(after[path].node)
    }


def try_lines(config, every, files=None):
    """Changes one line of so many after the other; returns how many, and the lines whose blame was wrong."""
    rendered, before = config.load()
    tried, wrong = 0, []
    for file in files or sorted(rendered.sources):
        text = Path(file).read_text()
        for number, changed in list(lines_of(file))[::every]:
            lines = text.split("\n")
            lines[number - 1] = changed
            Path(file).write_text("\n".join(lines))
            expected, actual = blamed_on(before, file, number), changed_by(before, config.load()[1])
            tried += 1
            if expected != actual:
                wrong.append((f"{Path(file).name}:{number} {changed.strip()}", sorted(expected ^ actual)))
        Path(file).write_text(text)
    return tried, wrong


@pytest.mark.parametrize("config", thinned(CONFIGS, lambda config: CONFIGS.index(config) % 3 == 0))
def test_every_plain_line_of_a_config_is_blamed_for_what_it_changes(copy, every, config):
    path = Path(config)
    loaded = Config(copy, path.parents[1], f"configs/{path.name}")
    # A value that a template reads from a file with `fromyaml` is blamed on the line that prints it.
    data = str(copy / path.parents[2] / "configs")
    files = [file for file in sorted(loaded.load()[0].sources) if not file.startswith(data)]
    is_first = config in FIRST
    if not is_first:
        # What the library says is tried behind the first config of each project, and behind each trainer.
        files = [file for file in files if not file.startswith(str(copy / LIBRARY.name))]
    tried, wrong = try_lines(loaded, every, files)
    assert [] == wrong
    assert tried > (40 // every if is_first else 0)


@pytest.mark.parametrize("fragment", thinned(FRAGMENTS, lambda fragment: FRAGMENTS.index(fragment) % 3 == 0))
def test_every_plain_line_of_a_fragment_of_the_library(copy, every, tmp_path, fragment):
    block = re.match(r"## For \[(\w+)\]", (LIBRARY / fragment).read_text())[1]
    (tmp_path / "main.yaml").write_text(f"-- extends 'trainers/trainer.yaml'\n[{block}]\n    -- include '{fragment}'\n")
    assert [] == try_lines(Config(copy, tmp_path, "main.yaml"), every, [str(copy / "templatelib" / fragment)])[1]


@pytest.mark.parametrize("trainer", [name for name in TRAINERS if not name.endswith("base.yaml")])
def test_every_plain_line_behind_a_trainer_of_the_library(copy, every, tmp_path, trainer):
    (tmp_path / "main.yaml").write_text(f"-- extends '{trainer}'\n")
    tried, wrong = try_lines(Config(copy, tmp_path, "main.yaml"), every)
    assert [] == wrong
    # That of Lightning has words in place of our settings, and most of its blocks are empty.
    assert tried > (10 if trainer == "trainers/lightning.yaml" else 40) // every


def test_every_plain_line_reaches_its_values_in_every_way_there_is(copy):
    config = Config(copy, "ways", "configs/ways.yaml")
    assert [] == try_lines(config, 1)[1]
    _, blamed = config.load()
    part = str(copy / "ways" / "part.yaml")
    assert {"included", "inner.included"} <= {path.removeprefix("macro_b.") for path in blamed_on(blamed, part, 1)}
