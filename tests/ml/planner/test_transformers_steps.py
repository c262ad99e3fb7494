"""Plans of `HFTrainer` are traces of transformers' own steps, and need the memory that its runs need."""

import functools
import json

import pytest
from torch.profiler import record_function
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainingArguments

from forgather.errors import PlanError
from forgather.launcher_env import ProcessFacts
from forgather.ml.adapters import lora
from forgather.ml.distributed.env import exported_facts, process_facts
from forgather.ml.planner.allocations import Region
from forgather.ml.planner.batch_plans import full_plans, plan_batches
from forgather.ml.planner.rank_trace import trace_rank
from forgather.ml.planner.row_limit import largest_rows
from forgather.ml.planner.transformers_steps import planned_trainer
from forgather.ml.trainer.hf import HFTrainer
from tests.matrix import thinned
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


def trainer(output_dir, hook=lambda function: function, model="llama", adapter=None, eval_dataset=None, **args):
    settings = {"use_cpu": True, "per_device_train_batch_size": 8, "max_steps": 5, "save_strategy": "no"}
    return HFTrainer(
        hook(cell_models.model)(model, 4),
        TrainingArguments(output_dir, **settings, report_to="none", disable_tqdm=True, **args),
        train_dataset=cell_models.rows(model, 64),
        eval_dataset=eval_dataset,
        compute_metrics=counted,
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


ROWS, RANKS = 48, 8
METRICS = {
    "all rows": (1, {}),
    "batch by batch": (1, {"batch_eval_metrics": True}),
    "DDP": (2, {}),
}


def counted(prediction, compute_result=True):
    return {"rows": len(prediction.predictions)}


def evaluating(output_dir, hook=lambda function: function, count=ROWS, sets=lambda rows: rows, **args):
    rows = sets(cell_models.rows("llama", 64)[:count])
    return trainer(output_dir, hook, eval_dataset=rows, per_device_eval_batch_size=8, eval_strategy="epoch", **args)


def measured_evaluation(make, output_dir):
    """Returns the peak of an evaluation: the smallest of three, because a thread of gloo may free a message late."""
    names = ("first evaluation", "second evaluation", "third evaluation")
    with exported_facts(process_facts()), profiled(names) as found:
        made = make(output_dir)
        for name in names:
            with record_function(name):
                metrics = made.evaluate()
    assert metrics["eval_rows"] in (ROWS, RANKS)
    return found.num_bytes


@pytest.mark.matrix
@pytest.mark.parametrize("name", thinned(METRICS, lambda name: name == "all rows"))
def test_predictions_that_are_kept_for_metrics_are_planned(name, tmp_path):
    world_size, changes = METRICS[name]
    make = functools.partial(evaluating, **changes)
    cell_models.rows("llama", 64)
    real = max(run_ranks(world_size, measured_evaluation, make, tmp_path))

    facts = ProcessFacts(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size)
    trace = trace_rank(functools.partial(make, tmp_path), facts)
    peaks = [peak for at, peak in trace.peaks.items() if at.phase == "evaluation"]
    found = max(peaks, key=lambda peak: peak.num_bytes)
    # The evaluation is measured without a step before it, which makes the optimizer's state and the batch that waits.
    plan = found.num_bytes - sum(found.categories.get(use, 0) for use in ("optimizer", "batch"))
    batch = 8 * world_size * 64 * cell_models.VOCABULARY * 4
    assert plan == pytest.approx(real, abs=0.25 * batch), (found, real)
    assert ("predictions" in found.categories) == (name != "batch by batch")


@pytest.mark.matrix
def test_predictions_that_are_moved_to_the_host_leave_a_gpu_and_stay_on_a_cpu(tmp_path):
    def kept(device_type, **given):
        facts = ProcessFacts(rank=0, local_rank=0, world_size=1, local_world_size=1)
        make = functools.partial(evaluating, tmp_path, **given)
        return trace_rank(make, facts, device_type=device_type, depth=1).peaks[Region("evaluation", 1)].categories

    two = kept("cuda", count=16)["predictions"]
    assert two == kept("cuda", eval_accumulation_steps=2)["predictions"]
    assert two < kept("cpu", eval_accumulation_steps=2)["predictions"]
    # As many batches of a stream are kept, however many it has.
    assert two == kept("cuda", count=16, sets=Stream, eval_accumulation_steps=2)["predictions"]


class Stream(IterableDataset):
    """Rows whose number is not known."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


class Lengthless(Stream):
    """A stream with a `__len__` that gives no number."""

    def __len__(self):
        raise TypeError("it is not known")


class Answering(HFTrainer):
    """A trainer that answers prompts, as those of TRL do."""

    def _generate_and_score_completions(self, inputs):
        return inputs


def test_what_cannot_be_traced_is_refused_with_the_reason(tmp_path):
    made = trainer(tmp_path)
    made.args.fsdp = ["full_shard"]
    answering = trainer(tmp_path)
    answering.__class__ = Answering

    metrics = evaluating(tmp_path)
    metrics.eval_dataset = iter(metrics.eval_dataset)
    for given, reason in (
        (metrics, "unknown length"),
        (made, "args.fsdp"),
        (answering, "answers prompts"),
        (object(), "not a trainer"),
    ):
        with pytest.raises(PlanError, match=reason) as caught:
            planned_trainer(given, "cuda")
        assert "FG969" == caught.value.code


def test_predictions_of_a_stream_are_planned_if_they_leave_the_device(tmp_path):
    def planned_on(device_type, sets, **given):
        return planned_trainer(evaluating(tmp_path, sets=sets, **given), device_type)

    for sets in (Stream, lambda rows: {"rows": rows, "stream": Stream(rows)}, Lengthless):
        for device_type, given in (
            ("cuda", {"eval_accumulation_steps": 2}),
            *((one, {"batch_eval_metrics": True}) for one in ("cpu", "cuda")),
        ):
            planned_on(device_type, sets, **given)
        with pytest.raises(PlanError, match="unknown length") as caught:
            planned_on("cpu", sets, eval_accumulation_steps=2)
        assert "FG969" == caught.value.code
        assert caught.value.hint.startswith("set batch_eval_metrics")
        with pytest.raises(PlanError, match="unknown length") as caught:
            planned_on("cuda", sets)
        assert caught.value.hint.startswith("set eval_accumulation_steps")


@pytest.mark.matrix
def test_other_sizes_are_planned_for_the_same_kind_of_device(tmp_path):
    make = functools.partial(evaluating, tmp_path, sets=Stream, eval_accumulation_steps=2)
    sizes = {"world_size": 1, "local_world_size": 1}
    assert 2 == largest_rows(make, **sizes, limit=2**40, most=2, device_type="cuda")["size"]
    for plan in (plan_batches, full_plans):
        assert plan(make, **sizes, batches=[(1, 1)], device_type="cuda")
        with pytest.raises(PlanError, match="unknown length"):
            plan(make, **sizes, batches=[(1, 1)], device_type="cpu")
    with pytest.raises(PlanError, match="unknown length"):
        largest_rows(make, **sizes, limit=2**40, most=2, device_type="cpu")


@pytest.mark.matrix
def test_the_largest_batch_is_found_as_for_other_trainers(tmp_path):
    found = largest_rows(
        functools.partial(trainer, tmp_path), world_size=1, local_world_size=1, limit=24 * 2**20, most=64
    )
    assert 0 < found["num_bytes"] <= 24 * 2**20 < found["next_bytes"]
