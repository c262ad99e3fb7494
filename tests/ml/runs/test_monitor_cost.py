"""What monitors cost: the part of a step's time that is spent on its record and on anomalies, and the heartbeat's."""

import statistics
import time

import pytest

from forgather.heartbeat import Heartbeat
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.callbacks import (
    AnomalyCallback,
    DistributedMonitorCallback,
    ResourceMonitorCallback,
    TrainerCallback,
    TrainingMonitor,
)
from forgather.ml.trainer.step_clock import StepClock
from forgather.run_status import BEAT_SECONDS, load_status
from tests.ml.fixtures import rows, tiny_llama

REACH = 0.01


def test_records_and_anomalies_cost_at_most_a_hundredth_of_a_step(tmp_path, monkeypatch, record_property):
    spent, steps = [0.0], []
    for name in ("enter", "finish"):
        # `finish` sends the record, so the detector is inside; it calls `enter`, which counts twice, against us.
        method = getattr(StepClock, name)

        def timed(self, *args, method=method, **named):
            began = time.thread_time()
            result = method(self, *args, **named)
            spent[0] += time.thread_time() - began
            return result

        monkeypatch.setattr(StepClock, name, timed)

    class Steps(AnomalyCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.began, self.before = time.thread_time(), spent[0]

        def on_step_end(self, args, state, control, **kwargs):
            steps.append((spent[0] - self.before) / (time.thread_time() - self.began))

    train(tmp_path, [Steps()])
    share = statistics.median(steps[34:])
    record_property("share_of_step", share)
    assert share <= REACH, f"{share:.2%}"


def train(folder, callbacks):
    """Trains a model as small as that of the demo: 0.4 million weights, 4 rows of 128 tokens."""
    model = tiny_llama(vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=3)
    args = TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=44, logging_steps=10, save_strategy="no", use_cpu=True
    )
    Trainer(model, args, train_dataset=rows(64, length=128), callbacks=callbacks).train()


@pytest.mark.matrix
def test_monitors_that_a_config_adds_cost_at_most_a_hundredth_of_the_steps(tmp_path, record_property):
    spent, marks = [0.0], {}

    def timed(monitor):
        for name in [name for name in dir(monitor) if name.startswith("on_")]:
            method = getattr(monitor, name)

            def measured(*args, method=method, **named):
                began = time.thread_time()
                result = method(*args, **named)
                spent[0] += time.thread_time() - began
                return result

            setattr(monitor, name, measured)
        return monitor

    class Marks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            marks[state.global_step] = (spent[0], time.thread_time())

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    monitors = [
        DistributedMonitorCallback(run_dir=run_dir),
        ResourceMonitorCallback(),
        TrainingMonitor(log_interval=10, log_dir=run_dir),
    ]
    train(tmp_path, [*map(timed, monitors), Marks()])
    (before, began), (after, ended) = marks[11], marks[41]
    share = (after - before) / (ended - began)
    record_property("share_of_steps", share)
    assert 0 < share <= REACH, f"{share:.2%}"


def test_a_heartbeat_costs_at_most_a_hundredth_of_the_time_between_two(tmp_path, record_property):
    costs = []
    with Heartbeat(str(tmp_path), started=time.time()) as heartbeat:
        for _ in range(20):
            began = time.thread_time()
            heartbeat.update(control=None)
            costs.append(time.thread_time() - began)
        assert load_status(str(tmp_path)).beat > len(costs)
    share = statistics.median(costs) / BEAT_SECONDS
    record_property("share_of_time", share)
    assert share <= REACH, f"{share:.2%}"
