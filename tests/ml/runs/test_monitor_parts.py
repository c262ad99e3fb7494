"""The monitors, alerts, profiles and memory: what they write, what they refuse, and that they end no run."""

import gzip
import json
import logging
import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from forgather.errors import ResolveError, TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.alert_command import AlertCommand
from forgather.ml.callbacks import (
    AnomalyCallback,
    DistributedMonitorCallback,
    JsonLogger,
    MemoryProfiler,
    ProfileCallback,
    ResourceMonitorCallback,
    RunSummaryCallback,
    TrainerCallback,
    TrainingMonitor,
)
from forgather.ml.memory import is_out_of_memory, memory_facts, peak_since_last
from forgather.ml.memory_note import note_largest_tensors
from forgather.ml.metrics import read_records
from forgather.ml.report import write_report
from forgather.ml.report.run_data import read_facts
from forgather.ml.types import StepRecord
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.ml.fixtures import rows, tiny_llama
from tests.ml.runs.test_anomalies import wait_for
from tests.project.workbench import make_project

EVENT = {"event": "anomaly", "kind": "spike", "step": 7, "message": "the loss is 9; rm -rf $(HOME) `x`"}


def run(folder, callbacks, model=None, **settings):
    trainer = Trainer(
        model or tiny_llama(),
        TrainingArguments(
            str(folder / "out"),
            logging_dir=str(folder),
            per_device_train_batch_size=2,
            **{"max_steps": 6, "logging_steps": 2, "save_strategy": "no", "use_cpu": True, **settings},
        ),
        train_dataset=rows(12),
        callbacks=callbacks,
    )
    trainer.train()
    return trainer


# -- alerts ------------------------------------------------------------------------------------------------------------


def test_a_command_gets_its_words_without_a_shell(tmp_path):
    said = tmp_path / "said"
    script = tmp_path / "note.sh"
    script.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word" >> "$OUT.part"; done\nmv "$OUT.part" "$OUT"\n')
    script.chmod(0o755)
    os.environ["OUT"] = str(said)
    try:
        AlertCommand([str(script), "run {run}", "{kind} at {step}: {message}"]).run(EVENT, "/runs/a b")
        assert wait_for(said).splitlines() == ["run /runs/a b", f"spike at 7: {EVENT['message']}"]
        said.unlink()
        # Without a placeholder, the message is the last word.
        AlertCommand([str(script), "-u", "critical"]).run(EVENT, "/runs/a")
        assert wait_for(said).splitlines() == ["-u", "critical", EVENT["message"]]
    finally:
        del os.environ["OUT"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["no-such-program-anywhere"], "No such file"),
        (["sh", "-c", "echo broken; exit 3"], "it ended with status 3: broken"),
        (["sh", "-c", "sleep 60"], "it took longer than 0.2 s"),
        (["sh", "-c", "truncate -s 99999999 /dev/fd/1; sleep 60"], "it printed more than 16,777,216 bytes"),
    ],
)
def test_a_command_that_fails_or_hangs_is_logged_once_and_delays_nothing(words, why, caplog):
    command = AlertCommand(words, timeout=0.2 if "longer" in why else 9.0)
    began = time.monotonic()
    for _ in range(3):
        command.run(EVENT, "/runs/a")
    assert time.monotonic() - began < 1
    until = time.monotonic() + 10
    while why not in caplog.text and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)
    assert caplog.text.count("the command of on_alert") == 1
    assert why in caplog.text


def test_a_disk_that_is_full_ends_no_run_by_an_alert(monkeypatch, caplog):
    def full(*_, **__):
        raise OSError("full")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    AlertCommand(["true"]).run(EVENT, "/runs/a")
    assert "the command of on_alert, 'true', failed: full" in caplog.text


@pytest.mark.parametrize("words", ["notify-send x", [], ["sh", 3], [""], {"a": 1}, ["a\0b"]])
def test_what_is_no_list_of_words_is_refused(words):
    with pytest.raises(TrainingError) as error:
        AnomalyCallback(on_alert=words)
    assert (error.value.code, error.value.argument) == ("FG521", "on_alert")


ALERTS = {
    "templates/configs/alert.yaml": "main: !singleton:forgather.ml.callbacks:AnomalyCallback\n    on_alert: [touch, /tmp/x]\n",
    "templates/configs/later.yaml": "main: !partial:forgather.ml.callbacks:AnomalyCallback\n    on_alert: [touch, /tmp/x]\n",
    "templates/configs/none.yaml": "main: !singleton:forgather.ml.callbacks:AnomalyCallback {on_alert: ~}\n",
}


@pytest.mark.parametrize("name", ["alert", "later"])
def test_a_command_of_a_config_needs_the_trust_of_its_project(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FORGATHER_TRUST", "")
    folder = make_project(tmp_path / "project", ALERTS)
    project = Project(name, folder)
    found = [finding for finding in check_project(project).findings if finding.code == "FG440"]
    assert len(found) == 1 and str(folder) in found[0].message
    with pytest.raises(ResolveError) as error:
        built = project("main")
        built(on_alert=["touch", "/tmp/x"])
    assert error.value.code == "FG440"
    monkeypatch.setenv("FORGATHER_TRUST", str(folder))
    assert Project(name, folder)("main") is not None


def test_without_a_command_no_trust_is_needed(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGATHER_TRUST", "")
    project = Project("none", make_project(tmp_path / "project", ALERTS))
    assert check_project(project).findings == [] or not [
        f for f in check_project(project).findings if f.code == "FG440"
    ]
    assert isinstance(project("main"), AnomalyCallback)


# -- monitors ----------------------------------------------------------------------------------------------------------


def test_a_monitor_of_a_loop_tracks_metrics_and_calls_functions(tmp_path, caplog):
    monitor = TrainingMonitor(log_interval=10, save_logs=True, log_dir=tmp_path / "logs")
    seen = []
    monitor.add_callback("loss_alert", lambda metrics: seen.append(metrics["loss"]) if metrics["loss"] > 1 else None)
    monitor.add_callback("broken", lambda metrics: metrics["nothing"])
    for step in range(1, 21):
        monitor.track_metric("loss", torch.tensor(20.0 / step), step)
        monitor.track_metric("accuracy", step / 20, step)
    monitor.close()
    # Once for each metric of each step whose loss is above 1.
    assert len(seen) == 2 * 19
    assert caplog.text.count("the monitor's callback 'broken' failed: KeyError") == 1
    lines = read_records(tmp_path / "logs" / "monitor.jsonl")
    assert [(line["step"], line["loss"], line["accuracy"]) for line in lines] == [(10, 2.0, 0.5), (20, 1.0, 1.0)]
    assert lines[0]["system"]["cpu_memory"]["process_bytes"] > 1e7
    assert monitor.metrics == {"loss": 1.0, "accuracy": 1.0}


def test_a_monitor_writes_nothing_that_was_not_asked_for(tmp_path):
    monitor = TrainingMonitor(
        1, False, tmp_path / "logs", track_gpu_memory=False, track_cpu_memory=False, track_network=False
    )
    monitor.track_metric("loss", 1, 1)
    monitor.close()
    assert not (tmp_path / "logs").exists()
    stats = monitor.get_system_stats()
    assert set(stats) == {"gpu_memory", "cpu_memory", "cpu", "network", "disk"}
    assert stats["cpu_memory"] is stats["network"] is stats["gpu_memory"] is None


def test_system_stats_are_those_of_this_process(tmp_path):
    stats = TrainingMonitor(save_logs=False).get_system_stats()
    held = torch.ones(30_000_000)
    more = TrainingMonitor(save_logs=False).get_system_stats()
    assert more["cpu_memory"]["process_bytes"] - stats["cpu_memory"]["process_bytes"] > 0.9 * held.numel() * 4
    assert stats["gpu_memory"] == [] or stats["gpu_memory"][0]["total_bytes"] > 0
    assert stats["disk"]["free_bytes"] > 0


@pytest.mark.parametrize(
    ("act", "argument"),
    [
        (lambda: TrainingMonitor(save_logs=False).track_metric("loss", "high", 1), "value"),
        (lambda: TrainingMonitor(save_logs=False).track_metric("loss", [1, 2], 1), "value"),
        (lambda: TrainingMonitor(save_logs=False).add_callback("a", 3), "fn"),
    ],
)
def test_wrong_arguments_of_monitors_are_refused(act, argument):
    with pytest.raises(TrainingError) as error:
        act()
    assert (error.value.code, error.value.argument) == ("FG522", argument)


def test_unequal_memory_and_a_full_gpu_are_reported_once(caplog):
    callback = ResourceMonitorCallback(gpu_memory_threshold=0.9, alert_on_imbalance=True)
    reported = []
    callback._report = reported.append
    gib = 2**30
    for step in range(3):
        callback._look(step, [0.5, 0.95], [4 * gib, 8 * gib])
    callback._look(3, [0.5, 0.5], [4 * gib, 4.1 * gib])
    callback._look(4, [0.97, 0.5], [4 * gib, 4.1 * gib])
    assert [(one["step"], one["kind"]) for one in reported] == [
        (0, "gpu memory"),
        (0, "memory imbalance"),
        (4, "gpu memory"),
    ]
    assert "95% of the memory of the GPU of rank 1 is in use" in caplog.text
    assert "rank 1 uses 8.0 GiB, and rank 0 4.0 GiB" in caplog.text


def test_a_rank_that_cannot_measure_its_memory_answers_the_others_nevertheless(caplog):
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    # A stage of a pipeline may have no parameter.
    ResourceMonitorCallback().on_log(None, state, None, logs={"loss": 1.0}, model=nn.Identity())
    assert "the memory of rank 0 cannot be measured, so that none is compared" in caplog.text
    assert "failed" not in caplog.text


def test_a_rank_whose_monitor_could_not_begin_answers_the_others_nevertheless(tmp_path, caplog):
    callback = DistributedMonitorCallback(run_dir=tmp_path)
    state = SimpleNamespace(is_world_process_zero=True, global_step=3)
    # `on_train_begin` failed: nothing was made.
    for step in range(2500):
        callback.on_step_record(None, state, None, record=StepRecord(step=step, loss=1.0), report=None)
    assert (1000, 2500) == (len(callback._records), callback._num_steps)
    args = SimpleNamespace(process_index=0)
    callback.on_log(args, state, None, logs={"loss": 1.0}, model=nn.Linear(1, 1))
    # The figures were taken for the exchange.
    assert (0, 0) == (len(callback._records), callback._num_steps)
    assert "failed" not in caplog.text


# -- profile -----------------------------------------------------------------------------------------------------------


def test_the_argument_profile_writes_a_trace_and_a_table_of_operators(tmp_path):
    run(tmp_path, [JsonLogger(), RunSummaryCallback()], profile={"wait": 2, "warmup": 1, "active": 2})
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))
    steps = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    facts = json.loads((tmp_path / "profile" / "operators.json").read_text())
    assert facts["steps"] == 2
    times = {row["name"]: row["self_cpu_us"] for row in facts["operators"]}
    assert times["aten::mm"] > 0
    assert list(times.values()) == sorted(times.values(), reverse=True)
    page = (tmp_path / "report.html").read_text()
    assert "<summary>Operators</summary>" in page and "<td>aten::mm</td>" in page


def test_a_run_that_is_too_short_says_what_was_recorded(tmp_path, caplog):
    run(tmp_path / "a", [ProfileCallback(4, 1, 5)])
    assert "profile: the run has 6 steps, and wait, warmup and active are 10 together" in caplog.text
    assert json.loads((tmp_path / "a" / "profile" / "operators.json").read_text())["steps"] == 1
    run(tmp_path / "b", [ProfileCallback(10, 1, 5)])
    assert "profile: nothing was recorded: the run had 6 steps, and wait and warmup are 11" in caplog.text
    assert not (tmp_path / "b" / "profile").exists()


def test_wrong_numbers_of_steps_are_refused():
    for wrong in ({"wait": -1}, {"active": 0}, {"warmup": 1.5}):
        with pytest.raises(TrainingError) as error:
            ProfileCallback(**wrong)
        assert (error.value.code, error.value.argument) == ("FG813", next(iter(wrong)))
    with pytest.raises(TrainingError, match="wait"):
        TrainingArguments("out", profile={"wait": -1})
    with pytest.raises(TrainingError, match="wiat"):
        TrainingArguments("out", profile={"wiat": 1})


# -- memory ------------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """A model whose memory follows from its shapes."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(100, 1000, bias=False)
        self.second = nn.Linear(1000, 10, bias=False)

    def forward(self, x):
        return self.second(self.first(x).relu()).square().mean()


class Ones(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"x": torch.ones(100)}


def test_memory_by_module_is_that_of_its_shapes(tmp_path):
    profiler = MemoryProfiler()
    args = TrainingArguments(
        str(tmp_path / "out"),
        logging_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=3,
        save_strategy="no",
        use_cpu=True,
    )
    Trainer(Wide(), args, train_dataset=Ones(), callbacks=[profiler]).train()
    report = profiler.get_memory_report()
    found = {row["name"]: row for row in report["modules"]}
    # Adam: two moments as large as the weight, and a counter.
    assert found["first"]["weight_bytes"] == found["first"]["gradient_bytes"] == 100 * 1000 * 4
    assert found["first"]["optimizer_bytes"] == 2 * 100 * 1000 * 4 + 4
    # The input of each layer; the output of `relu` is saved by it and by the second layer, and stored once.
    assert found["first"]["saved_activation_bytes"] == 4 * 100 * 4
    assert found[""]["saved_activation_bytes"] == 4 * 1000 * 4 + 4 * 10 * 4
    assert "second" in found and found["second"]["saved_activation_bytes"] == 0
    assert json.loads((tmp_path / "memory.json").read_text())["modules"] == report["modules"]
    assert "a snapshot of allocations, which only CUDA has" in str(report)


def test_the_peak_of_a_phase_is_measured_by_itself():
    profiler = MemoryProfiler()
    profiler.profile_training("cpu")
    if peak_since_last(torch.device("cpu")) is None:
        pytest.skip("this system does not report peaks")
    with profiler.phase("large"):
        torch.ones(50_000_000).sum()
    with profiler.phase("small"):
        torch.ones(1000).sum()
    phases = profiler.get_memory_report()["phases"]
    assert phases["large"] - phases["small"] > 150_000_000
    assert memory_facts(torch.device("cpu"))["memory_bytes"] > 0


class Hungry(nn.Module):
    """A model that asks for more memory than any machine has, at the third step."""

    def __init__(self):
        super().__init__()
        self.hungry_weight = nn.Parameter(torch.ones(3_000_000))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            torch.empty(2**50)
        return self.hungry_weight.square().mean() * x.mean()


def test_an_out_of_memory_error_names_the_largest_tensors(tmp_path):
    args = TrainingArguments(
        str(tmp_path / "out"), logging_dir=str(tmp_path), max_steps=4, save_strategy="no", use_cpu=True
    )
    with pytest.raises(RuntimeError) as error:
        Trainer(Hungry(), args, train_dataset=Ones()).train()
    assert is_out_of_memory(error.value)
    (note,) = [note for note in error.value.__notes__ if note.startswith("the largest tensors at the error: ")]
    assert "hungry_weight (11.4 MiB)" in note and "exp_avg of hungry_weight (11.4 MiB)" in note
    other = ValueError("no")
    assert not is_out_of_memory(other)
    note_largest_tensors(other, nn.Linear(2, 2), None)


# -- the report --------------------------------------------------------------------------------------------------------


def test_the_report_has_ranks_and_memory(tmp_path):
    run(tmp_path, [JsonLogger(), DistributedMonitorCallback(), MemoryProfiler(), RunSummaryCallback()])
    page = (tmp_path / "report.html").read_text()
    for words in ("<summary>Ranks</summary>", "<summary>Memory by phase and module</summary>", "peak, resident memory"):
        assert words in page or words.replace("<summary>", "").replace("</summary>", "") in page
    assert "forward, backward (ms)" in page


def test_files_of_monitors_that_anybody_wrote_harm_no_report(tmp_path):
    (tmp_path / "profile").mkdir()
    bad = ['{"step": 1, "ranks": 3}', '{"step": 2, "ranks": [4, {"rank": "<b>", "communication": {"a": 1}}]}']
    (tmp_path / "ranks.jsonl").write_text("\n".join(bad) + "\n")
    (tmp_path / "profile" / "operators.json").write_text('{"operators": [1, {"name": "<script>", "self_cpu_us": "x"}]}')
    (tmp_path / "memory.json").write_text('{"phases": [], "modules": [2], "not_measured": 4}')
    lines = [
        '{"step": 1, "loss": 2.0}',
        '{"step": "x", "event": "anomaly"}',
        '{"step": 1, "event": "<i>", "message": "<u>"}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = write_report(tmp_path).read_text()
    assert "<b>" not in page.split("<summary>Ranks")[1].split("</details>")[0]
    assert "<u>" not in page and "<i>" not in page.split("</style>")[1].split('class="card chart')[0]
    assert [event["event"] for event in read_facts(tmp_path).events] == ["anomaly", "<i>"]
    assert set(read_facts(tmp_path).series) == {"loss"}


class Breaks(TrainerCallback):
    """A monitor of the user that fails at each record of a step."""

    def on_step_record(self, *args, **kwargs):
        raise ValueError("broken monitor")


def test_a_callback_of_the_user_that_fails_is_named(tmp_path):
    with pytest.raises(ValueError, match="broken monitor") as error:
        run(tmp_path, [Breaks()])
    assert any("Breaks.on_step_record, step 1" in note for note in error.value.__notes__)


def test_a_run_whose_folder_cannot_be_written_trains_on(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    place = tmp_path / "file" / "run"
    callbacks = [
        DistributedMonitorCallback(run_dir=place),
        MemoryProfiler(run_dir=place),
        ProfileCallback(1, 1, 1, run_dir=place),
        TrainingMonitor(1, log_dir=place),
    ]
    caplog.set_level(logging.WARNING)
    assert run(tmp_path / "run", callbacks).state.global_step == 6
    assert "cannot be written" in caplog.text
