import os
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from forgather.config._jinja.filters import toyaml
from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render_text
from forgather.errors import RenderError

NOON = datetime(2026, 1, 31, 12, 30, 5, 123456, tzinfo=UTC)


def text(source, *, now=NOON, **variables):
    return render_text(ConfigEnvironment(now=now), source, variables=variables).text


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("isotime()", "2026-01-31T12:30:05"),
        ("utcisotime()", "2026-01-31T12:30:05"),
        ("filetime()", "2026-01-31T12-30-05"),
        ("utcfiletime()", "2026-01-31T12-30-05"),
        ("now().year", "2026"),
        ("utcnow().isoformat()", "2026-01-31T12:30:05.123456+00:00"),
        ("now().strftime('%d.%m.')", "31.01."),
        ("joinpath('a', 'b', 'c.txt')", os.path.join("a", "b", "c.txt")),
        ("normpath('a//b/../c')", os.path.normpath("a//b/../c")),
        ("relpath('/a/b', '/a/c')", os.path.relpath("/a/b", "/a/c")),
        ("dirname('/a/b.c')", "/a"),
        ("basename('/a/b.c')", "b.c"),
        ("splitext('b.c')[1]", ".c"),
        ("repr('a')", "'a'"),
        ("modname_from_path('/a/my_model.py')", "my_model"),
        ("abspath('x')", os.path.abspath("x")),
        ("getcwd()", os.getcwd()),
        ("user_home_dir()", os.path.expanduser("~")),
    ],
)
def test_a_global_function(expression, expected):
    assert expected == text("{{ " + expression + " }}")


@pytest.mark.parametrize(
    "name", ["user_data_dir", "user_cache_dir", "user_config_dir", "site_data_dir", "site_config_dir"]
)
def test_the_folders_of_the_platform_take_an_application(name):
    assert "forgather" in text("{{ " + name + "('forgather') }}")
    assert os.path.isabs(text("{{ " + name + "() }}"))


def test_the_config_folder_is_named_for_the_application():
    assert text("{{ forgather_config_dir() }}").endswith("forgather")


def test_all_clocks_of_a_load_show_one_instant():
    first, second = text("{{ now().isoformat() }} {{ now().isoformat() }}", now=None).split(" ")
    assert first == second


def test_a_clock_with_another_zone_is_converted():
    local = datetime.fromisoformat("2026-01-31T12:30:05+05:00")
    assert "12:30:05 07:30:05" == text("{{ isotime()[11:] }} {{ utcisotime()[11:] }}", now=local)


def test_reads_of_the_environment_are_recorded(monkeypatch):
    monkeypatch.setenv("DATA_DIR", "/data")
    monkeypatch.delenv("NOT_SET_DIR", raising=False)
    rendered = render_text(
        ConfigEnvironment(), "{{ env('DATA_DIR') }} {{ env('NOT_SET_DIR', 'x') }} {{ env('DATA_DIR', 'y') }}"
    )
    assert ("/data x /data", {"DATA_DIR": "/data", "NOT_SET_DIR": "x"}) == (rendered.text, rendered.env_reads)


def test_an_unset_variable_without_default_is_an_error(monkeypatch):
    monkeypatch.delenv("NOT_SET_DIR", raising=False)
    with pytest.raises(RenderError, match="the environment variable 'NOT_SET_DIR' is not set") as caught:
        text("a: 1\nb: {{ env('NOT_SET_DIR') }}")
    assert ("FG116", 2) == (caught.value.code, caught.value.span.line)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "WANDB_API_KEY", "DB_PASSWORD", "PASSWORD_FILE", "MY_SECRET_THING", "hf_token"]
)
def test_a_name_that_looks_secret_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "hunter2")
    with pytest.raises(RenderError, match="looks secret") as caught:
        text(f"{{{{ env('{name}', 'x') }}}}")
    assert f"!env {name}" in caught.value.hint
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["NUM_MEMORY_TOKENS_DIR", "KEYBOARD_PATH", "TOKENIZER_DIR", "MONKEY_HOME"])
def test_a_name_that_only_resembles_a_secret_is_read(monkeypatch, name):
    monkeypatch.setenv(name, "8")
    assert "8" == text(f"{{{{ env('{name}') }}}}")


def test_variables_of_the_environment_reach_imported_macros():
    environment = ConfigEnvironment(variables={"project_dir": "/p"})
    source = "-- import 'm' as m\n== m.f()\n#--- m ---\n-- macro f()\n{{ project_dir }}\n-- endmacro\n"
    assert "/p" == render_text(environment, source).text.strip()


def test_a_lazy_mapping_is_asked_only_for_what_is_read():
    class Versions(dict):
        asked = []

        def __getitem__(self, key):
            self.asked.append(key)
            return f"{key}-1"

    versions = Versions(torch=None, numpy=None)
    assert "torch-1 numpy-1" == text("{{ versions.torch }} {{ versions['numpy'] }}", versions=versions)
    assert ["torch", "numpy"] == Versions.asked


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "null"),
        (True, "true"),
        (3, "3"),
        (1e-3, "0.001"),
        (1e16, "1e+16"),
        (float("inf"), ".inf"),
        ("plain", "plain"),
        ("a/b.c-d", "a/b.c-d"),
        ("yes", '"yes"'),
        ("null", '"null"'),
        ("none", '"none"'),
        ("1", '"1"'),
        ("", '""'),
        ("a: b", '"a: b"'),
        ("two\nlines", '"two\\nlines"'),
        ("{{ x }}", '"{{ x }}"'),
        ([1, (2, "x y")], '[1, [2, "x y"]]'),
        ({"a": {"b": []}, 1: {}}, "{a: {b: []}, 1: {}}"),
    ],
)
def test_toyaml_writes_one_line(value, expected):
    assert expected == text("{{ value | toyaml }}", value=value)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(PLAIN)
def test_what_toyaml_writes_reads_back_equal(value):
    written = toyaml(value)
    assert "\n" not in written
    read = YAML(typ="safe", pure=True).load(f"k: {written}\nlast: [{written}, {written}]\n")
    assert {"k": value, "last": [value, value]} == read


def test_toyaml_reads_undefined_as_its_default_only():
    assert "3" == text("{{ lr | toyaml(3) }}")
    assert "null" == text("{{ lr | toyaml(none) }}")
    with pytest.raises(RenderError, match="'lr' is not defined"):
        text("{{ lr | toyaml }}")


@pytest.mark.parametrize("value", [object(), {"a": {1, 2}}, {(1, 2): 3}, "\ud800", b"x"])
def test_toyaml_refuses_what_is_not_plain(value):
    with pytest.raises(RenderError, match="'toyaml' cannot write") as caught:
        text("{{ value | toyaml }}", value=value)
    assert "FG118" == caught.value.code


def from_yaml(written, expression, form=""):
    return text(f"-- set read\n{written}\n-- endset\n{{{{ (read | fromyaml{form}){expression} }}}}\n").strip()


@pytest.mark.parametrize(
    ("written", "expression", "expected"),
    [
        ("lora: {r: 64, names: [q, 'v w']}", ".lora.names[1]", "v w"),
        ("rate: 2.0e-4", ".rate + 1", "1.0002"),
        ("fsdp:\n  on: true\n  off: no", ".fsdp", "{'on': True, 'off': 'no'}"),
        ("", " is none", "True"),
    ],
)
def test_fromyaml_reads_plain_data(written, expression, expected):
    assert expected == from_yaml(written, expression)


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_fromyaml_reads_back_what_toyaml_writes(value):
    assert toyaml(value) == text("{{ written | fromyaml | toyaml }}", written=toyaml(value))


@pytest.mark.parametrize(
    ("written", "line", "message"),
    [
        ("a: 1\nb: !call:dict", 3, "a tag"),
        ("a: &x 1\nb: *x", 2, "an anchor"),
        ("a: 1\nb: 2\na: 3", 4, "'a' is written twice"),
        ("a: {<<: {b: 1}}", 2, "cannot be a key"),
        ("a: 2020-01-01", 2, "timestamp"),
        ("a: 1\n b: [", 3, "not YAML"),
    ],
)
def test_fromyaml_refuses_what_is_not_data_at_the_line_that_wrote_it(written, line, message):
    with pytest.raises(RenderError, match=message) as caught:
        from_yaml(written, "")
    assert ("FG970", line) == (caught.value.code, caught.value.span.line)


def test_fromyaml_reads_texts_only():
    with pytest.raises(RenderError, match="reads a text, and got int") as caught:
        text("{{ 3 | fromyaml }}")
    assert "FG970" == caught.value.code
    with pytest.raises(RenderError, match="'missing' is not defined"):
        text("{{ missing | fromyaml }}")


@pytest.mark.parametrize(
    ("written", "line", "message", "expected"),
    [
        ("a:\n  name: null\n  n: 1", 3, "'name' is empty", "a text"),
        ("a:\n  name: x\n  n: 0", 4, "'n' is 0", "a whole number from 1"),
        ("a:\n  name: x\n  n: [1]", 4, "'n' is a list", "a whole number from 1"),
        ("a:\n  name: x\n  n: {b: 1}", 4, "'n' is a mapping", "a whole number from 1"),
        ("a:\n  name: x", 3, "'a' has no 'n'", "a whole number from 1"),
        ("a: [1]", 2, "'a' is a list", "a mapping with name, n"),
        ("a: ~", 2, "'a' is empty", "a mapping with name, n"),
        ("[]", 2, "the text is a list", "a mapping with a"),
        ("b: 1", 2, "the text has no 'a'", "a mapping with name, n"),
    ],
)
def test_fromyaml_refuses_another_form_at_the_line_that_wrote_it(written, line, message, expected):
    form = "({'a': {'name': 'text', 'n': 'whole from 1'}})"
    with pytest.raises(RenderError) as caught:
        from_yaml(written, "", form)
    assert ("FG952", line, message) == (caught.value.code, caught.value.span.line, caught.value.message)
    assert caught.value.hint.removeprefix("add it: ") == f"expected {expected}"


def test_fromyaml_with_a_form_allows_further_keys_and_refuses_an_empty_text():
    form = "({'a': {'n': 'number from 0', 'names': 'list'}})"
    written = "a: {n: 0.5, names: [x], m: ~}\nb: 1"
    assert from_yaml(written, "") == from_yaml(written, "", form)
    with pytest.raises(RenderError, match="FG952.*the text is empty"):
        from_yaml("", "", form)
