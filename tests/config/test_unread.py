import time

import pytest

from forgather import bounded
from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render
from forgather.errors import Severity

BASE = """-- set ns = ns | default(namespace())
-- block settings
-- endblock
a: {{ ns.block_size | default(1) }}
b: {{ trainer | default('x') }}
-- block model
-- endblock
"""
WARNING, LINT = Severity.WARNING, Severity.LINT


@pytest.fixture
def rendered(tmp_path):
    def run(_given=None, _library=None, **files):
        files.setdefault("base", BASE)
        project, library = tmp_path / "project", tmp_path / "library"
        for folder, texts in ((project, files), (library, _library or {})):
            folder.mkdir(exist_ok=True)
            for name, text in texts.items():
                (folder / f"{name}.yaml").write_text(text)
        environment = ConfigEnvironment(
            searchpath=(str(project), str(library)), variables={"project_dir": str(project), "joinpath": None}
        )
        return render(environment, "main.yaml", _given or {})

    return run


@pytest.fixture
def findings(rendered):
    def run(*args, **files):
        found = rendered(*args, **files).diagnostics
        return [(item.code, item.severity, item.span and item.span.line, item.hint) for item in found]

    return run


def main(*lines):
    return "\n".join(("-- extends 'base.yaml'", *lines, ""))


def test_an_attribute_that_nothing_reads_has_the_near_name_that_was_meant(findings):
    text = main("[settings]", "-- set ns.blok_size = 2")
    assert [("FG134", WARNING, 3, "did you mean 'ns.block_size'?")] == findings(main=text)


def test_a_name_that_nothing_reads_has_the_near_name_that_was_meant(findings):
    assert [("FG134", WARNING, 2, "did you mean 'trainer'?")] == findings(main=main("-- set trainr = 'y'"))


@pytest.mark.parametrize("word", ["nproc_per_node", "num_processes", "devices"])
def test_a_number_of_processes_that_the_template_does_not_read_is_a_warning(findings, word):
    ((code, severity, line, hint),) = findings(main=main("[settings]", f"-- set ns.{word} = 2"))
    assert ("FG134", WARNING, 3) == (code, severity, line)
    assert "extend 'trainers/accel_trainer.yaml' or 'trainers/pipeline_trainer.yaml'" in hint


def test_a_name_that_is_near_nothing_is_a_lint(findings):
    lint = [("FG134", LINT, 2, "remove the line, or read the name")]
    assert lint == findings(main=main("-- set colour = 'red'"))
    assert lint == findings(main=main("{% set colour %}red{% endset %}"))


def test_what_is_set_in_front_of_extends_and_not_read_there_has_no_effect(findings):
    text = "-- set trainer_template = 'accel'\n-- extends 'base.yaml'\n"
    (found,) = findings(main=text)
    assert ("FG134", WARNING, 1) == found[:3]
    assert "set before `extends` is for 'base.yaml'" in found[3]
    reading = "-- extends trainer_template | default('base.yaml')\n"
    assert [] == findings(main=text.replace("base", "middle").replace("'accel'", "'base.yaml'"), middle=reading)


def test_what_another_template_reads_is_no_finding(findings):
    assert [] == findings(main=main("-- set trainer = 'y'", "[settings]", "-- set ns.block_size = 2"))
    assert [] == findings(main=main("[model]", "-- set rate = 2", "-- include 'part.yaml'"), part="{{ rate }}")
    assert [] == findings(
        main=main("-- import 'lib.yaml' as lib", "[model]", "{{ lib.rate }}"), lib="-- set rate = 2\n"
    )
    assert [] == findings(
        main=main("-- from 'lib.yaml' import rate with context", "[model]", "{{ rate }}"), lib="-- set rate = 2\n"
    )


@pytest.mark.parametrize(
    "reader",
    [
        "{{ ns['rate'] }}",
        "{{ ns | attr('rate') }}",
        "{{ (ns.rate) is defined }}",
        "{{ ns.rate | default(3) }}",
        "{% set key = 'rate' %}{{ ns[key] }}",
        "{% macro show(space) %}{{ space.rate }}{% endmacro %}{{ show(ns) }}",
        "{% set other = ns %}{{ other.rate }}",
    ],
)
def test_every_way_to_read_an_attribute_counts(findings, reader):
    assert [] == findings(main=main("[settings]", "-- set ns.rate = 2", "[model]", f"k: {reader}"))


def test_a_set_for_its_effect_and_an_underscore_are_no_findings(findings):
    assert [] == findings(main=main("-- set _ = 1", "[settings]", "-- set parents = super()"))


def test_asking_whether_a_namespace_is_there_reads_nothing_of_it(findings):
    text = main("[settings]", "-- if ns is defined", "-- set ns.blok_size = 2", "-- endif")
    assert [("FG134", WARNING, 4)] == [found[:3] for found in findings(main=text)]


def test_a_block_forgets_what_it_sets(findings):
    text = main("[settings]", "-- set trainer = 'y'")
    hint = "set it outside, or keep it in a namespace: `-- set ns.trainer = ...`"
    assert [("FG134", WARNING, 3, hint)] == findings(main=text)
    assert [] == findings(main=main("[settings]", "-- set trainer = 'y'", "c: {{ trainer }}"))


def test_a_loop_forgets_what_it_sets(rendered):
    text = "-- set best = 0\n-- for i in range(3)\n-- set best = i\n-- endfor\na: {{ best }}\n"
    (found,) = rendered(main=text).diagnostics
    assert ("FG134", WARNING, 3) == (found.code, found.severity, found.span.line)
    assert "'best' is set inside the loop, which does not read it and discards it at its end" == found.message


def test_a_template_that_is_not_the_projects_has_no_findings(findings):
    assert [] == findings(main="-- extends 'outside.yaml'\n", _library={"outside": "-- set some_name = 1\na: 1\n"})


def test_what_several_configs_share_may_be_for_another_one(findings):
    shared = BASE + "-- set depth = 3\n"
    assert [] == findings(base=shared, main=main(), other=main("[model]", "d: {{ depth }}"))
    assert [("FG134", LINT, 8)] == [found[:3] for found in findings(base=shared, main=main(), other=main())]


def test_a_folder_with_too_many_files_does_not_stop_a_render(findings, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "MAX_ENTRIES", 50)
    (tmp_path / "project" / "data").mkdir(parents=True)
    for number in range(60):
        (tmp_path / "project" / "data" / f"{number}.txt").touch()
    assert [("FG134", LINT, 8)] == [found[:3] for found in findings(base=BASE + "-- set depth = 3\n", main=main())]


def test_a_search_path_with_too_many_files_does_not_stop_a_render(findings, tmp_path, monkeypatch):
    monkeypatch.setattr(bounded, "MAX_ENTRIES", 50)
    (tmp_path / "library").mkdir()
    for number in range(60):
        (tmp_path / "library" / f"{number}.txt").touch()
    found = findings(main=main("[settings]", "-- set ns.colour = 'red'"))
    assert [("FG134", LINT, 3)] == [finding[:3] for finding in found]


def test_a_variable_that_nothing_reads_is_a_warning_with_the_near_name(rendered):
    (found,) = rendered({"trianer": "y"}, main=main()).diagnostics
    assert "warning[FG136]: the variable 'trianer' is given, but no template of this config reads it" in str(found)
    assert "did you mean 'trainer'?" == found.hint
    assert ("config main.yaml",) == found.context


def test_a_variable_that_a_branch_reads_or_that_is_tested_is_read(findings):
    assert [] == findings({"trainer": "y"}, main=main())
    text = main("[model]", "-- if false", "{{ size }}", "-- elif name is defined", "-- endif")
    assert [] == findings({"size": 1, "name": 2}, main=text)


def test_a_loop_variable_and_an_argument_of_a_macro_read_nothing_from_outside(rendered):
    macro = "{% macro show(size=1) %}{{ size }}{% endmacro %}{% for width in [1] %}{{ width }}{% endfor %}{{ show() }}"
    found = rendered({"size": 1, "width": 2}, main=main("[model]", f"c: {macro}")).diagnostics
    assert ["FG136", "FG136"] == [item.code for item in found]


def test_the_names_that_templates_read_are_told(rendered):
    reads = rendered(main=main("-- set x = joinpath", "[model]", "-- for i in y | default([])", "-- endfor")).reads
    assert {"ns", "namespace", "trainer", "joinpath", "y"} == reads


def test_thousands_of_sets_in_one_block_are_judged_at_once(rendered):
    started = time.process_time()
    sets = "".join(f"-- set v{i} = {i}\n" for i in range(1500))
    reads = "".join(f"  k{i}: {{{{ v{i} }}}}\n" for i in range(1500))
    assert () == tuple(rendered(main=f"-- block a\n{sets}x:\n{reads}-- endblock\n").diagnostics)
    assert time.process_time() - started < 5
