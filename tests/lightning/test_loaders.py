"""A loader keeps its options when ranks get samplers of their own rows."""

import inspect

import pytest
import torch
from torch.utils.data import DataLoader

from forgather.lightning.loaders import prepared
from forgather.ml.types import Topology
from tests.lightning import scripts

# What each option is for a loader that has another value than the default.
OPTIONS = {
    "batch_size": 3,
    "num_workers": 2,
    "collate_fn": list,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 30.0,
    "worker_init_fn": print,
    "multiprocessing_context": "spawn",
    "generator": torch.Generator(),
    "prefetch_factor": 5,
    "persistent_workers": True,
    "in_order": False,
    "pin_memory_device": "cpu",
}
# The order of the rows is that of the new sampler.
ORDER = {"dataset", "shuffle", "sampler", "batch_sampler"}


def test_the_options_are_all_of_torchs_loader():
    assert set(inspect.signature(DataLoader).parameters) - ORDER <= set(OPTIONS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stage", ["train", "predict"])
def test_a_loader_with_another_sampler_keeps_every_option(stage):
    given = {name: value for name, value in OPTIONS.items() if name in inspect.signature(DataLoader).parameters}
    loader = DataLoader(scripts.rows(), **given)
    found = prepared(loader, stage, Topology(1, 2, torch.device("cpu"), is_writer=False, dp_rank=1, dp_size=2))
    assert found is not loader
    assert len(found.sampler) == 15
    for name in given:
        assert getattr(loader, name) == getattr(found, name), name
