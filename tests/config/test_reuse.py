import pytest
from documents import hazards

BASE = """model: &model
-- block model
    size: 1
-- endblock
-- block extra
-- endblock
trainer:
    model: *model
"""


@pytest.fixture
def findings(tmp_path):
    return lambda **files: hazards(tmp_path, **{"base": BASE, **files})


def main(*lines):
    return "\n".join(("-- extends 'base.yaml'", *lines, ""))


def test_an_alias_of_a_parent_that_a_childs_anchor_takes_is_a_lint(findings):
    assert [
        "main.yaml:4: lint[FG224]: &model is already the anchor of the value at base.yaml:3; *model at base.yaml:8 "
        "now refers to this one (give this anchor another name)"
    ] == findings(main=main("[extra]", "teacher: &model", "    size: 2"))


def test_an_anchor_that_is_used_again_before_its_alias_is_a_lint(findings):
    text = "a: &x 1\nb: &x 2\nc: *x\n"
    assert ["main.yaml:2"] == [line.split(": ")[0] for line in findings(main=text)]
    assert [] == findings(main="a: &x 1\nd: *x\nb: &x 2\nc: *x\n")


def test_an_anchor_that_replaces_wraps_or_repeats_the_value_is_meant(findings):
    assert [] == findings(main=main("[model]", "    size: 2"))
    assert [] == findings(main=main("[extra]", "inner: &inner {model: *model}", "wrapped: &model [*inner]"))
    assert [] == findings(main=main("[extra]", "same: &model", "    size: 1"))


def test_an_alias_of_the_template_that_has_the_later_anchor_is_meant(findings):
    text = main("[extra]", "teacher: &model {size: 2}", "student: *model")
    assert ["main.yaml:3"] == [line.split(": ")[0] for line in findings(main=text)]
    assert [] == findings(
        base="a: &x 1\ne: *x\nb: &x 2\nc: *x\n-- block extra\n-- endblock\n", main=main("[extra]", "d: *x")
    )


def test_an_anchor_whose_value_is_gone_is_no_finding(findings):
    base = "-- block m\n.old: &model {size: 1}\n-- endblock\n-- block extra\n-- endblock\nt: {m: *model}\n"
    found = findings(base=base, main=main("[extra]", "teacher: &model {size: 2}"))
    assert ["FG230"] == [line.partition("[")[2][:5] for line in found]
