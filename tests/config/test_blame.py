"""Blame: every way in which a value gets its place."""

import pytest

from forgather.config.blame import blame
from forgather.config.environment import ConfigEnvironment
from forgather.config.load import load
from forgather.config.path import format_path
from forgather.config.render import render


@pytest.fixture
def blamed(tmp_path):
    """Gives a function that loads `main` and returns path -> [(text, file:line), ...], now first."""

    def run(**files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        graph = load(render(ConfigEnvironment(searchpath=(str(tmp_path),)), "main"))
        return {format_path(item.path): [place(tmp_path, w) for w in (item.now, *item.was)] for item in blame(graph)}

    return run


def place(folder, writing):
    span = writing.origin.span
    return writing.text, f"{span.file.removeprefix(f'{folder}/')}:{span.line}"


def test_a_value_is_blamed_on_its_line_and_remembers_each_it_replaced(blamed):
    found = blamed(
        base="-- block args\nargs:\n  lr: 1\n  wd: 0\n-- endblock\n",
        project="-- extends 'base'\n[args]\n== super()\n  lr: 2\n",
        main="-- extends 'project'\n\n[args]\n== super()\n  lr: 3\n",
    )
    assert [("3", "main:5"), ("2", "project:4"), ("1", "base:3")] == found["args.lr"]
    assert [("0", "base:4")] == found["args.wd"]


def test_a_value_inside_a_replaced_container_remembers_what_stood_at_its_path(blamed):
    found = blamed(
        base="-- block args\nargs:\n  betas: [0.8, 0.99]\n-- endblock\n",
        main="-- extends 'base'\n[args]\n== super()\n  betas: [0.9, 0.95, 1]\n",
    )
    assert [("[0.9, 0.95, 1]", "main:4"), ("[0.8, 0.99]", "base:3")] == found["args.betas"]
    assert [("0.9", "main:4"), ("0.8", "base:3")] == found["args.betas[0]"]
    assert [("1", "main:4")] == found["args.betas[2]"]
