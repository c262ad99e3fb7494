"""Contract: a file with and without its last line end renders alike, and text of one never continues a line of another."""

import itertools
import shutil
from pathlib import Path

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render
from tests.config.test_library_is_plain_jinja import CONFIGS, NOON, ROOT, VARIABLES
from tests.matrix import thinned


@pytest.fixture(scope="module")
def without_ends(tmp_path_factory):
    """A copy of every shipped template, without the line ends at the end of its file."""
    folder = tmp_path_factory.mktemp("shipped")
    for tree in (ROOT / "templatelib", *{config.parents[2] for config in CONFIGS}):
        shutil.copytree(tree, folder / tree.relative_to(ROOT), ignore=shutil.ignore_patterns("output*"))
    for file in folder.rglob("*.yaml"):
        file.write_bytes(file.read_bytes().rstrip(b"\n"))
    return folder


def shown(config, root):
    """Text and map of a config, places relative to `root`."""
    project = root / config.parents[2].relative_to(ROOT)
    path = (project / "templates", project / "configs", root / "templatelib")
    environment = ConfigEnvironment(searchpath=tuple(map(str, path)), variables=VARIABLES, now=NOON)
    rendered = render(environment, f"configs/{config.name}")
    found = [
        (
            line,
            origin and [(Path(site.span.file).relative_to(root), site.span.line, site.block) for site in origin.sites],
        )
        for line, origin in rendered.source_map.lines()
    ]
    return rendered.text, found


@pytest.mark.parametrize(
    "config",
    thinned(CONFIGS, lambda config: CONFIGS.index(config) % 3 == 0),
    ids=lambda path: f"{path.parents[2].name}-{path.stem}",
)
def test_a_shipped_config_renders_alike_without_the_last_line_ends_of_its_files(config, without_ends):
    assert shown(config, ROOT) == shown(config, without_ends)


HOSTS = {
    "bracket": "a: 1\n[x]\ndefault: 1\n[y]\nb: 2\n",
    "bracket that trims": "a: 1\n[x!]\ndefault: 1\n[y]\nb: 2\n",
    "line block": "a: 1\n-- block x\ndefault: 1\n-- endblock x\nb: 2\n",
    "empty line block": "a: 1\n-- block x\n-- endblock x\nb: 2\n",
    "tags": "a: 1\n{% block x %}\ndefault: 1\n{% endblock %}\nb: 2\n",
    "inside another": "a: 1\n[w]\n  [x]\ndefault: 1\n-- endblock w\nb: 2\n",
    "before a statement": "a: 1\n-- block x\ndefault: 1\n-- endblock\n-- if true\nb: 2\n-- endif\n",
    "before another block of the child": "a: 1\n[x]\ndefault: 1\n[z]\nb: 3\n",
}
LAST_BLOCKS = {
    "bracket": "[x]\nc: 1\n",
    "bracket that trims": "[x!]\nc: 1\n",
    "line block": "-- block x\nc: 1\n-- endblock x\n",
    "line block without a name": "-- block x\nc: 1\n-- endblock\n",
    "trimming line block": "{% block x -%}\nc: 1\n{%- endblock %}\n",
    "block on one line": "{% block x %}c: 1{% endblock %}\n",
    "bracket with a comment": "[x]\nc: 1  ## note\n",
    "bracket that ends in a comment": "[x]\nc: 1\n## note\n",
    "bracket that ends in a statement": "[x]\nc: 1\n-- set q = 1\n",
    "bracket that ends in a print": "[x]\n== 'c: 1'\n",
    "bracket that ends in raw text": "[x]\n-- raw\nc: 1\n-- endraw\n",
    "bracket that ends in a loop": "[x]\n-- for i in [1]\nc: {{ i }}\n-- endfor\n",
    "bracket that ends in an include": "[x]\n-- include 'part'\n",
    "bracket that ends in an include in a condition": "[x]\n{% if true %}{% include 'part' %}{% endif %}\n",
    "nested brackets": "[x]\n  [inner]\nc: 1\n",
    "bracket with super": "[x]\nc: 1\n-- if false\n== super()\n-- endif\n",
}
PARTS = {"part": "c: 1\n", "other": "d: 2\n"}


def rendered(folder, files):
    """Text and map of `main`, from files with the given bytes."""
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    made = render(ConfigEnvironment(searchpath=(str(folder),)), "main")
    return made.text, [(line, origin and origin.sites) for line, origin in made.source_map.lines()]


def visible(text):
    return [line for line in text.split("\n") if line.strip()]


@pytest.mark.parametrize("block", LAST_BLOCKS)
@pytest.mark.parametrize("host", HOSTS)
def test_the_last_block_of_a_file_ends_its_line(tmp_path, host, block):
    second = "-- block z\nb: 2\n-- endblock\n" if host.startswith("before another") else ""
    main = f"-- extends 'host'\n{second}{LAST_BLOCKS[block]}"
    files = {"host": HOSTS[host], "main": main, **PARTS}
    whole = rendered(tmp_path, files)

    assert ["a: 1", "c: 1", "b: 2"] == visible(whole[0])
    for names in itertools.chain.from_iterable(itertools.combinations(files, count) for count in (1, len(files))):
        assert whole == rendered(tmp_path, {**files, **{name: files[name].rstrip("\n") for name in names}})
    windows = {name: text.replace("\n", "\r\n") for name, text in files.items()}
    assert whole == rendered(tmp_path, windows)
    assert whole == rendered(tmp_path, {name: text.removesuffix("\r\n") for name, text in windows.items()})


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("block", LAST_BLOCKS)
def test_the_last_sub_template_of_a_file_ends_its_line(tmp_path, block, end):
    host = f"-- extends 'host'\n#--- child ---\n-- extends 'base'\n{LAST_BLOCKS[block]}"
    main = "-- extends 'child'\n#--- base ---\n[x]\n[y]\nb: 2\n#--- child ---\n-- extends 'base'\n" + LAST_BLOCKS[block]
    text, _ = rendered(tmp_path, {"host": host, "main": main.removesuffix("\n") + end, **PARTS})

    assert ["c: 1", "b: 2"] == visible(text)


INCLUDES = {
    "alone": ("-- include 'part'\n-- include 'other'\nb: 2\n", ["c: 1", "d: 2", "b: 2"]),
    "alone, as tags": ("{% include 'part' %}\n{% include 'other' %}\nb: 2\n", ["c: 1", "d: 2", "b: 2"]),
    "in conditions": (
        "{% if 1 %}{% include 'part' %}{% endif %}\n{% if 1 %}{% include 'other' %}{% endif %}\nb: 2\n",
        ["c: 1", "d: 2", "b: 2"],
    ),
    "in a condition, then a comment": (
        "{% if 1 %}{% include 'part' %}{% endif %}\n## note\nb: 2\n", ["c: 1", "b: 2"],
    ),
    "in a condition, then a value": (
        "-- set k = 'b: 2'\n{% if 1 %}{% include 'part' %}{% endif %}\n{{ k }}\n", ["c: 1", "b: 2"],
    ),
    "in a condition, then a macro": (
        "-- macro m()\nb: {{ caller() }}\n-- endmacro\n"
        "{% if 1 %}{% include 'part' %}{% endif %}\n{% call m() %}2{% endcall %}\n",
        ["c: 1", "b: 2"],
    ),
    "a macro of another file": (
        "-- from 'macros' import m\n{% call m() %}1{% endcall %}\nb: 2\n", ["c: 1", "b: 2"],
    ),
    "in a loop": ("{% for i in [1, 2] %}{% include 'part' %}{% endfor %}\nb: 2\n", ["c: 1", "c: 1", "b: 2"]),
    "behind a key": ("k: {% include 'value' %}\nb: 2\n", ["k: v", "b: 2"]),
    "in quotes": ("k: \"{% include 'value' %}\"\nb: 2\n", ['k: "v"', "b: 2"]),
    "in brackets": ("k: [{% include 'value' %}, {% include 'value' %}]\nb: 2\n", ["k: [v, v]", "b: 2"]),
    "before a value": ("-- set k = 3\nk: {% include 'value' %}{{ k }}\nb: 2\n", ["k: v3", "b: 2"]),
    "two in a line": ("k: {% include 'value' %}{% include 'value' %}\nb: 2\n", ["k: vv", "b: 2"]),
    "joined on purpose": ("{% include 'value' %}\n{%- include 'value' %}: 1\nb: 2\n", ["vv: 1", "b: 2"]),
    "joined on purpose, from the left": ("{% include 'value' -%}\nw: 1\nb: 2\n", ["vw: 1", "b: 2"]),
}  # fmt: skip
SHARED = [name for name, (_, lines) in INCLUDES.items() if "v" in lines[0] and lines[0] != "k: v"]


@pytest.mark.parametrize("written", ["{}", "[x]\n{}", "-- if 1\n{}\n-- endif"], ids=["plain", "bracket", "condition"])
@pytest.mark.parametrize("name", INCLUDES)
def test_an_included_text_shares_a_line_only_where_the_line_says_so(tmp_path, name, written):
    main, expected = INCLUDES[name]
    if written.startswith("-- if") and name in SHARED:
        pytest.skip("text before a statement ends its line, in plain Jinja as well")
    files = {
        "main": main,
        "value": written.format("v") + "\n",
        "part": written.format("c: 1") + "\n",
        "other": written.format("d: 2") + "\n",
        "macros": "{% macro m() %}c: {{ caller() }}{% endmacro %}\n",
    }
    for ends in ("", "\n"):
        text, _ = rendered(tmp_path, {name: text.rstrip("\n") + ends for name, text in files.items()})
        assert expected == visible(text)
