"""R18: what a run writes for people survives a torn last line, and a resumed run tells nothing twice; memory is flat."""

import itertools
import os
import shutil

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.callbacks.metrics import JsonLogger
from forgather.ml.callbacks.tensorboard import TBLogger
from forgather.ml.memory import memory_facts
from forgather.ml.metrics import read_records, repeatable_metrics
from tests.matrix import thinned
from tests.ml.fixtures import Regression, regression_rows
from tests.reliability.forks import in_child, spread

STEPS = 9
SAVED = 6
KILLED = 8


class Killed(TrainerCallback):
    """Ends the process without a word at the end of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os._exit(9)


def train(folder, *callbacks, runs=None, resume=False, **given):
    args = {
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "use_cpu": True,
        **given,
    }
    Trainer(
        Regression(),
        TrainingArguments(output_dir=str(folder), logging_dir=str(runs or folder / "runs"), **args),
        train_dataset=regression_rows(),
        eval_dataset=regression_rows(4),
        callbacks=[JsonLogger(), TBLogger(), *callbacks],
    ).train(resume_from_checkpoint="auto" if resume else None)


def told(runs):
    """Returns what a folder tells that no clock decides: the bytes of loss.jsonl, lines of metrics.jsonl, scalars."""
    events = EventAccumulator(str(runs), size_guidance={"scalars": 0}).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
        if repeatable_metrics({tag.split("/")[-1]: 0})
    }
    lines = [repeatable_metrics(record) for record in read_records(runs / "metrics.jsonl")]
    assert all("time" in record for record in read_records(runs / "metrics.jsonl"))
    return (runs / "loss.jsonl").read_bytes(), lines, scalars


def resumed_after_a_cut(cut, killed, folder):
    """Cuts bytes off the end of each file of a killed run, resumes it, and returns what it tells."""
    out = folder / f"cut-{cut}"
    shutil.copytree(killed, out)
    for file in (out / "runs").iterdir():
        os.truncate(file, max(0, file.stat().st_size - cut))
    train(out, resume=True)
    found = told(out / "runs")
    shutil.rmtree(out)
    return found


def last_record_bytes(runs):
    return max(len(file.read_bytes().split(b"\n")[-2]) + 1 for file in runs.glob("*.jsonl"))


def test_a_record_that_is_cut_at_any_byte_leaves_the_records_of_an_undisturbed_run(tmp_path, full, figure):
    train(tmp_path / "whole")
    expected = told(tmp_path / "whole" / "runs")
    killed = tmp_path / "killed"
    killed_earlier(killed, Killed(KILLED))
    assert expected != told(killed / "runs")
    cuts = range(0, last_record_bytes(killed / "runs") + 1, 1 if full else 60)
    for cut, found in zip(cuts, spread(resumed_after_a_cut, cuts, killed, tmp_path), strict=True):
        assert expected == found, f"{cut} bytes cut off"
    figure("R18", f"cut at each of the {len(cuts)} last bytes: files equal to those of an undisturbed run")


def test_a_run_that_goes_on_in_another_folder_tells_all_of_it(tmp_path):
    train(tmp_path / "whole")
    out = tmp_path / "killed"
    killed_earlier(out, Killed(KILLED))
    train(out, runs=tmp_path / "other", resume=True)
    assert told(tmp_path / "whole" / "runs") == told(tmp_path / "other")


class KilledAtEnd(TrainerCallback):
    """Ends the process without a word after the last step: when its line, or that of the whole run, is written."""

    def __init__(self, name):
        self.name = name

    def on_save(self, args, state, control, **kwargs):
        self.end(state, "saved")

    def on_log(self, args, state, control, logs, **kwargs):
        self.end(state, *logs)

    def on_train_end(self, args, state, control, **kwargs):
        self.end(state, "written")

    def end(self, state, *names):
        if state.global_step == state.max_steps and self.name in names:
            os._exit(9)


@pytest.mark.parametrize(
    ("logging_steps", "steps", "saves"),
    thinned(
        itertools.product([1, 5], [8, STEPS], ["steps", "epoch"]),
        lambda *case: case in ((1, 8, "epoch"), (5, STEPS, "steps")),
    ),
)
def test_a_run_that_was_killed_after_its_last_step_tells_all_of_it(tmp_path, saves, steps, logging_steps):
    given = {"max_steps": steps, "save_strategy": saves, "logging_steps": logging_steps}
    train(tmp_path / "whole", **given)
    whole = told(tmp_path / "whole" / "runs")
    assert 1 == whole[0].count(b"train_loss")
    for moment in ("saved", "train_loss", "written"):
        out = tmp_path / moment
        killed_earlier(out, KilledAtEnd(moment), **given)
        shutil.copytree(out, tmp_path / f"{moment}-elsewhere")
        train(out, resume=True, **given)
        assert whole[:2] == told(out / "runs")[:2], moment
        elsewhere = tmp_path / f"{moment}-elsewhere"
        train(elsewhere, runs=elsewhere / "other", resume=True, **given)
        assert whole[:2] == told(elsewhere / "other")[:2], moment


def test_a_finished_run_that_is_resumed_tells_nothing_twice(tmp_path):
    out = tmp_path / "out"
    train(out)
    whole = told(out / "runs")
    train(out, resume=True)
    assert whole[:2] == told(out / "runs")[:2]
    train(out, runs=tmp_path / "other", resume=True)
    assert whole[:2] == told(tmp_path / "other")[:2]


def test_what_another_run_wrote_into_the_same_files_stays(tmp_path):
    out, runs = tmp_path / "out", tmp_path / "out" / "runs"
    train(out, seed=1)
    before = (runs / "loss.jsonl").read_bytes()
    shutil.rmtree(out / f"checkpoint-{SAVED}")
    killed_earlier(out, Killed(KILLED))
    train(out, resume=True)
    train(tmp_path / "whole")
    assert before + (tmp_path / "whole" / "runs" / "loss.jsonl").read_bytes() == (runs / "loss.jsonl").read_bytes()


def test_a_checkpoint_from_before_the_first_line_leaves_no_line_of_what_came_after(tmp_path):
    out = tmp_path / "killed"
    given = {"save_steps": 2, "logging_steps": 3, "save_total_limit": 1, "eval_strategy": "no"}
    killed_earlier(out, Killed(3), **given)
    train(out, resume=True, **given)
    train(tmp_path / "whole", **given)
    assert told(tmp_path / "whole" / "runs") == told(out / "runs")


def killed_earlier(folder, *callbacks, **given):
    """Trains in a process that is killed; its event files are older than any that follow, as their names tell."""
    assert 9 == in_child(lambda: train(folder, *callbacks, **given)).status
    for file in (folder / "runs").glob("events.out.tfevents.*"):
        _, _, _, rest = file.name.split(".", 3)
        file.rename(file.with_name(f"events.out.tfevents.{rest.replace(rest.split('.')[0], '1700000000', 1)}"))


class Resident(TrainerCallback):
    """Notes the memory of the process at two steps."""

    def __init__(self, *steps):
        self.steps = steps
        self.bytes = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step in self.steps:
            self.bytes.append(memory_facts(torch.device("cpu"))["memory_bytes"])


def growth(first, last, folder):
    resident = Resident(first, last)
    train(folder, resident, max_steps=last, save_steps=last // 4, save_total_limit=1, logging_steps=10)
    one, other = resident.bytes
    return (other - one) / one


@pytest.mark.matrix
def test_memory_is_flat(tmp_path, full, figure):
    first, last = (1000, 10_000) if full else (200, 800)
    ended = in_child(growth, first, last, tmp_path, timeout=300.0)
    assert "" == ended.error
    assert ended.value < 0.05
    figure("R18", f"resident memory grew by {ended.value:.2%} from step {first:,} to {last:,}")
