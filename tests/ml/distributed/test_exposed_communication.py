"""Exposed communication: known delays are found, hidden ones are not, and only the measured steps are recorded."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.argument_values import ArgumentValueError
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.exposed_communication import ExposedCommunication, Recorded, exposed_seconds
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import make_llama
from tests.ml.distributed.test_monitors import pipeline_rows
from tests.ml.fixtures import Noisy, tiny_llama
from tests.patience import patience

DELAY = 0.2
CPU = torch.device("cpu")


def _waiting(values):
    dist.all_reduce(values)


def _receiving(values):
    if dist.get_rank() == 0:
        dist.recv(values, 1)
    else:
        dist.send(values, 0)


def _hidden(values):
    work = dist.all_reduce(values, async_op=True)
    matrix = torch.ones(400, 400)
    while dist.get_rank() == 0 and not work.is_completed():
        matrix = torch.mm(matrix, matrix).clamp_(max=1)
    work.wait()


def _measured():
    """Returns the exposed seconds on this rank, if rank 1 communicates later, by the way of communicating."""
    found = {}
    for way in (_waiting, _receiving, _hidden):
        measured = ExposedCommunication(True, CPU, several=True)
        measured.begin_step()
        measured.end_step()
        assert measured.metrics() == {}, "the first step is not measured"
        dist.barrier()
        measured.begin_step()
        began = time.perf_counter()
        if dist.get_rank() == 1:
            time.sleep(DELAY)
        way(torch.ones(1000))
        seconds = time.perf_counter() - began
        measured.end_step()
        found[way.__name__] = measured.metrics()["communication_share"] * seconds
    return found


def test_a_delay_is_found_where_a_rank_waits_and_not_where_it_computes():
    waits, is_late = run_ranks(2, _measured, start_group=True)
    for way in ("_waiting", "_receiving"):
        assert waits[way] > 0.9 * DELAY
        assert is_late[way] < 0.5 * DELAY
    assert waits["_hidden"] < 0.5 * DELAY


KINDS = {
    "DDP": (AccelTrainer, AccelTrainingArguments, {}),
    "FSDP2": (AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "TP": (AccelTrainer, AccelTrainingArguments, {"tensor_parallel_size": 2}),
    "context parallel": (AccelTrainer, AccelTrainingArguments, {"context_parallel_size": 2}),
    "pipeline": (PipelineTrainer, PipelineTrainingArguments, {"schedule_class": "Schedule1F1B", "pipeline_chunks": 2}),
}
STEPS = 6


class Steps(TrainerCallback):
    """Makes rank 1 late by a delay in each step, and records in which steps torch's profiler runs."""

    def __init__(self):
        self.profiled = []

    def on_init_end(self, args, state, control, model=None, **kwargs):
        if args.process_index == 1:
            model.register_forward_pre_hook(lambda *_: time.sleep(DELAY))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if torch.autograd._profiler_enabled():
            self.profiled.append(state.global_step + 1)


def trained(kind, folder, share):
    trainer_class, arguments_class, settings = KINDS[kind]
    seen = Steps()
    trainer = trainer_class(
        make_llama if kind == "pipeline" else tiny_llama,
        arguments_class(
            str(folder),
            max_steps=STEPS,
            logging_steps=2,
            save_strategy="no",
            per_device_train_batch_size=2,
            use_cpu=True,
            communication_share=share,
            logging_dir=str(folder / "run"),
            **settings,
        ),
        train_dataset=pipeline_rows() if kind == "pipeline" else Noisy(24),
        callbacks=[seen],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20)),
    )
    trainer.train()
    return [line for line in trainer.state.log_history if "loss" in line], seen.profiled


@pytest.mark.parametrize("kind", thinned(KINDS, lambda kind: kind == "FSDP2"))
def test_log_lines_have_the_share_of_the_steps_that_are_measured(kind, tmp_path):
    plain = run_ranks(2, trained, kind, tmp_path / "plain", False)
    measured = run_ranks(2, trained, kind, tmp_path / "measured", 2)
    for (lines, profiled), (others, not_profiled) in zip(measured, plain, strict=True):
        # One step for two lines, and never the first step.
        assert (profiled, not_profiled) == ([2, 5], [])
        assert [True, False, True] == ["communication_share" in line for line in lines]
        assert [line["loss"] for line in others] == [line["loss"] for line in lines]
        assert not any("communication_share" in line for line in others)
    if kind != "pipeline":
        # Rank 0 waits for the other one; each step of it takes about the delay.
        (waits, _), (is_late, _) = measured
        assert waits[2]["communication_share"] > is_late[2]["communication_share"] + 0.2
        assert waits[2]["communication_share"] / waits[2]["steps_per_second"] > 0.8 * DELAY


def test_a_single_process_has_no_share(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=3, logging_steps=1, use_cpu=True, communication_share=True)
    trainer = Trainer(tiny_llama, args, train_dataset=Noisy(24))
    trainer.train()
    assert not any("communication_share" in line for line in trainer.state.log_history)


def test_an_operator_computes_where_no_operator_in_it_waits():
    transfer = Recorded(0, 100, 9, True, False)
    around = Recorded(10, 90, 1, False, True)
    waits = Recorded(20, 70, 1, False, False)
    inside = Recorded(30, 40, 1, False, True)
    other = Recorded(85, 200, 2, False, True)
    # Nothing is computed before 10, nor between 20 and 70 except from 30 to 40.
    assert 50e-9 == pytest.approx(exposed_seconds([inside, other, waits, transfer, around]))
    assert exposed_seconds([around, other]) == 0
    # Two transfers at the same time count once.
    assert 150e-9 == pytest.approx(exposed_seconds([transfer, Recorded(50, 150, 8, True, False)]))


def test_a_device_that_the_profiler_does_not_know_is_refused():
    with pytest.raises(ArgumentValueError, match=r"communication_share is set, and on mps") as caught:
        ExposedCommunication(True, torch.device("mps"), several=True)
    assert caught.value.code == "FG719"


def test_a_step_that_another_profiler_records_is_not_measured(caplog):
    measured = ExposedCommunication(True, CPU, several=True)
    measured.begin_step()
    with profile():
        measured.begin_step()
        measured.end_step()
        measured.begin_step()
    assert measured.metrics() == {}
    assert 1 == caplog.text.count("[FG719] another profiler records this step")
    measured.begin_step()
    dropped = torch.autograd._profiler_enabled()
    measured.close()
    assert dropped and not torch.autograd._profiler_enabled()
    measured.begin_step()
    measured.end_step()
    assert measured.metrics() == {"communication_share": 0.0}
