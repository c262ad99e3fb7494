"""Numbers, images, texts and tables that user code logs: where they arrive, and what is refused by name."""

import csv
import json
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from forgather.errors import TrainingError
from forgather.ml.callbacks import JsonLogger, TBLogger, TrainerCallback
from forgather.ml.tracking import log, log_image, log_table, log_text, receiving
from tests.ml import callback_scene as scene


class Own(TrainerCallback):
    def __init__(self, stops_after=0):
        self.stops_after = stops_after

    def on_step_end(self, args, state, control, **kwargs):
        log({"own/share": torch.tensor(state.global_step / 10)}, second=2)
        if state.global_step == 2:
            log_text("words/first", "hello api_key=planted-3f9a7c21")
            log_table("scores", ["a", "b"], [[1, "x|y"], [2.5, None]])
            log_image("dot", np.eye(4))
        if state.global_step == self.stops_after:
            control.should_training_stop = True


def own_lines(folder):
    lines = [json.loads(line) for file in folder.rglob("metrics.jsonl") for line in file.read_text().splitlines()]
    return [(line["step"], line["own/share"], line["second"]) for line in lines if "second" in line]


@pytest.mark.parametrize("kind", ["ours", "hf"])
def test_what_user_code_logs_is_in_the_metrics_the_files_and_the_trackers(tmp_path, kind):
    run = tmp_path / "run"
    callbacks = [JsonLogger(run_dir=run), TBLogger(run_dir=run), Own()]
    trainer = scene.trainer(kind, tmp_path, callbacks, {"optimizer_factory": None}, max_steps=3, eval_strategy="no")
    trainer.train()

    assert [1, 2, 3] == [step for step, _, _ in own_lines(run)]
    assert [0.1, 0.2, 0.3] == pytest.approx([share for _, share, _ in own_lines(run)])
    # `loss.jsonl` is compared byte by byte, and what user code logs may be a time.
    assert "second" not in (run / "loss.jsonl").read_text()

    logged = next(tmp_path.rglob("logged"))
    assert "hello api_key=(hidden)" == (logged / "words/first-step-2.txt").read_text()
    table = (logged / "scores-step-2.csv").read_text().splitlines()
    assert [["a", "b"], ["1", "x|y"], ["2.5", ""]] == list(csv.reader(table))
    with Image.open(logged / "dot-step-2.png") as dot:
        assert [255, 0, 0, 0] == list(np.asarray(dot)[0])

    events = EventAccumulator(str(run)).Reload()
    assert [1, 2, 3] == [event.step for event in events.Scalars("train/own/share")]
    assert [2] == [event.step for event in events.Images("dot")]
    (table,) = events.Tensors("scores/text_summary")
    assert b"| a | b |\n| --- | --- |\n| 1 | x\\|y |" in table.tensor_proto.string_val[0]


def test_a_resumed_run_has_each_number_once(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "no"}
    scene.trainer("ours", tmp_path, [JsonLogger(run_dir=tmp_path / "one"), Own(stops_after=3)], **saves).train()
    resumed = scene.trainer("ours", tmp_path, [JsonLogger(run_dir=tmp_path / "two"), Own()], **saves)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [1, 2, 3, 4] == [step for step, _, _ in own_lines(tmp_path / "two")]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: log({"answer": "yes"}), "answer is 'yes', which is not a number"),
        (lambda: log(step=3), "'step' is a key that each line of metrics has already"),
        (lambda: log(many=torch.zeros(2)), "many is tensor([0., 0.]), which is not a number"),
        (lambda: log(good=True), "good is True, which is not a number"),
        (lambda: log_table("t", ["a"], [[1], [1, 2]]), "row 1 has 2 values, and there are 1 columns"),
        (lambda: log_text("../outside", "x"), "'../outside' cannot be the name of a file"),
        (lambda: log_image("i", np.zeros((2, 2, 2))), "ndarray of shape (2, 2, 2)"),
        (lambda: log_image("i", torch.full((2, 2), torch.nan)), "Tensor of shape torch.Size([2, 2])"),
        (lambda: log_image("i", "words"), "found str of shape ?"),
    ],
)
def test_what_cannot_be_logged_is_refused_by_name(tmp_path, call, words):
    with receiving(lambda: 1, tmp_path, lambda logged: None), pytest.raises(TrainingError) as raised:
        call()
    assert "FG587" == raised.value.code
    assert words in str(raised.value)


def test_outside_of_a_run_nothing_can_be_logged(tmp_path):
    def refused():
        with pytest.raises(TrainingError, match="no run is going on") as raised:
            log(number=1)
        assert "FG586" == raised.value.code
        found.append(1)

    found = []
    refused()
    with receiving(lambda: 1, tmp_path, lambda logged: None):
        thread = threading.Thread(target=refused)
        thread.start()
        thread.join()
    assert [1, 1] == found


def test_a_process_that_does_not_report_writes_nothing(tmp_path):
    with receiving(lambda: 1, tmp_path, None):
        log(number=1)
        log_text("words", "hello")
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("image", "size"),
    [
        (torch.rand(3, 2, 5, dtype=torch.bfloat16), (5, 2)),
        (np.zeros((2, 5, 1), dtype=np.uint8), (5, 2)),
        (Image.new("RGB", (5, 2)), (5, 2)),
    ],
)
def test_an_image_may_be_a_tensor_an_array_or_one_of_pillow(tmp_path, image, size):
    with receiving(lambda: 7, tmp_path, lambda logged: None):
        log_image("seen", image)
    with Image.open(tmp_path / "logged/seen-step-7.png") as written:
        assert size == written.size


def test_a_folder_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    (tmp_path / "logged").write_text("not a folder")
    with receiving(lambda: 1, tmp_path, lambda logged: None):
        log_text("words", "hello")
    assert "cannot be written" in caplog.text
