"""Tiny runs in every layout, to which requests are sent at chosen steps through their own socket or request folder.

Takes a layout and a script, which maps a step to the requests that are sent while it is computed; gives the losses, the
final weights and the answers. A request is with the run before the step goes on, so that it is done at the end of the
step, on every machine.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch.distributed as dist

from forgather import control_listener
from forgather.launch.control_client import send_request
from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.callbacks import TrainerCallback
from forgather.ml.callbacks.metrics import JsonLogger
from forgather.ml.callbacks.summary import RunSummaryCallback
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.run_control import Action, Request
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import Noisy, rows, tiny_llama
from tests.patience import patience
from tests.runs.test_control_listener import asked

STEPS = 12


def _stages(schedule, stages=1, **given):
    return {"split_spec": "auto", "schedule_class": schedule, "stages_per_rank": stages, "pipeline_chunks": 4, **given}


ACCEL, PIPELINE = (AccelTrainer, AccelTrainingArguments), (PipelineTrainer, PipelineTrainingArguments)
# Processes, rows of a replica, trainer with its arguments, settings.
LAYOUTS = {
    "one": (1, 4, (Trainer, TrainingArguments), {}),
    "DDP 2": (2, 2, ACCEL, {}),
    "DDP 4": (4, 1, ACCEL, {}),
    "FSDP2 2": (2, 2, ACCEL, {"fsdp": "full_shard"}),
    "FSDP2 4": (4, 1, ACCEL, {"fsdp": "full_shard"}),
    "hybrid 4": (4, 1, ACCEL, {"fsdp": "hybrid_shard", "fsdp_config": {"shard_size": 2}}),
    "TP 2": (2, 4, ACCEL, {"tensor_parallel_size": 2}),
    "DP x TP 4": (4, 2, ACCEL, {"tensor_parallel_size": 2}),
    "ZeRO-1 2": (2, 2, ACCEL, {"deepspeed": {"zero_optimization": {"stage": 1}}}),
    "ZeRO-2 2": (2, 2, ACCEL, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    "ZeRO-3 2": (2, 2, ACCEL, {"deepspeed": {"zero_optimization": {"stage": 3}}}),
    "1F1B 2": (2, 4, PIPELINE, _stages("Schedule1F1B")),
    "1F1B 4": (4, 4, PIPELINE, _stages("Schedule1F1B")),
    "interleaved 2": (2, 4, PIPELINE, _stages("ScheduleInterleaved1F1B", 2)),
    "DP x PP 4": (4, 2, PIPELINE, _stages("Schedule1F1B", pipeline_parallel_size=2, pipeline_chunks=2)),
}


def ask(action, **settings):
    return Request(action=Action(action), settings=settings)


class Asks(TrainerCallback):
    """Sends the requests of a script; those after a pause are sent when the run is paused."""

    def __init__(self, script):
        self.script, self.answers, self._threads = script, [], []

    def on_step_begin(self, args, state, control, **kwargs):
        requests = self.script.get(state.global_step + 1, ())
        if requests and args.process_index == 0:
            # In a thread of its own: the answer comes at the end of the step.
            self._threads.append(threading.Thread(target=self._ask, args=(args.logging_dir, requests)))
            self._threads[-1].start()
            deadline = time.monotonic() + patience(20)
            while not any(listener.waiting for listener in control_listener._open):
                assert time.monotonic() < deadline, "the request has not arrived"
                time.sleep(0.001)

    def _ask(self, run_dir, requests):
        for request in requests:
            if isinstance(request, bytes):
                self.answers.append(asked(Path(run_dir), request))
            elif isinstance(request, signal.Signals):
                os.kill(os.getpid(), request)
            elif isinstance(request, float):
                time.sleep(request)
            else:
                self.answers.append(send_request(run_dir, request, timeout=patience(30), waiting=lambda passed: None))

    def join(self):
        for thread in self._threads:
            thread.join()


class Breaks(TrainerCallback):
    """Makes a weight infinite while a step is computed, once; the step is bad, and the weight is restored with it."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step + 1 == self.step:
            self.step = None
            next(model.parameters()).data.fill_(float("inf"))


class Timed(RunSummaryCallback):
    """A summary that also has the time from its beginning to its end."""

    def on_train_begin(self, args, state, control, **kwargs):
        self._began_at = time.monotonic()
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(self, args, state, control, **kwargs):
        super().on_train_end(args, state, control, **kwargs)
        self._summary["whole_seconds"] = time.monotonic() - self._began_at
        self._write(args)


def _counted(counts):
    """Counts the collectives of this process."""
    for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list", "all_gather", "barrier"):
        original = getattr(dist, name)

        def counting(*args, name=name, original=original, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return original(*args, **kwargs)

        setattr(dist, name, counting)


def part(folder, name, layout, script, given):
    """Trains as one of the processes; returns the answers (or the number of collectives), and whether it was stopped."""
    ranks, rows_of_rank, (trainer_class, arguments), settings = LAYOUTS[layout]
    given = dict(given)
    evaluates, has_summary = given.pop("evaluates", False), given.pop("summary", False)
    counts, breaks = {} if given.pop("counts", False) else None, given.pop("breaks", None)
    timeout = given.pop("timeout", patience(20))
    several = {} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=timeout)}
    if counts is not None:
        _counted(counts)
    run_dir = Path(folder, "runs", name)
    run_dir.mkdir(parents=True, exist_ok=True)
    common = {"max_steps": STEPS, "logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True, "save_steps": 100}
    args = arguments(
        str(folder),
        logging_dir=str(run_dir),
        per_device_train_batch_size=rows_of_rank,
        **{**common, **settings, **given},
    )
    asks = Asks(script)
    layers = 4 if "schedule_class" in settings else 2
    trainer = trainer_class(
        lambda: tiny_llama(num_hidden_layers=layers, num_key_value_heads=4),
        args,
        train_dataset=Noisy(13),
        eval_dataset=rows(5) if evaluates else None,
        callbacks=[
            asks,
            JsonLogger(),
            *([Timed(report=False)] if has_summary else []),
            *([Breaks(breaks)] if breaks else []),
        ],
        **several,
    )
    is_stopped = False
    try:
        trainer.train()
    except KeyboardInterrupt:
        is_stopped = True
    asks.join()
    return asks.answers if counts is None else counts, is_stopped


def run(folder, layout, script=None, *, name="run", **given):
    """Trains in a layout; returns the answers, and whether the run was stopped."""
    if layout.startswith("ZeRO"):
        import_engine()
    answers, stopped = zip(*run_ranks(LAYOUTS[layout][0], part, folder, name, layout, script or {}, given), strict=True)
    assert len(set(stopped)) == 1, "the processes end alike"
    return answers[0], stopped[0]


def losses(folder, name="run"):
    return Path(folder, "runs", name, "loss.jsonl").read_bytes()


def events(folder, name="run"):
    lines = map(json.loads, Path(folder, "runs", name, "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["action"]) for line in lines if line.get("event") == "control"]


def final_weights(folder):
    return dict(whole_weights(Path(folder, f"checkpoint-{STEPS}")))
