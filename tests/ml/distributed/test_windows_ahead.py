"""Windows that are copied to a device ahead keep their own counts of tokens and rows, summed over all ranks."""

import contextlib
import itertools
from types import SimpleNamespace

import torch

from forgather.interrupt import Interrupt
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.host_reads import reads_forbidden
from forgather.ml.strategy.fsdp2 import Sharded
from forgather.ml.trainer.device_copies import copied_ahead
from forgather.ml.trainer.synchronization import RunSync
from forgather.ml.types import Window
from tests.ml.distributed.gang import run_ranks
from tests.patience import patience


class Stream:
    """A stream of a CPU, on which nothing is late."""

    def __init__(self, device=None):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def record_event(self):
        return None

    def wait_event(self, event):
        pass


def counts_of_steps(looks_ahead, is_late):
    environment = DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))
    strategy = Sharded(environment, Layout(data_parallel_size=2, shard_size=2), use_cpu=True)
    sync = RunSync(strategy, Interrupt())
    rank = strategy.topology.rank
    own = (
        Window(batches=[], num_valid=one + 1, num_tokens=10 * one + rank, num_rows=one, num_unpadded=one + 5)
        for one in range(5)
    )
    streams = SimpleNamespace(Stream=Stream, accelerator=SimpleNamespace(current_stream=Stream))
    found = []
    windows = sync.windows(own, has_length=True)
    with reads_forbidden() if is_late else contextlib.nullcontext():
        for window in copied_ahead(windows, strategy.topology.device, streams=streams) if is_late else windows:
            sync.step(torch.zeros(()), looks_ahead=looks_ahead)
            sync.set_host_counts(window)
            found.append((float(window.num_valid), window.num_tokens, window.num_rows, window.num_unpadded))
    return found


def every():
    ways = itertools.product((False, True), repeat=2)
    return [counts_of_steps(looks_ahead, is_late) for looks_ahead, is_late in ways]


def test_each_window_has_its_own_counts():
    expected = [(2.0 * one + 2, 20 * one + 1, 2 * one, 2 * one + 10) for one in range(5)]
    for found in itertools.chain(*run_ranks(2, every)):
        assert expected == found
