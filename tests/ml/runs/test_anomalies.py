"""Anomalies: 20 planted ones are found in time, 20 quiet runs have none; reported once, kept at a resume, in the report."""

import json
import math
import random
import time

import pytest
import torch
from torch import nn

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.anomalies import DEFAULTS, AnomalyDetector, anomaly_settings
from forgather.ml.callbacks import AnomalyCallback, JsonLogger, TrainerCallback
from forgather.ml.metrics import read_records
from forgather.ml.report import write_report
from forgather.ml.types import StepRecord
from tests.matrix import thinned
from tests.ml.fixtures import rows, tiny_llama

STEPS = 600


def stream(seed, *, steps=STEPS, noise=0.03, plant=None):
    """Yields the records of a run whose loss falls by a power law, with the noise of its batches."""
    draw = random.Random(seed)
    for step in range(1, steps + 1):
        facts = {
            "loss": (1.5 + 7 * step**-0.35) * (1 + noise * draw.gauss(0, 1)),
            "grad_norm": math.exp(0.4 * draw.gauss(0, 1)) * (1 + 5 / step),
            # A step in a hundred waits for something, which is no drop of the throughput.
            "data_seconds": 0.3 * math.exp(0.1 * draw.gauss(0, 1)) * (4 if draw.random() < 0.01 else 1),
        }
        if plant is not None:
            plant(step, facts, draw)
        yield StepRecord(step=step, num_tokens=4096, **facts)


def found_in(records, settings=None, steps=STEPS):
    detector = AnomalyDetector(anomaly_settings(settings), steps)
    return [found for record in records for found in detector.observe(record)]


def spike(at, factor):
    def plant(step, facts, draw):
        facts["loss"] *= factor if step == at else 1

    return plant


def explosion(at, factor):
    def plant(step, facts, draw):
        facts["grad_norm"] *= factor if step >= at else 1

    return plant


def not_finite(at, name, value):
    def plant(step, facts, draw):
        facts[name] = value if step == at else facts[name]

    return plant


def slower(at, factor):
    def plant(step, facts, draw):
        facts["data_seconds"] *= factor if step >= at else 1

    return plant


def flat(at, noise):
    def plant(step, facts, draw):
        if step >= at:
            facts["loss"] = (1.5 + 7 * at**-0.35) * (1 + noise * draw.gauss(0, 1))

    return plant


def rising(at, rate):
    def plant(step, facts, draw):
        facts["loss"] *= 1 + rate * max(0, step - at)

    return plant


TREND = {"plateau": {"window": 200}, "divergence": {"window": 100}}
# (kind, step, the number of steps within which it must be found, what is planted)
PLANTED = [
    ("spike", 300, 0, spike(300, 3)),
    ("spike", 120, 0, spike(120, 2.5)),
    ("spike", 500, 0, spike(500, 10)),
    ("spike", 40, 0, spike(40, 4)),
    ("explosion", 300, 5, explosion(300, 100)),
    ("explosion", 100, 5, explosion(100, 1e6)),
    ("explosion", 450, 5, explosion(450, 60)),
    ("not_finite", 200, 0, not_finite(200, "loss", math.nan)),
    ("not_finite", 1, 0, not_finite(1, "loss", math.inf)),
    ("not_finite", 350, 0, not_finite(350, "grad_norm", math.inf)),
    ("throughput", 300, 5, slower(300, 3)),
    ("throughput", 200, 5, slower(200, 10)),
    ("throughput", 480, 5, slower(480, 4)),
    ("plateau", 200, 200, flat(200, 0.005)),
    ("plateau", 300, 200, flat(300, 0.003)),
    ("plateau", 100, 200, flat(100, 0.0)),
    ("divergence", 200, 100, rising(200, 0.01)),
    ("divergence", 300, 100, rising(300, 0.02)),
    ("divergence", 400, 100, rising(400, 0.05)),
    ("divergence", 150, 100, rising(150, 0.008)),
]


def test_there_are_twenty_of_all_kinds():
    assert len(PLANTED) == 20
    assert {kind for kind, *_ in PLANTED} == set(DEFAULTS)


@pytest.mark.parametrize(("kind", "at", "within", "plant"), PLANTED, ids=[f"{kind}-{at}" for kind, at, *_ in PLANTED])
def test_a_planted_anomaly_is_found_once_and_in_time(kind, at, within, plant, record_property):
    noise = 0.01 if kind in TREND else 0.03
    found = [one for one in found_in(stream(at, noise=noise, plant=plant), TREND) if one.kind == kind]
    assert len(found) == 1, found
    assert at <= found[0].step <= at + within
    record_property("steps_after_it_was_planted", found[0].step - at)


@pytest.mark.parametrize("seed", range(20))
def test_a_quiet_run_has_none(seed):
    noise = (0.003, 0.01, 0.03, 0.1, 0.25)[seed % 5]
    assert found_in(stream(seed, noise=noise, steps=1500), steps=1500) == []


def test_rows_of_different_lengths_are_no_drop_of_the_throughput():
    def plant(step):
        tokens = 8192 if step > 300 else 1024
        return StepRecord(step=step, loss=1 + 100 / step, num_tokens=tokens, forward_backward_seconds=tokens / 4096)

    assert found_in(map(plant, range(1, 400)), {"plateau": False}) == []
    # The control: as long for as many tokens as before.
    slow = (
        StepRecord(step=s, loss=1 + 100 / s, num_tokens=1024, update_seconds=2 if s > 300 else 0.25)
        for s in range(1, 400)
    )
    (one,) = found_in(slow, {"plateau": False})
    assert (one.kind, one.step) == ("throughput", 304)
    assert "mostly the optimizer step" in one.message


def test_a_machine_that_is_slow_now_and_then_is_reported_once_until_it_was_usual_for_a_while():
    def seconds(step):
        # Slow for eight of ten steps from 100 to 200, and again from 300 on.
        return 1.0 if (100 <= step < 200 and step % 10 < 8) or step >= 300 else 0.2

    records = (StepRecord(step=s, loss=1 + 100 / s, num_tokens=9, update_seconds=seconds(s)) for s in range(1, 400))
    found = found_in(records, {"plateau": False})
    assert [(one.kind, one.step) for one in found] == [("throughput", 103), ("throughput", 303)]


def test_steps_that_stay_bad_are_reported_once_and_again_after_a_good_one():
    losses = [1.0, math.nan, math.nan, math.inf, 1.0, math.nan]
    records = [StepRecord(step=step, loss=loss) for step, loss in enumerate(losses, start=1)]
    assert [(one.kind, one.step) for one in found_in(records)] == [("not_finite", 2), ("not_finite", 6)]
    skipped = [StepRecord(step=step, loss=None, bad="the norm is 9; a standard deviation of 1") for step in range(1, 9)]
    assert [(one.kind, one.step) for one in found_in(skipped)] == [("explosion", 1)]
    # A run that resumes between bad steps knows that they are reported.
    first, second = (AnomalyDetector(anomaly_settings(None), STEPS) for _ in range(2))
    assert [one.step for one in first.observe(records[1])] == [2]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.observe(records[2]) == []


def test_what_is_known_goes_on_at_a_resume():
    plant = spike(290, 3)
    records = list(stream(5, plant=plant))
    whole = found_in(records, TREND)
    for cut in (100, 289, 290, 291, 420):
        first = AnomalyDetector(anomaly_settings(TREND), STEPS)
        early = [found for record in records[:cut] for found in first.observe(record)]
        second = AnomalyDetector(anomaly_settings(TREND), STEPS)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        late = [found for record in records[cut:] for found in second.observe(record)]
        assert whole == early + late
    assert [(one.kind, one.step) for one in whole] == [("spike", 290)]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spik": {}}, "there is no anomaly 'spik'"),
        ({"spike": {"rato": 2}}, "anomaly 'spike' has no setting 'rato'"),
        ({"spike": {"ratio": -1}}, "ratio of anomaly 'spike' is -1, and must be a number above 1"),
        ({"spike": {"ratio": True}}, "must be a number above 1"),
        # With this ratio, every step would be a spike.
        ({"spike": {"ratio": 0.9}}, "must be a number above 1"),
        ({"spike": {"window": 0.5}}, "must be a whole number above 0"),
        ({"explosion": {"window": 10**400}}, "must be a whole number above 0"),
        ({"throughput": {"seconds": math.inf}}, "must be a number above 0"),
        ({"plateau": {"improvement": math.nan}}, "must be a number above 0"),
        ({"spike": {"ratio": "2"}}, "must be a number above 1"),
        ({"spike": {3: 2}}, "has no setting 3"),
        ({"spike": 3}, "anomaly 'spike' is set to 3"),
        ({3: {}}, "there is no anomaly 3"),
        (["spike"], "give a mapping"),
        (True, "give a mapping"),
    ],
)
def test_settings_that_are_not_allowed_are_refused(settings, words):
    with pytest.raises(TrainingError, match=words) as error:
        AnomalyCallback(settings)
    assert error.value.code == "FG520"


class Line(nn.Module):
    """A model of one weight, which learns x -> 2 x."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x, y):
        return ((self.weight * x - y) ** 2).mean() + 0.1


class Rows(torch.utils.data.Dataset):
    """Rows of a line, with a fault at one index."""

    def __init__(self, count, at=None, fault=None):
        self.count, self.at, self.fault = count, at, fault

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(1, generator=generator) + 2
        row = {"x": x, "y": 2 * x}
        if self.at is not None and index // 4 + 1 >= self.at:
            if self.fault == "slow":
                time.sleep(0.1)
            elif index // 4 + 1 == self.at:
                row["y"] = row["y"] + {"nan": math.nan, "spike": 30.0}[self.fault]
        return row


def line_run(folder, data, callbacks=(), steps=80, resume=None, **settings):
    trainer = Trainer(
        Line,
        TrainingArguments(
            str(folder / "out"),
            logging_dir=str(folder),
            per_device_train_batch_size=4,
            max_steps=steps,
            logging_steps=10,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            use_cpu=True,
            **{"save_strategy": "no", **settings},
        ),
        train_dataset=data,
        callbacks=[JsonLogger(), *callbacks],
    )
    trainer.train(resume)
    return trainer


def events(folder):
    found = [line for line in read_records(folder / "metrics.jsonl") if "event" in line]
    return [(line["kind"], line["step"]) for line in found if line["kind"] != "throughput"]


def test_a_spike_in_the_rows_of_a_run_is_reported_once_and_marked_in_the_report(tmp_path, caplog):
    line_run(tmp_path, Rows(400, at=60, fault="spike"), [AnomalyCallback()])
    assert ("spike", 60) in events(tmp_path)
    assert caplog.text.count("anomaly at step 60 (spike): the loss is") == 1
    page = write_report(tmp_path).read_text()
    assert '<g class="mark"><title>step 60, spike: the loss is' in page
    assert "<td>60</td><td>spike</td>" in page
    # A line about an event is no metric.
    assert "usual" not in page.lower().split("<script>")[0].replace("the usual", "")


def test_a_run_that_ends_by_nan_reports_it_and_its_alert_is_run(tmp_path):
    said = tmp_path / "said"
    command = ["sh", "-c", 'echo "$0" "$1" > "$2"', "{kind}", "{step}", str(said)]
    with pytest.raises(TrainingError, match="the loss is nan at step 30"):
        line_run(tmp_path, Rows(400, at=30, fault="nan"), [AnomalyCallback(on_alert=command)])
    assert events(tmp_path) == [("not_finite", 30)]
    assert wait_for(said) == "not_finite 30\n"


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_step_that_is_skipped_is_reported(tmp_path, policy):
    bad = {"bad_step_policy": policy, "save_strategy": "steps", "save_steps": 20}
    line_run(tmp_path, Rows(400, at=30, fault="nan"), [AnomalyCallback()], **bad)
    assert events(tmp_path) == [("not_finite", 30)]


def test_rows_that_take_longer_are_a_drop_of_the_throughput(tmp_path):
    line_run(tmp_path, Rows(200, at=40, fault="slow"), [AnomalyCallback()], steps=46)
    found = [line for line in read_records(tmp_path / "metrics.jsonl") if line.get("kind") == "throughput"]
    (slow,) = [line for line in found if "mostly waiting for data" in line["message"]]
    assert 40 <= slow["step"] <= 45


def test_a_resumed_run_keeps_the_lines_of_events_and_repeats_none(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 40}
    data = Rows(400, at=38, fault="spike")
    line_run(tmp_path, data, [AnomalyCallback()], steps=80, **saves)
    before = [line for line in read_records(tmp_path / "metrics.jsonl") if line["step"] <= 40]
    assert [line["step"] for line in before if "event" in line] == [38]
    checkpoint = str(tmp_path / "out" / "checkpoint-40")
    line_run(tmp_path, data, [AnomalyCallback()], steps=80, resume=checkpoint, **saves)
    after = read_records(tmp_path / "metrics.jsonl")
    assert after[: len(before)] == before
    assert events(tmp_path) == [("spike", 38)]
    # In another folder, the lines are filled in.
    other = tmp_path / "other"
    line_run(other, data, [AnomalyCallback()], steps=80, resume=checkpoint, **saves)
    assert read_records(other / "metrics.jsonl")[: len(before)] == before


def wait_for(file, seconds=10):
    until = time.monotonic() + seconds
    while not (file.exists() and file.stat().st_size) and time.monotonic() < until:
        time.sleep(0.02)
    return file.read_text()


def test_a_step_of_a_run_that_stays_slow_costs_as_much_as_the_first_slow_one():
    detector = AnomalyDetector(anomaly_settings({"plateau": False, "divergence": False}), 10**6)

    def cost(steps, seconds):
        began = time.process_time()
        for step in steps:
            detector.observe(StepRecord(step=step, loss=1.0, num_tokens=9, update_seconds=seconds))
        return time.process_time() - began

    cost(range(100), 0.2)
    early = cost(range(100, 600), 0.5)
    cost(range(600, 3000), 0.5)
    assert cost(range(3000, 3500), 0.5) < 3 * early + 0.01


def test_a_step_of_a_detector_costs_little(record_property):
    records = list(stream(1, steps=1000))
    detector = AnomalyDetector(anomaly_settings(None), 1000)
    began = time.process_time()
    for record in records:
        detector.observe(record)
    cost = (time.process_time() - began) / len(records)
    record_property("seconds_per_step", cost)
    assert cost < 3e-4


QUIET = [
    (kind, seed) for kind in ("sgd", "adamw_torch", "rows of few tokens", "warm-up", "large steps") for seed in range(4)
]


@pytest.mark.parametrize(("kind", "seed"), thinned(QUIET, lambda kind, seed: seed == 0 and kind == "sgd"))
def test_a_quiet_run_of_a_model_reports_nothing(kind, seed, tmp_path):
    settings = {
        "sgd": {"optim": "sgd", "learning_rate": 0.05},
        "adamw_torch": {"optim": "adamw_torch", "learning_rate": 1e-3},
        "rows of few tokens": {"per_device_train_batch_size": 1, "learning_rate": 5e-4},
        "warm-up": {"learning_rate": 3e-3, "warmup_steps": 40, "lr_scheduler_type": "cosine"},
        "large steps": {"learning_rate": 3e-3, "gradient_accumulation_steps": 2},
    }[kind]
    args = TrainingArguments(
        str(tmp_path),
        **{
            "max_steps": 160,
            "per_device_train_batch_size": 4,
            "lr_scheduler_type": "constant",
            "save_strategy": "no",
            "use_cpu": True,
            "seed": seed,
            "logging_dir": str(tmp_path),
            **settings,
        },
    )
    # What a machine does beside the tests may slow a step down; that is no fault of the run.
    watch = AnomalyCallback({"throughput": False})
    data = rows(512, length=16, seed=seed)
    Trainer(tiny_llama(seed, num_hidden_layers=1), args, train_dataset=data, callbacks=[JsonLogger(), watch]).train()
    assert events(tmp_path) == []


class CountSteps(TrainerCallback):
    """A user's callback that hears records of steps."""

    def __init__(self):
        self.records = []

    def on_step_record(self, args, state, control, record, **kwargs):
        self.records.append((state.global_step, record))


def test_a_callback_of_the_user_gets_each_step(tmp_path):
    hears = CountSteps()
    line_run(tmp_path, Rows(400), [hears], steps=7)
    assert [record.step for _, record in hears.records] == [1, 2, 3, 4, 5, 6, 7]
    assert all(
        record.step == step and math.isfinite(record.loss) and record.grad_norm >= 0 for step, record in hears.records
    )
    assert all(record.forward_backward_seconds > 0 and record.data_seconds > 0 for _, record in hears.records)
