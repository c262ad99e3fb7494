"""What a terminal gets that a file does not: short paths, the width of the window, and colors of reference pages."""

import io
import tempfile
from pathlib import Path

import pytest

from forgather.cli.main import main
from forgather.cli.palette import hang_of_reference, paint_reference, styled
from tests.project.workbench import make_project


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def folder():
    # A short name: a path that is too long for its line is cut before it is shortened.
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def screen(folder, monkeypatch):
    """Returns a function that runs a command and returns what it prints on a terminal of this width, without colors."""
    text = f"main: !partial:builtins:print\n  file: {folder}/bench/data/rows.txt\n  long: {'x' * 100}\n"
    files = {"templates/configs/a.yaml": text, "templates/configs/b.yaml": text.replace("rows", "others")}
    monkeypatch.chdir(make_project(folder / "bench", files))
    monkeypatch.setenv("NO_COLOR", "1")

    def run(width, *arguments):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr("sys.stdout", stream := Terminal())
        main(list(arguments))
        return stream.getvalue()

    return run


def test_a_graph_uses_the_width_of_the_window(screen):
    assert "x" * 100 in screen(160, "-t", "a", "graph")
    assert "x" * 80 not in screen(90, "-t", "a", "graph")


@pytest.mark.parametrize("command", [["-t", "a", "graph"], ["-t", "a", "blame", "main.file"], ["diff", "a", "b"]])
def test_paths_in_values_are_relative_to_the_project_on_a_terminal_only(screen, folder, command):
    assert "data/rows.txt" in (shown := screen(160, *command))
    assert str(folder) not in shown


def test_a_file_gets_whole_paths(screen, folder):
    screen(160, "-t", "a", "graph", "-o", "graph.txt")

    assert f"'{folder}/bench/data/rows.txt'" in (folder / "bench" / "graph.txt").read_text()


@pytest.mark.parametrize(
    ("line", "painted", "hang"),
    [
        ("trainer_args.seed: int = 42", styled("strong", "trainer_args.seed: int = 42"), 0),
        ("read by      trainer.py", f"{styled('key', 'read by      ')}trainer.py", 13),
        ("  [optimizer]  AdamW.", f"{styled('key', '  [optimizer]  ')}AdamW.", 15),
        ("  [meta]", styled("key", "  [meta]"), 8),
        ("blocks:", styled("strong", "blocks:"), 0),
        ("    lr: 1", f"    {styled('key', 'lr')}: 1", 4),
        ("Of the default optimizer.", "Of the default optimizer.", 0),
    ],
)
def test_the_page_of_a_setting_has_colors(line, painted, hang):
    assert (painted, hang) == (paint_reference(line), hang_of_reference(line))
