import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render, render_text
from forgather.errors import RenderError, SyntaxFault


@pytest.fixture
def folder(tmp_path):
    """Writes templates; gives a function that renders one of them."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".yaml").write_text(text)

    write.render = lambda name, **variables: render(ConfigEnvironment(searchpath=(str(tmp_path),)), name, variables)
    write.path = tmp_path
    return write


def text(source, **variables):
    return render_text(ConfigEnvironment(), source, variables=variables).text


def test_a_child_overrides_a_block_and_keeps_the_parents_lines(folder):
    folder(
        base="-- set lr = 3\nmain:\n  -- block optimizer\n    lr: {{ lr }}\n    wd: 0\n  -- endblock optimizer\n",
        configs__tiny="-- extends 'base.yaml'\n[optimizer]\n    == super()\n    lr: 1e-3\n",
    )
    rendered = folder.render("configs/tiny.yaml")
    assert "main:\n    lr: 3\n    wd: 0\n\n    lr: 1e-3\n" == rendered.text
    assert ("base.yaml",) == rendered.extends_chain
    assert ["config", "extends"] == [use.why for use in rendered.templates]


def test_variables_of_the_call_are_seen_by_the_config_and_its_parents(folder):
    folder(base="a: {{ steps }}\n", configs__tiny="-- extends 'base.yaml'\n")
    assert "a: 7" == folder.render("configs/tiny.yaml", steps=7).text


def test_an_include_alone_on_its_line_ends_with_a_newline(folder):
    folder(
        one="a: 1\n",
        two="b: 2\n",
        both="-- include 'one.yaml'\n-- include 'two.yaml'\nc: \"{% include 'one.yaml' %}\"\n",
    )
    assert 'a: 1\nb: 2\nc: "a: 1"' == folder.render("both.yaml").text


def test_an_undefined_variable_names_the_nearest_one():
    with pytest.raises(RenderError, match="'learing_rate' is not defined") as caught:
        text("a: 1\nb: {{ learing_rate }}", learning_rate=1)
    assert ("FG111", 2, "did you mean 'learning_rate'?") == (
        caught.value.code,
        caught.value.span.line,
        caught.value.hint,
    )


def test_an_unclosed_if_points_at_its_opener():
    with pytest.raises(SyntaxFault, match="'if' is not closed") as caught:
        text("a: 1\n-- if true\nb: 2\n")
    assert ("FG102", 2) == (caught.value.code, caught.value.span.line)


@pytest.mark.parametrize("end", ["[b]", "-- endblock", "-- endblock a"])
def test_a_trimmed_block_loses_its_outer_blank_lines_and_stays_on_lines_of_its_own(tmp_path, end):
    (tmp_path / "main").write_text(f"[a!]\n\nx: 1\n\ny: 2\n\n\n{end}\nz: 3\n")
    rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")
    assert "x: 1\n\ny: 2\nz: 3" == rendered.text.rstrip()
    assert ["x: 1", "y: 2", "z: 3"] == [
        rendered.sources[origin.span.file].line(origin.span.line)
        for line, origin in rendered.source_map.lines()
        if line
    ]


def test_a_trimmed_block_of_a_child_is_no_text_outside_of_blocks(tmp_path):
    (tmp_path / "main").write_text("-- extends 'base'\n[a!]\n\nx: 1\n\n[b]\ny: 2\n")
    (tmp_path / "base").write_text("name: '{% block a %}old{% endblock %}'\n[b]\nold: 2\n-- endblock\n")
    rendered = render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main")
    assert ("name: 'x: 1'\ny: 2", ()) == (rendered.text.rstrip(), rendered.diagnostics)
