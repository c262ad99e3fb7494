"""Adapters on several ranks: what a run stores and leaves behind is what one process would have stored."""

import shutil

import pytest
import torch
from peft import PeftModel
from torch.nn import functional as F

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.adapter_base import read_base
from forgather.ml.adapters import as_adapter
from forgather.ml.checkpoint.reader import whole_weights
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.models import from_pretrained
from forgather.ml.trained_adapter import TrainedAdapter
from forgather.ml.trainer.adapter_export import export_merged
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.saved_evaluation import evaluate_saved
from tests.matrix import thinned
from tests.ml.distributed.gang import RankFailed, import_engine, run_ranks
from tests.ml.fixtures import StopAt, largest_difference, rows, tiny_llama
from tests.patience import patience

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
ADAPTER = {"r": 2, "lora_alpha": 8, "modules_to_save": ["lm_head"], "trainable_token_indices": [3, 5]}
TIED = {"r": 2, "lora_alpha": 8, "trainable_token_indices": [3, 5]}
# With LoRA+, whose learning rates belong to names and dimensions of weights, which some strategies change.
COMMON = {"max_steps": 7, "logging_steps": 1, "learning_rate": 1e-3, "loraplus_lr_ratio": 4, "use_cpu": True}
# Processes, rows of a replica, trainer, arguments, settings.
LAYOUTS = {
    "one": (1, 4, Trainer, TrainingArguments, {}),
    "copies": (2, 2, AccelTrainer, AccelTrainingArguments, {}),
    "shards": (2, 2, AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "stages": (2, 4, PipelineTrainer, PipelineTrainingArguments, {"pipeline_chunks": 2}),
    "ZeRO-2": (2, 2, AccelTrainer, AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    "ZeRO-3": (2, 2, AccelTrainer, AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 3}}}),
}


def part(folder, base, layout, stop, adapter=ADAPTER):
    """Trains as one of the processes; returns the losses."""
    ranks, batch_size, trainer_class, arguments, given = LAYOUTS[layout]
    several = {} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}
    args = arguments(
        str(folder), per_device_train_batch_size=batch_size, **COMMON, save_strategy="steps", save_steps=2, **given
    )
    trainer = trainer_class(
        lambda: from_pretrained(base),
        args,
        train_dataset=rows(13),
        callbacks=[StopAt(4)] if stop else [],
        adapter=adapter,
        **several,
    )
    trainer.train(resume_from_checkpoint=True)
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def run(folder, base, layout, *, stop=False, adapter=ADAPTER):
    if layout.startswith("ZeRO"):
        import_engine()
    return run_ranks(LAYOUTS[layout][0], part, folder, base, layout, stop, adapter)[0]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(num_key_value_heads=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory, base):
    folder = tmp_path_factory.mktemp("alone")
    return folder, run(folder, base, "one")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, base):
    """Returns a function from a layout to the folder of a run in it that was stopped."""
    folders = {}

    def of(layout):
        if layout not in folders:
            folders[layout] = tmp_path_factory.mktemp("stopped")
            run(folders[layout], base, layout, stop=True)
        return folders[layout]

    return of


def logits(base, folder):
    model = PeftModel.from_pretrained(from_pretrained(base), folder).eval()
    with torch.no_grad():
        return model(input_ids=rows(2)[1]["input_ids"][None]).logits


@pytest.mark.parametrize(
    "layout", thinned([name for name in LAYOUTS if name != "one"], lambda layout: layout == "shards")
)
def test_a_stopped_run_goes_on_bit_for_bit_and_leaves_what_one_process_leaves(
    layout, alone, base, stopped, tmp_path, record_property
):
    whole = run(tmp_path / "whole", base, layout)
    shutil.copytree(stopped(layout), tmp_path / "stopped")
    assert whole == run(tmp_path / "stopped", base, layout)
    kept, found = (dict(whole_weights(tmp_path / name / "checkpoint-7")) for name in ("whole", "stopped"))
    assert largest_difference(kept, found) == 0
    folder, losses = alone
    assert losses == pytest.approx(whole, rel=1e-6)
    of_one = dict(whole_weights(folder / "checkpoint-7"))
    assert sorted(of_one) == sorted(kept)
    assert not any("base_layer" in name for name in kept)
    assert largest_difference(of_one, kept) <= 1e-6
    record_property("difference", float(largest_difference(of_one, kept)))
    assert read_base(folder) == read_base(tmp_path / "whole") == read_base(tmp_path / "stopped" / "checkpoint-7")
    assert float((logits(base, folder) - logits(base, tmp_path / "whole")).abs().max()) <= 1e-5
    refuse_unequal_merge(base, tmp_path / "whole", tmp_path / "merged")


def refuse_unequal_merge(base, folder, into):
    """Merges the adapter of a run's last checkpoint, and compares it with the adapter that the run left at its end."""
    adapter = TrainedAdapter(
        folder=folder / "checkpoint-7",
        is_checkpoint=True,
        make_base=lambda: from_pretrained(base),
        adapter=as_adapter(ADAPTER),
        seed=42,
    )
    export_merged(adapter, into)
    with torch.no_grad():
        merged = from_pretrained(into).eval()(input_ids=rows(2)[1]["input_ids"][None]).logits
    assert float((merged - logits(base, folder)).abs().max()) <= 1e-5


@pytest.mark.parametrize(
    ("first", "then"),
    thinned(
        [("one", "shards"), ("shards", "stages"), ("stages", "one"), ("ZeRO-3", "copies"), ("copies", "ZeRO-3")],
        lambda first, then: (first, then) == ("shards", "stages"),
    ),
)
def test_a_run_resumes_in_another_layout(first, then, alone, base, stopped, tmp_path, record_property):
    shutil.copytree(stopped(first), tmp_path / "out")
    run(tmp_path / "out", base, then)
    of_one, found = (dict(whole_weights(folder / "checkpoint-7")) for folder in (alone[0], tmp_path / "out"))
    assert largest_difference(of_one, found) <= 1e-6
    record_property("difference", float(largest_difference(of_one, found)))
    refuse_unequal_merge(base, tmp_path / "out", tmp_path / "merged")


def loss_of_saved(folder, base, layout, adapter):
    """Evaluates the final folder of a run as one of the processes; returns the loss."""
    ranks, batch_size, trainer_class, arguments, given = LAYOUTS[layout]
    several = {} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}
    args = arguments(str(folder.parent / "eval"), per_device_eval_batch_size=batch_size, **COMMON, **given)
    trainer = trainer_class(
        lambda: from_pretrained(base), args, eval_dataset=rows(5, seed=2), adapter=adapter, **several
    )
    return evaluate_saved(trainer, str(folder), is_checkpoint=False)["metrics"]["eval_loss"]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", ["copies", "shards", "ZeRO-2", "ZeRO-3"])
def test_trained_rows_of_tied_embeddings_are_those_of_one_process(layout, tmp_path):
    tiny_llama(num_key_value_heads=4, tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    expected, found = (run(tmp_path / name, tmp_path / "base", name, adapter=TIED) for name in ("one", layout))
    assert expected == pytest.approx(found, rel=1e-6)
    of_one, own = (dict(whole_weights(tmp_path / name / "checkpoint-7")) for name in ("one", layout))
    assert largest_difference(of_one, own) <= 1e-6


@pytest.mark.parametrize(
    ("layout", "tied"),
    thinned([(name, tied) for name in LAYOUTS for tied in (False, True)], lambda *case: case == ("one", True)),
)
def test_a_saved_adapter_is_evaluated_in_every_layout(layout, tied, tmp_path):
    tiny_llama(num_key_value_heads=4, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    run(tmp_path / "out", tmp_path / "base", "one", adapter=(adapter := TIED if tied else ADAPTER))
    if layout.startswith("ZeRO"):
        import_engine()
    if tied and layout == "stages":
        with pytest.raises(RankFailed, match="FG754"):
            run_ranks(2, loss_of_saved, tmp_path / "out", tmp_path / "base", layout, adapter)
        return
    found = run_ranks(LAYOUTS[layout][0], loss_of_saved, tmp_path / "out", tmp_path / "base", layout, adapter)
    model = PeftModel.from_pretrained(from_pretrained(tmp_path / "base"), tmp_path / "out").eval()
    plain, total, count = from_pretrained(tmp_path / "base").eval(), torch.zeros(2), 0
    for row in rows(5, seed=2):
        targets = row["labels"][1:]
        count += int((targets != -100).sum())
        with torch.no_grad():
            logits = [one(input_ids=row["input_ids"][None]).logits[0, :-1] for one in (model, plain)]
        total += torch.stack([F.cross_entropy(one, targets, ignore_index=-100, reduction="sum") for one in logits])
    expected, other = (total / count).tolist()
    assert found == pytest.approx([expected] * len(found), rel=1e-6)
    assert expected != pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("trainer", [AccelTrainer, PipelineTrainer])
def test_an_adapter_in_slices_is_refused_before_anything_starts(trainer, tmp_path):
    args = trainer.ARGUMENTS(str(tmp_path), tensor_parallel_size=2)
    with pytest.raises(SettingError, match="an adapter with tensor_parallel_size 2") as refused:
        trainer(tiny_llama, args, train_dataset=rows(), adapter={"r": 2})
    assert (refused.value.code, refused.value.argument) == ("FG770", "args.tensor_parallel_size")
