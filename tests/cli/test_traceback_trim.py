"""An exception of a run shows the line of the user's own file, however deep a library was when it was raised."""

import json

import pytest

from forgather.cli.traceback_trim import crash_lines
from forgather.project.path_display import Display

OWN = """\
import json


def load(text):
    return json.loads(text)


def collate(rows):
    return [load(row) for row in rows]
"""


def test_the_line_of_an_own_file_is_shown_beside_the_innermost_ones(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    names = {}
    exec(compile(OWN, str(file), "exec"), names)
    with pytest.raises(json.JSONDecodeError) as caught:
        names["collate"](["{"])
    lines = crash_lines(caught.value, Display(str(tmp_path)), place=lambda span, display: [])
    shown = [line.strip() for line in lines]
    assert any("own.py:5 in load" in line for line in shown)
    assert "return json.loads(text)" in shown
    assert 3 == sum(" in " in line and ".py:" in line for line in shown)
