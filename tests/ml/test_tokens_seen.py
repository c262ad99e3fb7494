"""The number of input tokens that were seen is that of transformers' own trainer."""

import pytest
import torch
import transformers

from forgather.ml import Trainer
from tests.ml.fixtures import Recorder, StopAt, rows, tiny_llama


def masked_rows():
    made = []
    for number, row in enumerate(rows()):
        mask = torch.ones_like(row["input_ids"])
        mask[12 - number :] = 0
        made.append({**row, "attention_mask": mask})
    return made


GIVEN = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "num_train_epochs": 2,
    "logging_steps": 1,
    "train_sampling_strategy": "sequential",
}


def seen(lines):
    return [line["num_input_tokens_seen"] for line in lines if "loss" in line]


@pytest.mark.parametrize("word", ["all", "non_padding", True])
def test_the_tokens_of_each_line_are_those_of_transformers(settings, tmp_path, word):
    theirs = Recorder()
    arguments = transformers.TrainingArguments(
        str(tmp_path / "theirs"),
        **GIVEN,
        use_cpu=True,
        include_num_input_tokens_seen=word,
        report_to=[],
        disable_tqdm=True,
    )
    transformers.Trainer(tiny_llama(), arguments, train_dataset=masked_rows(), callbacks=[theirs]).train()
    ours = Recorder()
    args = settings(**GIVEN, logging_strategy="steps", include_num_input_tokens_seen=word)
    Trainer(tiny_llama(), args, train_dataset=masked_rows(), callbacks=[ours]).train()
    assert seen(theirs.lines) == seen(ours.lines)
    assert (2 * 8 * 12 if word != "non_padding" else 2 * sum(range(5, 13))) == ours.lines[-1]["num_input_tokens_seen"]


def test_a_resumed_run_goes_on_with_the_number(settings):
    given = {**GIVEN, "logging_strategy": "steps", "save_strategy": "steps", "save_steps": 2}
    whole, resumed = Recorder(), Recorder()
    args = settings(**given, include_num_input_tokens_seen="non_padding")
    Trainer(tiny_llama(), args, train_dataset=masked_rows(), callbacks=[whole]).train()
    Trainer(tiny_llama(), args, train_dataset=masked_rows(), callbacks=[StopAt(2)]).train()
    again = Trainer(tiny_llama(), args, train_dataset=masked_rows(), callbacks=[resumed])
    again.train(resume_from_checkpoint=f"{args.output_dir}/checkpoint-2")
    assert seen(whole.lines)[2:] == seen(resumed.lines)


def test_lines_have_no_number_without_the_setting(settings):
    heard = Recorder()
    args = settings(**GIVEN, logging_strategy="steps")
    trainer = Trainer(tiny_llama(), args, train_dataset=masked_rows(), callbacks=[heard])
    trainer.train()
    assert not any("num_input_tokens_seen" in line for line in heard.lines)
    assert 2 * 8 * 12 == trainer.state.num_input_tokens_seen
