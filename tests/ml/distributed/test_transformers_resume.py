"""A checkpoint of transformers' Trainer goes on in every layout with the losses that it would have had there."""

import pytest
import transformers
from peft import LoraConfig, get_peft_model

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.models import from_pretrained
from tests.matrix import thinned
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.fixtures import rows, tiny_llama
from tests.patience import patience

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
ADAPTER = {"r": 2, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
COMMON = {
    "max_steps": 7,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "logging_steps": 1,
    "save_steps": 2,
    "seed": 3,
    "use_cpu": True,
    "report_to": "none",
}
LAYOUTS = {
    "one": (1, 4, Trainer, TrainingArguments, {}),
    "copies": (2, 2, AccelTrainer, AccelTrainingArguments, {}),
    "shards": (2, 2, AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "stages": (2, 4, PipelineTrainer, PipelineTrainingArguments, {"pipeline_chunks": 2}),
    "ZeRO-2": (2, 2, AccelTrainer, AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 2}}}),
    "ZeRO-3": (2, 2, AccelTrainer, AccelTrainingArguments, {"deepspeed": {"zero_optimization": {"stage": 3}}}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_llama(num_key_value_heads=4).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory, base):
    kept = {}

    def run(adapter):
        if adapter not in kept:
            model = from_pretrained(base)
            model = get_peft_model(model, LoraConfig(**ADAPTER)) if adapter else model
            if adapter:
                transformers.set_seed(0)
            folder = str(tmp_path_factory.mktemp("theirs"))
            args = transformers.TrainingArguments(folder, per_device_train_batch_size=4, disable_tqdm=True, **COMMON)
            trainer = transformers.Trainer(model, args, train_dataset=rows(13))
            trainer.train()
            kept[adapter] = trainer
        return kept[adapter]

    return run


def losses(trainer):
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def part(folder, checkpoint, base, layout, adapter):
    ranks, batch_size, trainer_class, arguments, given = LAYOUTS[layout]
    several = {} if ranks == 1 else {"distributed_env": DistributedEnvironment(timeout_seconds=patience(20))}
    args = arguments(str(folder), per_device_train_batch_size=batch_size, **COMMON, **given)
    trainer = trainer_class(
        lambda: from_pretrained(base),
        args,
        train_dataset=rows(13),
        adapter=ADAPTER if adapter else None,
        **several,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return losses(trainer)


CELLS = [(layout, adapter) for layout in LAYOUTS for adapter in (False, True)]
QUICK = [("shards", False)]


@pytest.mark.parametrize(("layout", "adapter"), thinned(CELLS, lambda *cell: cell in QUICK))
def test_the_run_goes_on_as_it_would_have_there(theirs, base, tmp_path, layout, adapter):
    if layout.startswith("ZeRO"):
        import_engine()
    expected = theirs(adapter)
    checkpoint = f"{expected.args.output_dir}/checkpoint-2"
    found = run_ranks(LAYOUTS[layout][0], part, tmp_path / "out", checkpoint, base, layout, adapter)[0]
    assert losses(expected).keys() == found.keys()
    assert losses(expected) == pytest.approx(found, rel=0, abs=1e-6)
