"""The generated pages are what the sources say, and every setting and template says what it is for."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from forgather.project.reference import LibraryTemplate, argument_meanings, settings, template_page, templates

ROOT = Path(__file__).parents[2]


def test_the_pages_are_those_that_the_sources_give():
    command = [sys.executable, str(ROOT / "scripts/write_reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stdout + done.stderr)


def test_every_setting_has_a_meaning_and_a_reader():
    assert [] == [name for name, one in settings().items() if not (one.meaning and one.read_by and one.values)]


def test_the_settings_are_those_of_the_classes():
    ml = pytest.importorskip("forgather.ml")
    arguments = ml.TrainingArguments, ml.AccelTrainingArguments, ml.PipelineTrainingArguments
    declared = {field.name for one in arguments for field in fields(one)}
    assert declared == set(settings())
    defaults = {field.name: field.default for one in arguments for field in fields(one)}
    told = {name: eval(one.default) for name, one in settings().items()}
    assert defaults == told


def test_every_template_says_what_it_is_for():
    assert [] == [one.name for one in templates().values() if not one.about]


def test_a_template_shows_how_it_is_used():
    assert "[raw_dataset]\n        -- include 'datasets/json_lines.yaml'" in template_page(
        templates()["datasets/json_lines.yaml"]
    )
    assert "-- extends 'trainers/trainer.yaml'" in template_page(templates()["trainers/trainer.yaml"])
    assert isinstance(templates()["trainers/base.yaml"], LibraryTemplate)


def test_a_block_has_the_comment_that_stands_above_it():
    assert templates()["trainers/base.yaml"].blocks["dynamic_args"].startswith("Options of ")


def test_meanings_end_with_their_section():
    text = "Runs.\n\nArgs:\n    a, b: sizes\n        in bytes.\n    c: x.\n\nRaises:\n    X: y."
    assert {"a": "sizes in bytes.", "b": "sizes in bytes.", "c": "x."} == argument_meanings(text)
