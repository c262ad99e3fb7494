"""The data of the page, and the document that carries it."""

import json
import re
from pathlib import Path

import pytest

from forgather.cli.commands.graph import config_page
from forgather.codegen.diagram import boxes_of
from forgather.codegen.page.page import SCRIPTS, embedded, page, page_data
from forgather.codegen.page.source_lines import RenderedLines, rendered_lines
from forgather.config.insight.line_annotations import annotate
from forgather.project.path_display import Display
from forgather.project.project import Project
from tests.page.conftest import FILES
from tests.project.workbench import make_project

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "projects").glob("*/templates/configs/*.yaml"))


def data_of(project):
    shorten = Display(project.meta.project_dir, project.meta.workspace_root, relative_to_cwd=False)
    return page_data(
        project.graph,
        project.rendered,
        shorten=shorten,
        config=project.config_name,
        overrides=project.overrides,
        findings=project.diagnostics,
    )


@pytest.fixture
def bench(tmp_path):
    def build(files=FILES, config=None, **settings):
        return data_of(Project(config, make_project(tmp_path / "bench", files), **settings))

    return build


def box(data, title):
    (found,) = [box for box in data["boxes"] if box.get("title") == title]
    return found


def row(box, key):
    (found,) = [row for row in box["rows"] if row["key"] == key]
    return found


def place(data, number):
    file, line = data["places"][data["origins"][number]["at"]]
    return f"{data['files'][file]}:{line}"


def test_scalars_are_rows_and_calls_are_boxes(bench):
    data = bench()
    assert ["config", "singleton", "singleton", "singleton", "partial", "dict", "factory"] == [
        box["kind"] for box in data["boxes"]
    ]
    tokenizer = box(data, "Tokenizer")
    assert ("100", "int") == (row(tokenizer, "size")["text"], row(tokenizer, "size")["kind"])
    assert ["0.9", "0.95"] == [inner["text"] for inner in row(tokenizer, "betas")["rows"]]
    assert "!env SECRET_KEY" == row(box(data, "Trainer"), "key")["text"]


def test_an_alias_is_a_row_that_leads_to_the_one_box(bench):
    data = bench()
    number = data["boxes"].index(box(data, "Tokenizer"))
    rows = [
        (row["key"], row.get("alias")) for each in data["boxes"] for row in each["rows"] if row.get("box") == number
    ]
    assert [("tokenizer", None), ("tokenizer", "tokenizer"), ("tokenizer", "tokenizer")] == rows


def test_a_value_says_who_wrote_it_and_what_it_replaced(bench):
    data = bench()
    steps = row(box(data, "Arguments"), "steps")
    assert "templates/configs/small.yaml:4" == place(data, steps["origin"])
    assert [("10", "templates/base.yaml:6")] == [(old["text"], place(data, old["origin"])) for old in steps["was"]]
    assert "    steps: 20" == data["lines"][steps["line"] - 1][0]
    rate = data["origins"][row(box(data, "Arguments"), "rate")["origin"]]
    assert [[data["files"].index("templates/base.yaml"), 1]] == [data["places"][number] for number in rate["sets"]]


def test_an_overridden_line_names_the_line_that_counts(bench):
    data = bench()
    assert [("    steps: 10", "    steps: 20")] == [
        (data["lines"][old - 1][0], data["lines"][new - 1][0]) for old, new in data["over"]
    ]


def test_a_line_whose_value_is_used_elsewhere_is_not_overridden(bench):
    text = "base: &base {lr: 1, sub: &sub {a: 1}}\nmain:\n  <<: *base\n  lr: 2\n  other: *sub\n"
    assert [] == bench({"templates/configs/a.yaml": text})["over"]


def test_overriding_a_block_overrides_all_its_lines(bench):
    base = "-- block b\nmain:\n  opt:\n    a: 1\n    b:\n      c: 2\n  kept: 3\n-- endblock b\n"
    child = "-- extends 'base.yaml'\n[b]\n    == super()\n  opt: 4\n"
    data = bench({"templates/base.yaml": base, "templates/configs/a.yaml": child})
    assert ["  opt:", "    a: 1", "    b:", "      c: 2"] == [data["lines"][line - 1][0] for line, _ in data["over"]]


def test_lines_of_a_loop_are_distinguished(bench):
    text = "main:\n-- for name in ['a', 'b', 'c']\n  {{ name }}: !call:app:F\n    lr: 1\n-- endfor\n"
    data = bench({"templates/configs/a.yaml": text})
    assert [3, 5, 7] == [row(box, "lr")["line"] for box in data["boxes"] if box.get("title") == "F"]


def test_the_lines_around_each_place_are_there_once(bench):
    data = bench()
    assert len(data["files"]) == len(data["sources"])
    for file, runs in enumerate(data["sources"]):
        numbers = [first + at for first, *lines in runs for at in range(len(lines))]
        assert sorted(set(numbers)) == numbers
        assert {line for other, line in data["places"] if other == file} <= set(numbers)


def test_the_templates_say_who_asked_for_them_and_what_they_wrote(bench):
    config, base, part = bench()["templates"]
    assert [("configs/small.yaml", None), ("base.yaml", 0), ("part.yaml", 1)] == [
        (use["name"], use.get("parent")) for use in (config, base, part)
    ]
    assert ("include", 3) == (part["why"], part["wrote"])


def test_findings_are_reported_with_their_place(bench):
    text = "-- extends 'base.yaml'\ntext outside\n"
    data = bench({"templates/configs/a.yaml": text, "templates/base.yaml": "main: 1\n"})
    assert ["warning"] == [found["severity"] for found in data["findings"]]
    file, line = data["places"][data["findings"][0]["at"]]
    assert ("templates/configs/a.yaml", 2) == (data["files"][file], line)


def test_no_file_is_named_by_a_folder_of_the_machine(bench, tmp_path):
    text = json.dumps(bench())
    assert str(tmp_path) not in text
    assert [] == [file for file in bench()["files"] if file.startswith("/")]


def test_a_file_from_elsewhere_goes_by_the_end_of_its_path(tmp_path):
    shared = tmp_path / "elsewhere" / "shared"
    shared.mkdir(parents=True)
    (shared / "base.yaml").write_text("main: 1\n")
    meta = f"name: Bench\nsearchdir: [templates, {shared}]\n"
    folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": "-- extends 'base.yaml'\n"}, meta=meta)
    assert "…/shared/base.yaml" in data_of(Project("a", folder))["files"]


def test_data_in_a_page_has_nothing_that_ends_a_script():
    hostile = {"</script>": "<!-- <script> ]]> & \u2028 \u2029 \x7f \ud800"}
    text = embedded(hostile)
    assert hostile == json.loads(text)
    assert not re.search("[<>&\u2028\u2029\x7f\ud800]", text)


def test_the_title_is_text():
    data = {"config": "<b>&amp;</title><script>", "project": "@data@"}
    assert "<title>&lt;b>&amp;amp;&lt;/title>&lt;script> · @data@</title>" in page(data)


def test_the_page_allows_itself_no_connection():
    text = page({"config": "a.yaml", "project": ""})
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "fetch("):
        assert word not in text


def test_every_script_of_the_folder_is_in_the_page():
    folder = ROOT / "forgather/codegen/page"
    assert sorted(SCRIPTS) == sorted(file.name for file in folder.glob("*.js"))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda file: f"{file.parents[2].name}-{file.stem}")
def test_every_shipped_config_has_a_page_of_modest_size_that_agrees_with_the_annotated_text_on_every_line(config):
    project = Project(config.name, str(config.parents[2]))
    assert len(config_page(project)) < 300_000
    data = data_of(project)
    for box in data["boxes"][1:]:
        assert {"kind", "title", "origin", "line"} <= set(box)
    lines = annotate(project.rendered, project.graph)
    dimmed = [number for number, line in enumerate(lines, start=1) if not line.counts and line.text.strip()]
    assert dimmed == [number for number, _ in data["over"]]
    boxes = boxes_of(project.graph)
    mine = rendered_lines(boxes, RenderedLines(project.rendered))
    paths = {(*box.path, row.step): mine.get(id(row)) for box in boxes for row in box.rows if row.box is None}
    theirs = {note.path: number for number, line in enumerate(lines, start=1) for note in line.notes if not note.winner}
    # A value may stand on the line below its key.
    far = [path for path, number in paths.items() if number and theirs.get(path, number) - number not in (0, 1)]
    assert [] == far
    assert len(theirs) > 40


def test_a_number_is_shown_as_it_was_written(bench):
    text = "main: {lr: 1e-2, mask: 0o17, plain: 0.5, flag: True, none: null, text: '1e-2', betas: [9e-1, 0.95]}\n"
    main = box(bench({"templates/configs/a.yaml": text}), "dict")
    assert [("1e-2", "0.01"), ("0o17", "15"), ("0.5", None), ("true", None), ("~", None)] == [
        (row(main, key)["text"], row(main, key).get("value")) for key in ("lr", "mask", "plain", "flag", "none")
    ]
    assert "str" == row(main, "text")["kind"]
    assert "[9e-1, 0.95]" == row(main, "betas")["text"]
