"""Monitors of several ranks: they change no number, count what is sent exactly, and name the rank that is slow."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.callbacks import (
    AnomalyCallback,
    DistributedMonitorCallback,
    JsonLogger,
    MemoryProfiler,
    ResourceMonitorCallback,
    TrainerCallback,
    TrainingMonitor,
)
from forgather.ml.callbacks.rank_monitor import slow_rank
from forgather.ml.distributed.communication import recorded_communication
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.metrics import read_records
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import VOCAB as PIPELINE_VOCAB
from tests.ml.distributed.pipeline_runs import make_llama
from tests.ml.fixtures import Noisy, rows, tiny_llama, weights
from tests.patience import patience, slowness

KINDS = {
    "single": (1, Trainer, TrainingArguments, {}),
    "DDP": (2, AccelTrainer, AccelTrainingArguments, {}),
    "FSDP2": (2, AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "TP": (2, AccelTrainer, AccelTrainingArguments, {"tensor_parallel_size": 2}),
    "pipeline": (
        2,
        PipelineTrainer,
        PipelineTrainingArguments,
        {"schedule_class": "Schedule1F1B", "pipeline_chunks": 2},
    ),
}


def monitors(folder):
    return [
        AnomalyCallback(run_dir=folder),
        JsonLogger(run_dir=folder),
        DistributedMonitorCallback(run_dir=folder),
        ResourceMonitorCallback(),
        TrainingMonitor(log_interval=1, log_dir=folder),
        MemoryProfiler(run_dir=folder),
    ]


def pipeline_rows():
    ids = torch.randint(0, PIPELINE_VOCAB, (21, 10), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(kind, folder, is_watched, resume=None):
    """Returns the losses of each step and the weights of this rank."""
    ranks, trainer_class, arguments_class, settings = KINDS[kind]
    common = {
        "max_steps": 4,
        "logging_steps": 1,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "logging_dir": str(folder / "run"),
    }
    profile = {"profile": {"wait": 1, "warmup": 0, "active": 2}} if is_watched else {}
    trainer = trainer_class(
        make_llama if kind == "pipeline" else (lambda: tiny_llama(attention_dropout=0.1)),
        arguments_class(str(folder), **{**common, **settings, **profile}),
        train_dataset=pipeline_rows() if kind == "pipeline" else Noisy(21),
        callbacks=monitors(folder / "run") if is_watched else [],
        **({} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}),
    )
    trainer.train(resume)
    lines = [(line["step"], line["loss"], line["grad_norm"]) for line in trainer.state.log_history if "loss" in line]
    # The weights of this rank: with FSDP2, its shards.
    own = {
        name: getattr(one, "_local_tensor", one).detach().clone()
        for name, one in trainer.strategy.local.named_parameters()
    }
    return lines, own


def on_ranks(kind, *args):
    ranks = KINDS[kind][0]
    return [trained(kind, *args)] if ranks == 1 else run_ranks(ranks, trained, kind, *args)


@pytest.mark.parametrize("kind", thinned(KINDS, lambda kind: kind == "DDP"))
def test_losses_and_weights_are_bit_identical_with_and_without_monitors(kind, tmp_path):
    plain = on_ranks(kind, tmp_path / "plain", False)
    watched = on_ranks(kind, tmp_path / "watched", True)
    resumed = on_ranks(kind, tmp_path / "watched", True, str(tmp_path / "watched" / "checkpoint-2"))
    for (lines, own), *others in zip(plain, watched, resumed, strict=True):
        assert len(lines) == 4
        for other_lines, other in others:
            assert lines == other_lines
            assert own.keys() == other.keys()
            assert all(torch.equal(own[name], other[name]) for name in own)
    # The monitors did work.
    found = read_records(tmp_path / "watched" / "run" / "ranks.jsonl")
    assert [line["step"] for line in found[:4]] == [1, 2, 3, 4]
    assert all(
        len(line["ranks"]) == KINDS[kind][0] and not any("problem" in rank for rank in line["ranks"]) for line in found
    )
    memory = json.loads((tmp_path / "watched" / "run" / "memory.json").read_text())
    assert set(memory["phases"]) == {"between steps", "forward and backward", "update"}
    assert (tmp_path / "watched" / "run" / "profile" / "trace.json.gz").stat().st_size > 1000


def _traffic():
    """Returns what is counted of traffic whose amount follows from the shapes."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    with recorded_communication() as stats:
        reduced = nn.parallel.DistributedDataParallel(nn.Linear(10, 3))
        for _ in range(2):
            reduced(torch.ones(4, 10)).sum().backward()
        dist.all_reduce(torch.ones(7))
        dist.all_gather([torch.empty(3) for _ in range(2)], torch.ones(3))
        dist.broadcast(torch.ones(2, dtype=torch.float64), src=0)
        if rank == 0:
            dist.send(torch.ones(5), 1)
        else:
            dist.recv(torch.empty(5), 0)
        group = dist.new_group([0, 1], group_desc="mine")
        before = stats.table()
        dist.all_reduce(torch.ones(11), group=group)
        sharded = nn.Linear(8, 4, bias=False)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
        fully_shard(sharded, mesh=mesh)
        sharded(torch.ones(2, 8)).sum().backward()
        whole = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        whole.redistribute(mesh, [Replicate()])
        after = stats.table()
    dist.all_reduce(torch.ones(100))
    assert stats.table() == after, "nothing is counted after the end"
    return before, after


def test_communication_is_counted_exactly_by_group_and_operation():
    for rank, (before, after) in enumerate(run_ranks(2, _traffic, start_group=True)):
        (name,) = [group for group in before if group != "mine"]
        default = before[name]
        # Two backward passes of 33 weights, and 7 numbers.
        assert (default["all_reduce"].count, default["all_reduce"].num_bytes) == (3, 2 * 33 * 4 + 7 * 4)
        way = "send" if rank == 0 else "recv"
        assert (default[way].count, default[way].num_bytes) == (1, 20)
        assert default["all_reduce"].timed == 3 and default["all_reduce"].seconds > 0
        mine = after["mine"]
        assert {operation: (found.count, found.num_bytes) for operation, found in mine.items()} == {
            "all_reduce": (1, 44)
        }
        # The mesh is of all ranks. FSDP2 gathers the half of 32 weights, and reduces 32 gradients; the DTensor gathers 8.
        both = after[name]
        assert both["all_gather"].count - default["all_gather"].count == 2
        assert both["all_gather"].num_bytes - default["all_gather"].num_bytes == 64 + 32
        assert (both["reduce_scatter"].count, both["reduce_scatter"].num_bytes) == (1, 128)


class SlowRank(TrainerCallback):
    """Makes one rank slow in one part of each step."""

    def __init__(self, part, seconds, rank=1):
        self.part, self.seconds, self.rank = part, seconds, rank

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if self.part == "forward_backward_seconds" and args.process_index == self.rank:
            model.register_forward_pre_hook(lambda *_: time.sleep(self.seconds))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.part == "update_seconds" and args.process_index == self.rank:
            time.sleep(self.seconds)


class SlowRows(torch.utils.data.Dataset):
    def __init__(self, is_slow, seconds):
        self.base, self.is_slow, self.seconds = rows(24), is_slow, seconds

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        if self.is_slow:
            time.sleep(self.seconds)
        return self.base[index]


def _with_slow_rank(folder, part, settings, seconds):
    environment = DistributedEnvironment(timeout_seconds=patience(20))
    trainer = AccelTrainer(
        tiny_llama(),
        AccelTrainingArguments(
            str(folder),
            per_device_train_batch_size=2,
            max_steps=8,
            logging_steps=4,
            save_strategy="no",
            use_cpu=True,
            logging_dir=str(folder),
            **settings,
        ),
        train_dataset=SlowRows(part == "data_seconds" and environment.rank == 1, seconds / 2),
        callbacks=[SlowRank(part, seconds), DistributedMonitorCallback(0.2), JsonLogger()],
        distributed_env=environment,
    )
    trainer.train()


@pytest.mark.parametrize(
    ("part", "settings"),
    thinned(
        [
            ("data_seconds", {}),
            ("forward_backward_seconds", {}),
            ("update_seconds", {}),
            ("forward_backward_seconds", {"fsdp": "full_shard"}),
        ],
        lambda part, settings: not settings,
    ),
)
def test_a_slow_rank_is_named_with_the_part_in_which_it_is_slow(part, settings, tmp_path):
    # On a machine with other work, a rank that waits for a processor is slow as well.
    run_ranks(2, _with_slow_rank, tmp_path, part, settings, 0.03 * slowness())
    found = [line for line in read_records(tmp_path / "metrics.jsonl") if line.get("event") == "straggler"]
    assert [(line["rank"], line["part"]) for line in found] == [(1, part)]
    assert found[0]["value"] > 0.02


def figures(rank, data=0.01, forward=0.1, update=0.01, sync=0.0, communication=0.0):
    return {
        "rank": rank,
        "data_seconds": data,
        "forward_backward_seconds": forward,
        "update_seconds": update,
        "sync_seconds": sync,
        "communication_seconds": communication,
    }


def test_ranks_of_equal_speed_have_no_slow_one():
    assert slow_rank([figures(0), figures(1, forward=0.105)], 0.1) is None
    # The rank that waits in collectives is not the slow one.
    waits = figures(0, forward=0.3, communication=0.2)
    assert slow_rank([waits, figures(1, forward=0.3, communication=0.01)], 0.1)[:2] == (1, "forward_backward_seconds")
    assert slow_rank([figures(0)], 0.1) is None


def test_weights_of_a_fixture_differ_after_training(tmp_path):
    """The negative control of bit identity: other rows give other weights."""
    _, own = trained("single", tmp_path / "a", False)
    assert any(not torch.equal(own[name], start) for name, start in weights(tiny_llama()).items())
