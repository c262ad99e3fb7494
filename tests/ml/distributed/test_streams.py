"""Streams on several processes: the weights of one process, each row read by one rank, epochs that end together."""

import json
import shutil

import pytest
import torch

from forgather.ml import AccelTrainer, PipelineTrainer, Trainer, TrainingArguments
from forgather.ml.data import json_lines, tokenize
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments, PipelineTrainingArguments
from tests.matrix import thinned
from tests.ml.chat_cases import byte_pairs
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import StopAt, tiny_llama

KINDS = {
    "single": (Trainer, TrainingArguments, {}),
    "DDP": (AccelTrainer, AccelTrainingArguments, {}),
    "FSDP2": (AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "tensor parallel": (AccelTrainer, AccelTrainingArguments, {"tensor_parallel_size": 2}),
    "pipeline": (
        PipelineTrainer,
        PipelineTrainingArguments,
        {"split_spec": "auto", "schedule_class": "Schedule1F1B", "pipeline_parallel_size": 2, "pipeline_chunks": 2},
    ),
}


def text_file(folder, bad):
    file = folder / "texts.jsonl"
    lines = [json.dumps({"text": f"{one} " + "ab" * (one % 11)}) for one in range(90)]
    for number in bad:
        lines[number] = "{"
    file.write_text("".join(line + "\n" for line in lines))
    return str(file)


def losses(folder, kind, rows, stop=None, bad=(), **given):
    """Returns the loss of each step, of which the last ones are in the second epoch, and the final metrics."""
    torch.manual_seed(0)
    tokenizer = byte_pairs()
    data = tokenize(json_lines(text_file(folder, bad), streaming=True, buffer_size=40), tokenizer, 32)
    trainer_class, arguments, settings = KINDS[kind]
    args = arguments(
        str(folder / "out"),
        **{
            "per_device_train_batch_size": rows,
            "max_steps": 10,
            "data_streams": 4,
            "use_cpu": True,
            "save_strategy": "steps" if stop else "no",
            "save_steps": 1,
            "logging_steps": 1,
            "learning_rate": 1e-2,
            "report_to": "none",
            **settings,
            **given,
        },
    )
    model = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2)
    trainer = trainer_class(model, args, train_dataset=data, callbacks=[StopAt(stop)] if stop else [])
    output = trainer.train(resume_from_checkpoint=given.get("resume_from_checkpoint"))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], output.metrics


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found, _ = losses(tmp_path_factory.mktemp("alone"), "single", 8)
    return found


CASES = [("DDP", 2, 4), ("DDP", 4, 2), ("FSDP2", 2, 4), ("pipeline", 2, 8), ("pipeline", 4, 4)]


@pytest.mark.parametrize(("kind", "ranks", "rows"), thinned(CASES, lambda kind, ranks, rows: ranks == 2))
def test_every_strategy_has_the_steps_of_one_process_also_across_epochs(alone, kind, ranks, rows, tmp_path):
    for found, _ in run_ranks(ranks, losses, tmp_path, kind, rows):
        assert alone == pytest.approx(found, rel=2e-5)


def test_a_run_goes_on_with_other_ranks(alone, tmp_path):
    """From two ranks to one and to four: each goes on where the streams of the others were."""
    run_ranks(2, losses, tmp_path, "DDP", 4, 3)
    shutil.copytree(tmp_path / "out", tmp_path / "kept")
    found, _ = losses(tmp_path, "single", 8, resume_from_checkpoint=True)
    assert alone == pytest.approx(found, rel=2e-5)
    shutil.rmtree(tmp_path / "out")
    shutil.move(tmp_path / "kept", tmp_path / "out")
    for found, _ in run_ranks(4, resumed, tmp_path):
        assert alone == pytest.approx(found, rel=2e-5)


def resumed(folder):
    return losses(folder, "DDP", 2, resume_from_checkpoint=True)


def test_the_same_bad_rows_are_left_out_on_two_ranks(tmp_path):
    options = {"bad_rows": "skip"}
    expected, one = losses(tmp_path, "single", 8, bad=(7, 61), **options)
    for found, metrics in run_ranks(2, bad_losses, tmp_path):
        assert expected == pytest.approx(found, rel=2e-5)
        assert one["bad_rows"] == metrics["bad_rows"] > 0


def bad_losses(folder):
    return losses(folder, "DDP", 4, bad=(7, 61), bad_rows="skip")


@pytest.mark.parametrize("kind", thinned(["tensor parallel", "pipeline"], lambda kind: kind == "pipeline"))
def test_a_bad_row_counts_once_however_many_ranks_of_a_replica_read_it(tmp_path, kind):
    expected, one = losses(tmp_path, "single", 8, bad=(7, 61), bad_rows=2)
    for found, metrics in run_ranks(2, counted_losses, tmp_path, kind):
        assert expected == pytest.approx(found, rel=2e-5)
        assert one["bad_rows"] == metrics["bad_rows"] > 0


def counted_losses(folder, kind):
    return losses(folder, kind, 8, bad=(7, 61), bad_rows=2)
