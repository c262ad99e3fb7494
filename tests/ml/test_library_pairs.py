"""Quantized models and optimizers of bitsandbytes with settings that save memory: recorded distances from a plain loop."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECORD = json.loads((ROOT / "tests/ml/recorded/library_pairs.json").read_text())


def test_the_record_is_of_the_versions_that_are_tested():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("torch", "transformers", "peft"):
        assert pinned[name] == RECORD["versions"][name].partition("+")[0]


def test_quantized_models_equal_a_plain_loop_with_every_setting_that_is_accepted():
    assert {"nf4", "int8"} == RECORD["quantized"].keys()
    for figures in RECORD["quantized"].values():
        size = figures.pop("size of the adapter")
        assert len(figures) >= 6
        assert max(figures.values()) <= 1e-6 < size


def test_an_optimizer_of_bitsandbytes_has_its_bits_in_the_backward_pass():
    steps = RECORD["stepped in the backward pass"]
    assert len(steps) == 8
    assert set(steps.values()) == {0.0}
