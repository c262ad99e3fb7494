"""Contract over every shipped config: traced text is plain Jinja's text, and every line names a line that wrote it."""

from datetime import datetime
from pathlib import Path

import pytest
from jinja2 import FunctionLoader, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from ruamel.yaml import YAML

from forgather.config._jinja.filters import toyaml
from forgather.config._jinja.globals import Globals
from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render
from forgather.config.split import split
from forgather.config.syntax import desugar
from forgather.project.metadata_file import read_meta
from tests.matrix import thinned

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(ROOT.glob("projects/*/templates/configs/*.yaml"))
NOON = datetime(2026, 1, 31, 12)
VARIABLES = {
    "project_dir": "/project",
    "workspace_root": "/workspace",
    "hostname": "host",
    "uname": "uname",
    "versions": {"python": "3", "torch": "2", "transformers": "5", "accelerate": "1"},
}


def environment_of(config):
    return ConfigEnvironment(searchpath=read_meta(str(config.parents[2])).searchpath, variables=VARIABLES, now=NOON)


def plain(rendered, searchpath):
    inline = {}
    for source in rendered.sources.values():
        for part in split(source.text)[1:]:
            inline.setdefault(part.name, []).append(part.text)

    def load(name):
        name, _, position = name.partition("@")
        texts = list(inline.get(name, []))
        for folder in searchpath:
            path = Path(folder) / name
            if path.is_file():
                texts.append(split(path.read_text())[0].text)
        position = int(position or 0)
        # Inside X, `extends 'X'` means the next definition outward; plain Jinja needs another name for it.
        outward = desugar(texts[position]).replace(f"extends '{name}'", f"extends '{name}@{position + 1}'")
        return outward

    environment = ImmutableSandboxedEnvironment(
        loader=FunctionLoader(load),
        undefined=StrictUndefined,
        trim_blocks=True,
        extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"],
    )
    environment.globals.update(Globals(NOON).table(), **VARIABLES)
    environment.filters["fromyaml"] = lambda text, form=None: YAML(typ="safe", pure=True).load(text)
    environment.filters["toyaml"] = lambda value, default=None: toyaml(
        default if environment.tests["undefined"](value) else value
    )
    return environment.get_template(rendered.name).render()


@pytest.mark.parametrize(
    "config",
    thinned(CONFIGS, lambda config: CONFIGS.index(config) % 3 == 0),
    ids=lambda path: f"{path.parents[2].name}-{path.stem}",
)
def test_a_shipped_config_renders_as_plain_jinja_does_and_every_line_is_mapped(config):
    environment = environment_of(config)
    rendered = render(environment, f"configs/{config.name}")
    assert plain(rendered, environment.searchpath) == rendered.text
    for line, origin in rendered.source_map.lines():
        if line.strip():
            for site in origin.sites:
                assert rendered.sources[site.span.file].line(site.span.line).strip()
