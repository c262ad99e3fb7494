"""Plans of `HFTrainer` are traces of transformers' own steps, and need the memory that its runs need."""

import functools
import json

import pytest
from torch.profiler import record_function
from transformers import TrainerCallback, TrainingArguments

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.adapters import lora
from forgather.ml.distributed.env import exported_facts, process_facts
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.row_limit import largest_rows
from forgather.ml.planner.transformers_steps import planned_trainer
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.distributed.gang import run_ranks
from tests.ml.planner import cell_models
from tests.ml.planner.cells import STEPS
from tests.ml.planner.live_bytes import profiled
from tests.ml.planner.test_rank_trace import planned


class Marks(TrainerCallback):
    """Marks each step in the profile."""

    def on_step_begin(self, args, state, control, **others):
        self.step = record_function(STEPS[state.global_step]).__enter__()

    def on_step_end(self, args, state, control, **others):
        self.step.__exit__(None, None, None)


def trainer(output_dir, hook=lambda function: function, model="llama", adapter=None, **args):
    settings = {"use_cpu": True, "per_device_train_batch_size": 8, "max_steps": 5, "save_strategy": "no"}
    return HFTrainer(
        hook(cell_models.model)(model, 4),
        TrainingArguments(output_dir, **settings, report_to="none", disable_tqdm=True, **args),
        train_dataset=cell_models.rows(model, 64),
        adapter=adapter and lora(**adapter),
    )


def measured(make, output_dir):
    """Returns the peak of a step of `train`, which is not the first one."""
    facts = process_facts()
    # Accelerate would wrap the model of one process in DDP if it saw the variables of a launcher.
    with exported_facts(facts), profiled(STEPS[1:]) as found:
        made = make(output_dir)
        made.add_callback(Marks())
        made.train()
    return found.num_bytes


CELLS = {
    "one process": (1, {}),
    "bf16, recomputed": (1, {"bf16": True, "activation_checkpointing": True}),
    "bf16": (1, {"bf16": True}),
    "accumulated": (1, {"gradient_accumulation_steps": 3}),
    "LoRA": (1, {"adapter": {"r": 4}}),
    "a classifier": (1, {"model": "bert"}),
    "DDP": (2, {}),
    "DDP, accumulated": (2, {"gradient_accumulation_steps": 2}),
}


def parameter(name):
    marks = [] if name == "one process" else [pytest.mark.matrix]
    return pytest.param(name, marks=marks, id=name)


@pytest.mark.parametrize("name", list(map(parameter, CELLS)))
def test_the_traced_peak_is_the_measured_one(name, tmp_path, record_property):
    world_size, changes = CELLS[name]
    make = functools.partial(trainer, **changes)
    cell_models.rows(changes.get("model", "llama"), 64)
    peaks = run_ranks(world_size, measured, make, tmp_path)

    facts = ProcessFacts(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size)
    trace = trace_rank(functools.partial(make, tmp_path), facts)

    pairs = [(real, planned(trace)) for real in peaks]
    record_property("peaks", json.dumps(pairs))
    for real, plan in pairs:
        assert -0.02 <= plan / real - 1 <= (0.03 if world_size == 1 else 0.1), (real, plan)


class Answering(HFTrainer):
    """A trainer that answers prompts, as those of TRL do."""

    def _generate_and_score_completions(self, inputs):
        return inputs


def test_what_cannot_be_traced_is_refused_with_the_reason(tmp_path):
    made = trainer(tmp_path)
    made.args.fsdp = ["full_shard"]
    answering = trainer(tmp_path)
    answering.__class__ = Answering

    for given, reason in ((made, "args.fsdp"), (answering, "answers prompts"), (object(), "not a trainer")):
        with pytest.raises(PlanError, match=reason) as caught:
            planned_trainer(given)
        assert "FG969" == caught.value.code


def test_the_largest_batch_is_found_as_for_other_trainers(tmp_path):
    found = largest_rows(
        functools.partial(trainer, tmp_path), world_size=1, local_world_size=1, limit=24 * 2**20, most=64
    )
    assert 0 < found["num_bytes"] <= 24 * 2**20 < found["next_bytes"]
