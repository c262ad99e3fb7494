"""R15, R16: the same training gives the same losses again, and about the same ones from another number of processes."""

import functools
import json
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from forgather.ml import AccelTrainer, AccelTrainingArguments, Trainer, TrainingArguments
from forgather.ml.callbacks.metrics import JsonLogger
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.metrics import read_records
from tests.golden import check_golden
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import StopAt, tiny_llama
from tests.patience import patience
from tests.reliability.data_sets import Numbered, collate, drawn_collate
from tests.reliability.forks import in_child

pytestmark = pytest.mark.usefixtures("warm")

ROWS = 13
GOLDEN = Path(__file__).parent / "golden"
RENEW = "FORGATHER_UPDATE_GOLDEN=1 python -m pytest tests/reliability/test_repeatable.py"


def trained(
    folder, kind=Trainer, model=tiny_llama, collator=drawn_collate, callbacks=(), resume=None, rows=Numbered, **given
):
    args = {
        "max_steps": 16,
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "logging_dir": str(folder / "runs"),
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        **given,
    }
    arguments = AccelTrainingArguments if kind is AccelTrainer else TrainingArguments
    environment = DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))
    kind(
        model,
        arguments(str(folder), **args),
        train_dataset=rows(ROWS),
        eval_dataset=Numbered(5),
        data_collator=collator,
        callbacks=[JsonLogger(), *callbacks],
        distributed_env=environment,
    ).train(resume_from_checkpoint=resume)


def loss_file(folder, **given):
    ended = in_child(functools.partial(trained, folder, **given))
    assert "" == ended.error
    return (folder / "runs" / "loss.jsonl").read_bytes()


def test_the_same_training_gives_the_same_loss_file_again(tmp_path, figure):
    job = {
        "model": functools.partial(tiny_llama, attention_dropout=0.1),
        "dataloader_num_workers": 2,
        "max_steps": 5,
        "gradient_accumulation_steps": 3,
        "eval_strategy": "epoch",
    }
    first, second, other = (
        loss_file(tmp_path / name, **job, seed=seed) for name, seed in (("1", 1), ("2", 1), ("3", 2))
    )
    assert first == second != other
    assert 5 < first.count(b"\n")
    figure("R16", f"{len(first)} bytes of losses, the same from a second training")


class Restless(Numbered):
    """Rows that, asked for their number for the first time, draw numbers: as a module does that is imported then."""

    def __init__(self, count):
        super().__init__(count)
        self.draws = [random.random, np.random.rand, functools.partial(torch.rand, ())]

    def __len__(self):
        while self.draws:
            self.draws.pop()()
        return super().__len__()


def test_numbers_that_are_drawn_while_a_run_is_made_do_not_change_it(tmp_path):
    job = {"model": functools.partial(tiny_llama, attention_dropout=0.1), "max_steps": 3}
    still = loss_file(tmp_path / "still", **job)
    assert still == loss_file(tmp_path / "restless", **job, rows=Restless)


class Waves(nn.Module):
    """A model in float64 whose first weights are those of a formula, so that no machine makes others."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 64)).double()
        self.embedding.double()
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                waves = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * (number + 1.5))
                parameter.copy_(0.3 * waves.reshape(parameter.shape))

    def forward(self, input_ids, labels):
        logits = self.layers(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def golden_of(version):
    return GOLDEN / f"losses-torch-{version}.jsonl"


def test_the_losses_are_those_of_the_golden_file_of_this_torch(tmp_path):
    version = torch.__version__.partition("+")[0]
    if version != pinned():
        pytest.skip(f"torch {version} has no golden file of losses; constraints.txt pins {pinned()}, which has one")
    lines = map(json.loads, loss_file(tmp_path, model=Waves, max_steps=24).splitlines())
    # Digits beyond these are the machine's own; one step in float32 would change the ninth.
    rounded = [{k: round(v, 9) if isinstance(v, float) else v for k, v in line.items()} for line in lines]
    check_golden(golden_of(version), "\n".join(map(json.dumps, rounded)))


def pinned():
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8")
    return re.search(r"^torch==([\d.]+)", constraints, re.MULTILINE)[1]


def test_the_pinned_torch_has_a_golden_file():
    present = sorted(file.name for file in GOLDEN.glob("losses-torch-*.jsonl"))
    assert [golden_of(pinned()).name] == present, f"with torch {pinned()} installed, renew it: {RENEW}"


class Noting:
    """A collator that notes the rows of each micro-batch in a file."""

    def __init__(self, file):
        self.file = file

    def __call__(self, rows):
        with self.file.open("a") as stream:
            stream.write(json.dumps([int(row["number"]) for row in rows]) + "\n")
        batch = collate(rows)
        return {name: batch[name] for name in ("input_ids", "labels")}


def part(folder, rank_file, ranks, stop, accumulation):
    """Trains to a step, from the newest checkpoint on."""
    environment = DistributedEnvironment()
    trained(
        folder,
        AccelTrainer,
        collator=Noting(Path(f"{rank_file}-{environment.rank}")),
        callbacks=[StopAt(stop)],
        resume="auto",
        per_device_train_batch_size=2 // ranks,
        save_strategy="steps",
        save_steps=1000,
        logging_steps=1,
        gradient_accumulation_steps=accumulation,
    )


def rows_of(files):
    """Returns the rows of each micro-batch of all ranks; a rank without rows reads one of another."""
    merged = []
    for batches in zip(*(file.read_text().splitlines() for file in files), strict=True):
        merged.append(list(dict.fromkeys(number for batch in batches for number in json.loads(batch))))
    return merged


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.matrix), 3])
def test_one_then_two_then_one_process_meet_the_rows_and_losses_of_one(tmp_path, accumulation, figure):
    def trains(folder, parts):
        met = []
        for number, (ranks, stop) in enumerate(parts):
            name = f"{folder.name}-rows-{number}"
            run_ranks(ranks, part, folder, tmp_path / name, ranks, stop, accumulation)
            met += rows_of([tmp_path / f"{name}-{rank}" for rank in range(ranks)])
        return met, [line["loss"] for line in read_records(folder / "runs" / "loss.jsonl") if "loss" in line]

    rows, losses = trains(tmp_path / "one", [(1, 16)])
    found_rows, found = trains(tmp_path / "changing", [(1, 4), (2, 9), (1, 16)])
    assert rows == found_rows
    assert len(losses) == len(found) == 16
    worst = max(abs(one - other) / one for one, other in zip(losses, found, strict=True))
    assert math.isfinite(worst) and worst < 1e-5
    figure(
        "R15", f"1, then 2, then 1 gloo ranks, accumulation {accumulation}: the same rows, losses within {worst:.0e}"
    )
