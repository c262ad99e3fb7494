"""`calculate_resources`, and the page that compares published tables with the formulas."""

import subprocess
import sys
from pathlib import Path

import pytest

from forgather.errors import PlanError
from forgather.planner.model_shapes import model_shape
from forgather.planner.resources import calculate_resources

ROOT = Path(__file__).parents[2]


def test_the_parts_grow_as_they_should():
    small, long = calculate_resources(7e9, 1024, 1), calculate_resources(7e9, 2048, 1)
    assert pytest.approx(16 * 7) == small["model_gb"] + small["gradient_gb"] + small["optimizer_gb"]
    assert pytest.approx(2 * small["activation_gb"]) == long["activation_gb"]
    assert calculate_resources(7e9, 2048, 2)["activation_gb"] == pytest.approx(2 * long["activation_gb"])
    # The rule of thumb counts each weight for each token, and is too large by a factor of thousands.
    assert 57_344 == long["rule_of_thumb_gb"] > 2000 * long["activation_gb"]
    assert small["total_gb"] > 112


def test_a_known_number_of_parameters_is_that_model():
    shape = model_shape("llama-2-13b")
    assert "huggyllama/llama-13b" == calculate_resources(shape.parameters, 2048, 1)["like"]


@pytest.mark.parametrize("wrong", [{"model_params": 0}, {"sequence_length": "2048"}, {"batch_size": float("nan")}])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(PlanError, match=f"FG998.*{next(iter(wrong))} is "):
        calculate_resources(**{"model_params": 7e9, "sequence_length": 2048, "batch_size": 1, **wrong})


def test_the_page_of_published_tables_is_what_its_script_writes():
    subprocess.run([sys.executable, "scripts/write_seed_tables.py", "--check"], cwd=ROOT, check=True)
