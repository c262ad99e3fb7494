"""Templates come from the declared folders, and a file that is no template is a located error."""

import os

import pytest

from forgather.config.environment import ConfigEnvironment
from forgather.config.render import render, render_text
from forgather.errors import ForgatherError, RenderError, SyntaxFault

OUTSIDE = [
    "../secret.yaml",
    "a/../../secret.yaml",
    "a/../../../secret.yaml",
    "..",
    "../",
    "./../secret.yaml",
    "/etc/passwd",
    "//etc/passwd",
    "~/secret.yaml",
    "~root/secret.yaml",
    "a\\..\\secret.yaml",
    "..\\secret.yaml",
    "C:/secret.yaml",
    "file:///etc/passwd",
    "file:secret.yaml",
    "http://localhost/secret.yaml",
    "secret.yaml\x00.yaml",
    "\nsecret.yaml",
    "a\tb",
    "\x7f",
    "",
    ".",
    "./",
    "a/..",
    "x" * 2000,
    "link.yaml",
    "folder_link/secret.yaml",
]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "secret.yaml").write_text("secret: 1\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret.yaml").write_text("secret: 1\n")
    root = tmp_path / "root"
    (root / "a").mkdir(parents=True)
    (root / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (root / "folder_link").symlink_to(tmp_path / "elsewhere")
    return root


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize(
    "text",
    [
        "-- include target",
        "\n-- extends target",
        "-- import target as x",
        "-- include 'sub'\n#--- sub ---\n-- include target",
    ],
)
def test_a_name_that_leads_out_is_refused_at_its_line(root, name, text):
    environment = ConfigEnvironment(searchpath=(str(root),))
    with pytest.raises(RenderError, match="is not a template name|is a link to a file outside") as caught:
        render_text(environment, text, variables={"target": name})
    assert ("FG114", "<string>", text.count("\n") + 1) == (
        caught.value.code,
        caught.value.span.file,
        caught.value.span.line,
    )


def test_the_case_of_a_name_matters(root):
    (root / "plain.yaml").write_text("a: 1")
    if os.path.exists(root / "PLAIN.yaml"):
        pytest.skip("the file system does not tell cases apart")
    with pytest.raises(RenderError, match="there is no template 'PLAIN.yaml'") as caught:
        render(ConfigEnvironment(searchpath=(str(root),)), "PLAIN.yaml")
    assert "plain.yaml" in caught.value.hint


def test_a_link_inside_the_roots_is_followed(root, tmp_path):
    environment = ConfigEnvironment(searchpath=(str(root), str(tmp_path / "elsewhere")))
    assert "secret: 1" == render(environment, "folder_link/secret.yaml").text


def test_the_first_folder_wins(root, tmp_path):
    (root / "secret.yaml").write_text("mine: 1")
    environment = ConfigEnvironment(searchpath=(str(root), str(tmp_path / "elsewhere")))
    assert "mine: 1" == render(environment, "secret.yaml").text


def test_a_template_extends_the_one_of_its_own_name_further_out(root, tmp_path):
    (root / "secret.yaml").write_text("-- extends 'secret.yaml'\n[b]\nb: 2\n")
    (tmp_path / "elsewhere" / "secret.yaml").write_text("-- block b\n-- endblock\na: 1\n")
    environment = ConfigEnvironment(searchpath=(str(root), str(tmp_path / "elsewhere")))
    assert "b: 2\na: 1" == render(environment, "secret.yaml").text


def test_a_missing_template_is_reported_where_it_is_asked_for(root):
    (root / "trainer.yaml").write_text("a: 1")
    with pytest.raises(RenderError, match="there is no template 'trianer.yaml'") as caught:
        render_text(ConfigEnvironment(searchpath=(str(root),)), "-- if true\n-- extends 'trianer.yaml'\n-- endif\n")
    assert ("FG112", 2) == (caught.value.code, caught.value.span.line)
    assert f"did you mean 'trainer.yaml'? looked in {root}" == caught.value.hint


@pytest.mark.parametrize(
    ("data", "code", "line", "message"),
    [
        (b"", "FG107", 1, "is empty"),
        (b"  \n\n", "FG107", 1, "is empty"),
        (b"a: 1\n\x00\x01\x02", "FG106", 2, "is a binary file"),
        (b"\x7fELF\x02\x01\x00", "FG106", 1, "is a binary file"),
        (b"a: 1\nb: \xff\xfe\n", "FG106", 2, "is not UTF-8: byte 0xff on line 2"),
        ("a: é".encode("latin-1"), "FG106", 1, "is not UTF-8"),
        (b"a: \xed\xa0\x80", "FG106", 1, "is not UTF-8"),
    ],
)
def test_a_file_that_is_no_text_is_a_located_error(root, data, code, line, message):
    (root / "bad.yaml").write_bytes(data)
    with pytest.raises(ForgatherError, match=message) as caught:
        render(ConfigEnvironment(searchpath=(str(root),)), "bad.yaml")
    assert (code, str(root / "bad.yaml"), line) == (caught.value.code, caught.value.span.file, caught.value.span.line)


def test_a_folder_is_no_template(root):
    with pytest.raises(RenderError, match="cannot be read: it is a folder") as caught:
        render_text(ConfigEnvironment(searchpath=(str(root),)), "x\n-- include 'a'\n")
    assert ("FG115", 2) == (caught.value.code, caught.value.span.line)


def test_a_pipe_is_no_template(root):
    os.mkfifo(root / "pipe.yaml")
    with pytest.raises(RenderError, match="is not a regular file"):
        render(ConfigEnvironment(searchpath=(str(root),)), "pipe.yaml")


@pytest.mark.skipif(hasattr(os, "getuid") and os.getuid() == 0, reason="root reads every file")
def test_a_file_without_permission_is_a_located_error(root):
    (root / "closed.yaml").write_text("a: 1")
    os.chmod(root / "closed.yaml", 0)
    with pytest.raises(RenderError, match="Permission denied"):
        render(ConfigEnvironment(searchpath=(str(root),)), "closed.yaml")


def test_a_broken_link_is_a_located_error(root):
    (root / "broken.yaml").symlink_to(root / "nowhere")
    with pytest.raises(RenderError, match="is not a regular file"):
        render(ConfigEnvironment(searchpath=(str(root),)), "broken.yaml")


@pytest.mark.parametrize(
    "data", [b"-- set x = 1\r\na: {{ x }}\r\n[b]\r\nc: 2\r\n", b"\xef\xbb\xbf-- set x = 1\na: {{ x }}\n[b]\nc: 2\n"]
)
def test_windows_line_ends_and_byte_order_marks_are_read(root, data):
    (root / "dos.yaml").write_bytes(data)
    assert "a: 1\nc: 2\n" == render(ConfigEnvironment(searchpath=(str(root),)), "dos.yaml").text


@pytest.mark.parametrize(
    ("files", "message", "place"),
    [
        ({"main": "-- extends 'main'\n"}, "'main' extends itself", ("main", 1)),
        (
            {"main": "-- extends 'b'\n", "b": "x\n-- extends 'main'\n"},
            "'main' extends itself through other templates",
            ("b", 2),
        ),
        (
            {"main": "-- extends 'b'\n", "b": "-- extends 'c'\n", "c": "-- extends 'b'\n"},
            "'b' extends itself through other templates",
            ("c", 1),
        ),
        ({"main": "-- include 'b'\n", "b": "x\n-- include 'main'\n"}, "is included inside itself", None),
        ({"main": "-- include 'main'\n"}, "is included inside itself", ("main", 1)),
        ({"main": "-- include 's'\n#--- s ---\nx\n-- include 's'\n"}, "'s' is included inside itself", ("main", 4)),
        ({"main": "-- import 'main' as m\n"}, "import|themselves|inside itself", ("main", 1)),
    ],
)
def test_circles_are_located_errors(root, files, message, place):
    for name, text in files.items():
        (root / name).write_text(text)
    with pytest.raises(RenderError, match=message) as caught:
        render(ConfigEnvironment(searchpath=(str(root),)), "main")
    assert caught.value.code in ("FG113", "FG123")
    if place:
        assert place == (os.path.basename(caught.value.span.file), caught.value.span.line)


def test_the_way_to_an_error_is_told(root):
    (root / "main").write_text("-- extends 'base'\n")
    (root / "base").write_text("a: 1\n-- include 'part'\n")
    (root / "part").write_text("\nb: {{ nope }}\n")
    with pytest.raises(RenderError) as caught:
        render(ConfigEnvironment(searchpath=(str(root),)), "main")
    assert (str(root / "part"), 2) == (caught.value.span.file, caught.value.span.line)
    assert ("config main, extends base (main:1), includes part (base:2)",) == caught.value.context


def test_an_error_in_a_sub_template_has_the_line_of_the_file(root):
    (root / "main").write_text("-- include 'sub'\n\n#--- sub ---\nx: 1\n-- iff\n")
    with pytest.raises(SyntaxFault) as caught:
        render(ConfigEnvironment(searchpath=(str(root),)), "main")
    assert (str(root / "main"), 5) == (caught.value.span.file, caught.value.span.line)
    assert ("config main, includes sub (main:1)",) == caught.value.context
