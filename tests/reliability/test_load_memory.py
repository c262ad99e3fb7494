"""A rank reads what lies on it: the memory that loading takes is bounded by its own part, not by the whole state."""

import gc
import time
from pathlib import Path

import torch
from torch import nn

from forgather.ml.distributed.layout import Layout
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.fsdp2 import Sharded
from forgather.ml.strategy.fsdp_config import Sharding
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import adamw, environment
from tests.ml.distributed.states import read, restore, write

RANKS, MIB = 4, 1 << 20


class Wide(nn.Module):
    """Weights of 5.3 MiB each."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1365, bias=False) for _ in range(count))


def _sharded(count):
    layout = Layout(data_parallel_size=RANKS, shard_size=RANKS)
    strategy = Sharded(environment(), layout, sharding=Sharding(wrap="none"), use_cpu=True)
    make = {"make_model": lambda: Wide(count), "make_rule": lambda model: None, "make_optimizer": adamw}
    strategy.build(Recipe(**make, model_is_made_anew=True))
    strategy.build_optimizer()
    return strategy


def _save(folder, count):
    strategy = _sharded(count)
    for weight in strategy.model.parameters():
        weight.grad = torch.ones_like(weight)
    strategy.optimizer.step()
    write(strategy.capture(), folder)


def _load(folder, count, whole):
    """Returns the memory that loading took at its highest, file pages included, and its seconds."""
    strategy = _sharded(count)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, began = _resident("VmRSS"), time.perf_counter()
    kept = read(folder) if whole else None
    restore(strategy, folder)
    del kept
    return _resident("VmHWM") - before, time.perf_counter() - began


def _resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_a_rank_needs_memory_for_its_own_part_alone(tmp_path, full, figure):
    count = 64 if full else 8
    run_ranks(RANKS, _save, tmp_path, count, timeout=240)
    total = sum(file.stat().st_size for file in tmp_path.iterdir())
    peak, seconds = map(max, zip(*run_ranks(RANKS, _load, tmp_path, count, False, timeout=240), strict=True))
    # The moments, once as pages of the file and once in place; of the weights the pages of the file.
    assert peak < 2 * total / RANKS + 32 * MIB
    if full:
        all_of_it, longer = map(max, zip(*run_ranks(RANKS, _load, tmp_path, count, True, timeout=240), strict=True))
        figure(
            "load",
            f"loading {total / MIB:.0f} MiB on {RANKS} ranks of FSDP2: at most {peak / MIB:.0f} MiB a rank in "
            f"{seconds:.1f} s; whole on each rank {all_of_it / MIB:.0f} MiB in {longer:.1f} s",
        )
