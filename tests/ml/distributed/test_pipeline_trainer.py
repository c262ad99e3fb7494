"""`PipelineTrainer` end to end on gloo ranks: evaluation, checkpoints, text, the model as transformers reads it."""

import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgather.errors import ForgatherError
from forgather.ml import PipelineTrainer, PipelineTrainingArguments, Trainer, TrainingArguments
from forgather.ml.callbacks import RunSummaryCallback, TextSampleCallback
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.distributed.env import DistributedEnvironment
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.pipeline_runs import VOCAB, make_gpt2, make_llama, make_tied_llama
from tests.ml.fixtures import Recorder
from tests.patience import patience

MODELS = {"llama": make_llama, "gpt2": make_gpt2, "tied": make_tied_llama}


def rows(count, length=10):
    generator = torch.Generator().manual_seed(5)
    made = []
    for number in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[length - (number * 3) % (length - 2) :] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def settings_of(folder, **settings):
    common = {
        "output_dir": str(folder),
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "use_cpu": True,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": 2,
        "per_device_eval_batch_size": 3,
    }
    return {**common, **settings}


def run(trainer_class, arguments, model, callbacks=(), resume=None):
    recorder = Recorder()
    trainer = trainer_class(
        MODELS[model],
        arguments,
        train_dataset=rows(21),
        eval_dataset=rows(7),
        callbacks=[recorder, *callbacks],
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20)),
    )
    trainer.train(resume)
    return [{key: line[key] for key in ("loss", "grad_norm", "eval_loss") if key in line} for line in recorder.lines]


def _pipelined(folder, model, settings, resume=None):
    return run(PipelineTrainer, PipelineTrainingArguments(**settings_of(folder, **settings)), model, resume=resume)


PIPELINE = {"per_device_train_batch_size": 4, "pipeline_chunks": 4, "schedule_class": "ScheduleZBVZeroBubble"}


@pytest.mark.parametrize("model", thinned(["llama", "gpt2"], lambda model: model == "gpt2"))
def test_a_run_is_that_of_one_process_and_its_model_is_read_by_transformers(tmp_path, model):
    single = TrainingArguments(**settings_of(tmp_path / "one", per_device_train_batch_size=4))
    want = run(Trainer, single, model)
    found = run_ranks(2, _pipelined, tmp_path / "two", model, PIPELINE)
    for lines in found:
        assert [sorted(line) for line in want] == [sorted(line) for line in lines]
        for one, other in zip(want, lines, strict=True):
            assert one == pytest.approx(other, rel=1e-9)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two", dtype=torch.float64).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float64).state_dict()
    assert list(expected) == list(loaded)
    assert all(torch.allclose(expected[name], loaded[name], rtol=1e-7, atol=1e-10) for name in expected)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("one", "two")]
    assert configs[0] == configs[1]


def test_a_run_is_resumed_under_another_schedule_and_by_one_process(tmp_path):
    whole = run_ranks(2, _pipelined, tmp_path / "whole", "gpt2", {**PIPELINE, "max_steps": 4})[0]
    half = str(tmp_path / "whole" / "checkpoint-2")
    other = {**PIPELINE, "schedule_class": "Schedule1F1B", "data_parallel_size": 2, "per_device_train_batch_size": 2}
    again = run_ranks(4, _pipelined, tmp_path / "again", "gpt2", {**other, "pipeline_chunks": 2}, half)[0]
    one = run(
        Trainer, TrainingArguments(**settings_of(tmp_path / "one", per_device_train_batch_size=4)), "gpt2", (), half
    )
    for lines in (again, one):
        assert [line["loss"] for line in lines if "loss" in line] == pytest.approx(
            [line["loss"] for line in whole if "loss" in line][2:], rel=1e-9
        )
    weights = [dict(whole_weights(tmp_path / name / "checkpoint-4")) for name in ("whole", "again", "one")]
    for name, value in weights[0].items():
        assert all(torch.allclose(value, other[name], rtol=1e-7, atol=1e-10) for other in weights[1:])


class Letters:
    """As much of a tokenizer as text samples need."""

    eos_token_id = bos_token_id = 0
    pad_token_id = None

    def __call__(self, text):
        return {"input_ids": [ord(letter) % VOCAB for letter in text]}

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(str(int(number)) for number in ids)


def _samples(folder, trainer_class, arguments_class, settings):
    sampler = TextSampleCallback(["ab", "c"], Letters(), max_new_tokens=5, run_dir=folder)
    run(trainer_class, arguments_class(**settings_of(folder, save_strategy="no", **settings)), "gpt2", [sampler])
    return True


@pytest.mark.matrix
def test_text_samples_are_those_of_one_process(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    run_ranks(1, _samples, tmp_path / "one", Trainer, TrainingArguments, {"per_device_train_batch_size": 4})
    run_ranks(2, _samples, tmp_path / "two", PipelineTrainer, PipelineTrainingArguments, PIPELINE)
    written = []
    for name in ("one", "two"):
        lines = (tmp_path / name / "samples.jsonl").read_text().splitlines()
        written.append([{**json.loads(line), "time": 0} for line in lines])
    assert written[0] == written[1]


def _summarized(folder, trainer_class, arguments_class, settings):
    arguments = arguments_class(**settings_of(folder, **settings, max_steps=1, save_strategy="no"))
    run(trainer_class, arguments, "tied", [RunSummaryCallback(report=False, run_dir=folder)])
    return json.loads((folder / "summary.json").read_text())["model"]


@pytest.mark.parametrize("sizes", thinned([{}, {"tensor_parallel_size": 2}], lambda sizes: not sizes), ids=str)
def test_the_summary_tells_of_the_whole_model(tmp_path, sizes):
    want = _summarized(tmp_path / "one", Trainer, TrainingArguments, {})
    ranks = 2 * sizes.get("tensor_parallel_size", 1)
    settings = {"per_device_train_batch_size": 2, "pipeline_parallel_size": 2, **sizes}
    model = run_ranks(ranks, _summarized, tmp_path / "two", PipelineTrainer, PipelineTrainingArguments, settings)[0]
    assert {name: want[name] for name in ("class", "num_parameters", "num_trainable")} == {
        name: model[name] for name in ("class", "num_parameters", "num_trainable")
    }


def _layout(folder, settings):
    args = PipelineTrainingArguments(**settings_of(folder, per_device_train_batch_size=4, **settings))
    environment = DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))
    return PipelineTrainer(make_llama, args, train_dataset=rows(16), distributed_env=environment).layout


def test_a_run_says_who_holds_what(tmp_path):
    settings = {"data_parallel_size": 2, "split_spec": {"layer.1": "end"}}
    lines = run_ranks(4, _layout, tmp_path, settings)[0]

    assert "layout     pipeline 2 x replicate 2  (ScheduleGPipe)" == lines[0]
    assert lines[1].startswith("  stage 0: model.embed_tokens, blocks 0 to 1")
    assert lines[2].endswith("(rank 1 of each pipeline)")


def _refused(folder, settings):
    with pytest.raises(ForgatherError) as caught:
        _layout(folder, settings)
    return caught.value.argument


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({"split_spec": {"layer.40": "end"}}, "args.split_spec"),
        ({"data_parallel_size": 3}, "args.data_parallel_size"),
    ],
)
def test_what_is_refused_names_the_setting_where_it_is_written(tmp_path, settings, argument):
    assert [argument] * 2 == run_ranks(2, _refused, tmp_path, settings)


def _warned_of(folder):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("forgather").addHandler(handler)
    dynamic = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    PipelineTrainer(
        lambda: make_llama(max_position_embeddings=8, **dynamic),
        PipelineTrainingArguments(
            str(folder), use_cpu=True, max_steps=2, save_steps=1, per_device_train_batch_size=4, pipeline_chunks=4
        ),
        train_dataset=rows(8),
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20)),
    ).train()
    return {code: [line for line in lines if code in line] for code in ("[FG797]", "[FG886]")}


def test_a_stage_warns_of_what_depends_on_parts_of_a_batch_and_of_what_no_checkpoint_holds(tmp_path):
    for stage, warnings in enumerate(run_ranks(2, _warned_of, tmp_path)):
        (unsaved,) = warnings["[FG797]"]
        assert (
            f"[rank {stage}] [FG797] training changes the buffer local.stages.{stage}.model.rotary_emb.inv_freq of LlamaForCausalLM"
            in unsaved
        )
        if stage == 0:
            (divided,) = warnings["[FG886]"]
            assert "type 'dynamic'" in divided and "4 parts of a micro-batch" in divided


def _forward_passes(folder, schedule):
    """Returns how often a block is computed for a micro-batch, for the blocks of all stages but the first."""
    given = {"schedule_class": schedule, "checkpoint_sequential": True, "pipeline_chunks": 4}
    trainer = PipelineTrainer(
        lambda: make_llama(num_hidden_layers=4),
        PipelineTrainingArguments(str(folder), use_cpu=True, max_steps=3, per_device_train_batch_size=4, **given),
        train_dataset=rows(12),
        distributed_env=DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20)),
    )
    counts = {}
    for name, module in trainer.strategy.local.named_modules():
        if name.endswith("mlp") and "layers.0." not in name:
            module.register_forward_pre_hook(lambda *_, name=name: counts.update({name: counts.get(name, 0) + 1}))
    trainer.train()
    return [count / 12 for count in counts.values()]


# 1 forward pass, 1 for the gradients of activations, and under the first two 1 for each weight of a block.
@pytest.mark.parametrize(
    ("schedule", "times"),
    thinned(
        [
            ("ScheduleInterleavedZeroBubble", 11),
            ("ScheduleZBVZeroBubble", 11),
            ("ScheduleDualPipeV", 4),
            ("ScheduleInterleaved1F1B", 2),
        ],
        lambda schedule, times: False,
    ),
)
def test_a_schedule_that_divides_backward_passes_recomputes_a_block_for_each_of_its_weights(schedule, times, tmp_path):
    counts = [count for found in run_ranks(2, _forward_passes, tmp_path, schedule) for count in found]
    assert 3 == len(counts)
    # For a new shape, the stages exchange their shapes in one more pass.
    assert all(times <= count < times + 1 for count in counts), counts
