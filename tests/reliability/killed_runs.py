"""Trainings that are killed at any moment and resumed, beside one of the same kind that was left alone."""

import random
import time
from dataclasses import dataclass

import pytest
import torch

from forgather.ml import TrainingArguments
from forgather.ml.checkpoint.state import read_tensors
from tests.reliability import job
from tests.reliability.forks import Child, in_child


@dataclass(frozen=True)
class LeftAlone:
    """What a run leaves that is not disturbed: digests of its last checkpoint, its weights; and how long it takes."""

    digests: dict
    tensors: dict
    seconds: float


def saving_each_step(folder, steps, **more):
    """Returns the arguments of a training that can be resumed after each step."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to="none",
        **more,
    )


def left_alone(train, place, steps, weights):
    """Returns what a run leaves that is not disturbed. The first run imports what the others use.

    Args:
        train: the function `train(folder, steps)`, which resumes from the newest checkpoint of the folder.
        place: an empty folder.
        steps: the number of steps.
        weights: the name of the file with the weights.
    """
    train(place / "imports", steps=1)
    began = time.monotonic()
    assert "" == in_child(train, place / "run", steps).error
    seconds = time.monotonic() - began
    return LeftAlone(job.digest(place / "run", steps), read_tensors(place / "run" / weights), seconds)


def assert_kills_change_nothing(train, clean, place, steps, weights, wanted):
    """Kills runs at least `wanted` times, and asserts that the resumed ones leave the bits of the one left alone."""
    dice = random.Random(13)
    kills, resumed, number = 0, 0, 0
    while kills < wanted or not resumed:
        folder = place / str(number)
        number += 1
        # At most three times in one folder, so that every run ends.
        for _ in range(3):
            child = Child(train, folder, steps)
            time.sleep(dice.uniform(0.1, 0.9) * clean.seconds)
            child.kill()
            ended = child.ended()
            assert "" == ended.error, ended.error
            if ended.signal != 9:
                break
            kills += 1
            # Kills before the first checkpoint alone would show nothing about resuming.
            resumed += job.newest_step(folder) > 0 if folder.exists() else 0
        assert "" == in_child(train, folder, steps).error
        tensors = read_tensors(folder / weights)
        assert [] == job.differences(clean.digests, job.digest(folder, steps)), f"after {kills} kills"
        assert clean.tensors.keys() == tensors.keys()
        assert all(torch.equal(clean.tensors[name], tensor) for name, tensor in tensors.items())
        if number > 20 + wanted:
            pytest.fail(f"{kills} kills in {number} runs, and {resumed} of them after a checkpoint")
