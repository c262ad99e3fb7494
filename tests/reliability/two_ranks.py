"""The disturbed job of two ranks: four steps of a tiny Llama with two saves, as copies, shards or stages.

Takes a folder and a strategy; gives what `job` gives of one process. Keeps true: a rank that dies or fails ends the
other one, which is not helped from outside.
"""

import os
import time
from pathlib import Path

from forgather.errors import ForgatherError
from forgather.ml import AccelTrainer, AccelTrainingArguments, PipelineTrainer, PipelineTrainingArguments
from forgather.ml.distributed.env import DistributedEnvironment
from tests.ml.distributed.gang import become_rank, free_port, run_ranks
from tests.ml.fixtures import Noisy, tiny_llama
from tests.reliability import faults, job
from tests.reliability.forks import Child

STEPS = 4
WAITS = 20
"""Seconds that a rank waits for the other at most; where one dies, the other must be told much sooner."""
STRATEGIES = {
    "DDP": (AccelTrainer, AccelTrainingArguments, {"per_device_train_batch_size": 2}),
    "FSDP2": (AccelTrainer, AccelTrainingArguments, {"per_device_train_batch_size": 2, "fsdp": "full_shard"}),
    "FSDP2, asynchronous": (
        AccelTrainer,
        AccelTrainingArguments,
        {"per_device_train_batch_size": 2, "fsdp": "full_shard", "async_save": True},
    ),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"per_device_train_batch_size": 4, "pipeline_chunks": 2, "split_spec": "auto"},
    ),
}


def model():
    # Pipelines refuse dropout in what ranks compute twice; the rows draw random numbers instead.
    return tiny_llama(hidden_size=16, intermediate_size=16, num_attention_heads=2)


def part(folder, strategy, storage=None, resume=False, callbacks=()):
    """Trains as the process that the environment names."""
    trainer_class, arguments, settings = STRATEGIES[strategy]
    trainer = trainer_class(
        model,
        arguments(
            output_dir=str(folder),
            max_steps=STEPS,
            save_strategy="steps",
            save_steps=2,
            logging_strategy="steps",
            logging_steps=1,
            learning_rate=1e-2,
            use_cpu=True,
            report_to="none",
            **settings,
        ),
        train_dataset=Noisy(),
        callbacks=callbacks,
        distributed_env=DistributedEnvironment(timeout_seconds=WAITS, start_timeout_seconds=WAITS),
        storage=storage,
    )
    trainer.train(resume_from_checkpoint=resume)


def counted(folder, strategy):
    """Trains as one rank, and returns its operations."""
    storage = faults.Faulty()
    part(folder, strategy, storage)
    return storage.operations


def clean(folder, strategy):
    """Returns the digest of an undisturbed run, and the operations of each rank."""
    operations = run_ranks(2, counted, folder, strategy)
    return job.digest(folder, STEPS), operations


def finish(folder, strategy):
    """Goes on with two ranks, and returns the digest."""
    run_ranks(2, part, folder, strategy, None, "auto")
    return job.digest(folder, STEPS)


def disturbed(folder, strategy, fault, at, rank, callbacks=()):
    """Trains with a fault of one rank; returns how each rank ended, and the seconds between the fault and the last end.

    A rank that ends well or with an error of ours gives its code, any other one the name of its exception.
    """
    port, noted = free_port(), Path(f"{folder}.struck")
    children = [
        Child(_disturbed_part, number, port, folder, strategy, fault, at if number == rank else 0, noted, callbacks)
        for number in range(2)
    ]
    ended = [child.ended(2 * WAITS) for child in children]
    return ended, time.time() - float(noted.read_text()) if noted.exists() else None


class Noting:
    """A fault that leaves the moment when it struck."""

    def __init__(self, fault, file):
        self._fault = fault
        self._file = file
        self.lasting = getattr(fault, "lasting", False)

    def strike(self, what):
        self._file.write_text(str(time.time()))
        self._fault.strike(what)


def _disturbed_part(rank, port, folder, strategy, fault, at, noted, callbacks):
    become_rank(rank, 2, port)
    storage = faults.Faulty(Noting(fault, noted), at)
    try:
        part(folder, strategy, storage, callbacks=callbacks)
    except ForgatherError as error:
        told = error.code
    except Exception as error:  # noqa: BLE001 - what the other rank is told of a dead one is not ours
        told = type(error).__name__
    else:
        told = ""
    # Rank 0 keeps the store: it must not go before the other one has heard.
    if rank == 0 and told:
        time.sleep(0.2)
    os.environ.pop("RANK")
    return told, storage.struck
