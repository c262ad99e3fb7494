"""First weights at size: what a process holds while it gets its slices or waits for a checkpoint, and no files."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig

from forgather.ml.models import from_config
from forgather.ml.strategy.initial_weights import make_initial_weights
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.test_initial import recipe_of, started

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
"""220 million parameters."""


def make(**changes):
    return from_config(LlamaConfig(**SIZES | changes), seed=3)


def _memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def peak(changes, fills, is_resumed=None):
    """Returns how far the memory of this rank rises while it gets its slices, and the bytes of the slices."""
    topology = started()
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    recipe = replace(recipe_of(lambda: make(**changes), fills=fills), is_resumed=is_resumed)
    weights = make_initial_weights(recipe, topology)
    model = weights.on_meta()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    weights.fill(model)
    held = sum(tensor.to_local().nbytes for tensor in model.parameters())
    return _memory("VmHWM") - before, held


@pytest.mark.matrix
def test_a_rank_holds_little_more_than_its_slices_of_220_million_parameters(record_property):
    found = run_ranks(4, peak, {}, "counter", timeout=120)
    record_property("of_its_shard", max(rise / held for rise, held in found))
    for rise, held in found:
        assert 215e6 < held < 225e6
        assert rise <= 1.3 * held


@pytest.mark.matrix
def test_a_rank_holds_its_slices_alone_before_a_resume(record_property):
    found = run_ranks(4, peak, {}, "sequential", lambda: True, timeout=120)
    record_property("of_its_shard", max(rise / held for rise, held in found))
    for rise, held in found:
        assert rise <= 1.3 * held
    # Without a checkpoint, one rank makes the whole model.
    assert max(rise / held for rise, held in run_ranks(4, peak, {}, "sequential", timeout=300)) > 3


def files(changes, fills, is_resumed=None):
    """Returns the files and folders that were made in the temporary folder while this rank got its slices."""
    made = []
    mkdtemp = tempfile.mkdtemp
    tempfile.mkdtemp = lambda *args, **kwargs: made.append(kwargs) or mkdtemp(*args, **kwargs)
    peak(changes, fills, is_resumed)
    return len(made)


@pytest.mark.parametrize(("fills", "expected"), [("counter", [0, 0]), ("sequential", [1, 0])])
def test_no_file_is_written(fills, expected):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 64}
    assert expected == run_ranks(2, files, small, fills)
    assert [0, 0] == run_ranks(2, files, small, fills, lambda: True)
