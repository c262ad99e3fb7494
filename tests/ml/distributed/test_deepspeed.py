"""DeepSpeed's ZeRO against one process: losses, norms and weights of the fp32 rows; state that goes from one to the
other and back."""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import DistributedError, TrainingError
from forgather.launcher_env import ProcessFacts
from forgather.ml.callbacks.summary import model_facts
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.losses import loss_rule
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.deepspeed import deepspeed_strategy, import_deepspeed
from forgather.ml.strategy.single import SingleDevice
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments
from forgather.ml.types import Window
from tests.matrix import thinned
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.distributed.states import give_state, state_of
from tests.ml.fixtures import VOCAB, rows, tiny_llama
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("engine")
STEPS, ROWS = 4, 2


@pytest.fixture(scope="module")
def engine():
    import_engine()


def tiny_gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    model.loss_type = "ForCausalLM"
    return model


MODELS = {"llama": tiny_llama, "gpt2": tiny_gpt2}
OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "muon": lambda model: torch.optim.Muon([weight for weight in model.parameters() if weight.ndim == 2]),
    "groups": lambda model: torch.optim.AdamW(
        [
            {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": 0.1},
            {"params": [weight for weight in model.parameters() if weight.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-3,
    ),
}


def recipe(model="llama", optimizer="adamw"):
    return Recipe(make_model=MODELS[model], make_rule=loss_rule, make_optimizer=OPTIMIZERS[optimizer])


def environment():
    return DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))


def arguments(accumulation=1, **given):
    folder = tempfile.mkdtemp()
    plain = {"use_cpu": True, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": accumulation}
    return AccelTrainingArguments(folder, **{**plain, "deepspeed": "auto", **given})


def window(step, accumulation, rank, processes):
    """The rows of one rank; those of one process are the rows of all. The last window is one micro-batch short."""
    count = accumulation - (step == STEPS - 1 and accumulation > 1)
    batches = []
    for micro in range(count):
        every = rows(2 * ROWS, seed=1000 + 10 * step + micro)
        share = len(every) // processes
        mine = every[rank * share : (rank + 1) * share]
        batches.append({name: torch.stack([row[name] for row in mine]) for name in mine[0]})
    return Window(
        batches=batches,
        num_valid=sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches),
        num_tokens=0,
        num_rows=0,
    )


def steps(strategy, accumulation, clip, first=0, last=STEPS):
    topology = strategy.topology
    found = []
    for step in range(first, last):
        mine = window(step, accumulation, topology.dp_rank, topology.dp_size)
        denom = strategy.reduce(mine.num_valid)
        loss = strategy.reduce(strategy.forward_backward(mine, denom=denom))
        norms = []
        strategy.update(max_norm=clip, want_norm=True, before_step=norms.append, after_step=lambda: None)
        found.append((float(loss), float(norms[0])))
    return found


def whole(strategy):
    return {name: value.detach().clone() for name, value in strategy.export()}


def trained(stage, model, optimizer, accumulation, clip, settings=None):
    args = arguments(accumulation, max_grad_norm=clip, deepspeed={"zero_stage": stage, **(settings or {})})
    strategy = deepspeed_strategy(environment(), args)
    strategy.build(recipe(model, optimizer))
    strategy.build_optimizer()
    return steps(strategy, accumulation, clip), whole(strategy)


def trained_alone(model, optimizer, accumulation, clip):
    strategy = SingleDevice(DistributedEnvironment(), use_cpu=True)
    strategy.build(recipe(model, optimizer))
    before = whole(strategy)
    strategy.build_optimizer()
    return steps(strategy, accumulation, clip), whole(strategy), before


def assert_equal(expected, found, *, loss, norm, update):
    lines, weights, before = expected
    for (loss_1, norm_1), (loss_2, norm_2) in zip(lines, found[0], strict=True):
        assert loss_2 == pytest.approx(loss_1, rel=loss)
        assert norm_2 == pytest.approx(norm_1, rel=norm)
    assert sorted(weights) == sorted(found[1])
    off = sum(float((weights[name] - found[1][name]).double().square().sum()) for name in weights) ** 0.5
    moved = sum(float((weights[name] - before[name]).double().square().sum()) for name in weights) ** 0.5
    assert off / moved <= update


CASES = [
    (stage, model, optimizer, accumulation)
    for stage in (1, 2, 3)
    for model, optimizer, accumulation in [("llama", "sgd", 3), ("gpt2", "adamw", 3), ("llama", "groups", 1)]
]


QUICK = [(1, "gpt2", "adamw", 3), (2, "llama", "groups", 1), (3, "llama", "sgd", 3)]


def of_stages(*stages):
    """The stages, of which every run of the suite trains the last: that one cuts the weights, too."""
    return thinned(stages, lambda stage: stage == stages[-1])


@pytest.mark.parametrize(("stage", "model", "optimizer", "accumulation"), thinned(CASES, lambda *case: case in QUICK))
def test_zero_equals_one_process(stage, model, optimizer, accumulation):
    clip = 0.0 if optimizer == "sgd" else 1.0
    expected = trained_alone(model, optimizer, accumulation, clip)
    for found in run_ranks(2, trained, stage, model, optimizer, accumulation, clip):
        assert_equal(expected, found, loss=2e-6, norm=5e-6, update=1e-5 if optimizer == "sgd" else 2e-5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("stage", "settings"),
    thinned(
        [
            (2, {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}}),
            (3, {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True}}),
        ],
        lambda stage, settings: stage == 3,
    ),
)
def test_offloaded_states_equal_those_of_one_process(stage, settings):
    expected = trained_alone("llama", "groups", 3, 1.0)
    for found in run_ranks(2, trained, stage, "llama", "groups", 3, 1.0, settings):
        assert_equal(expected, found, loss=2e-6, norm=5e-6, update=2e-5)


def built(args, recipe):
    strategy = deepspeed_strategy(environment(), args)
    strategy.build(recipe)
    return strategy


def _goes_on(stage, accumulation, state):
    """Goes on from a state in the middle of a run; gives what it captured there, and the end."""
    strategy = built(
        arguments(accumulation, deepspeed={"zero_optimization": {"stage": stage}}), recipe("gpt2", "groups")
    )
    strategy.build_optimizer()
    give_state(strategy, state)
    again = state_of(strategy)
    return again, steps(strategy, accumulation, 1.0, first=2), whole(strategy)


@pytest.mark.parametrize("stage", of_stages(1, 2, 3))
def test_a_run_of_one_process_resumes_under_zero(stage):
    alone = SingleDevice(DistributedEnvironment(), use_cpu=True)
    alone.build(recipe("gpt2", "groups"))
    before = whole(alone)
    alone.build_optimizer()
    steps(alone, 3, 1.0, last=2)
    state = state_of(alone)
    expected = steps(alone, 3, 1.0, first=2), whole(alone), before
    for again, *found in run_ranks(2, _goes_on, stage, 3, state):
        assert_equal(expected, found, loss=2e-6, norm=5e-6, update=2e-5)
        assert_same_state(state, again)


def assert_same_state(expected, found):
    assert sorted(expected["model"]) == sorted(found["model"])
    for name, value in expected["model"].items():
        assert torch.equal(value, found["model"][name]), name
    assert sorted(expected["optimizer"]["state"]) == sorted(found["optimizer"]["state"])
    for name, held in expected["optimizer"]["state"].items():
        assert sorted(held) == sorted(found["optimizer"]["state"][name])
        assert all(torch.equal(value, found["optimizer"]["state"][name][key]) for key, value in held.items()), name
    groups = [(sorted(g["params"]), g["lr"], g["weight_decay"]) for g in expected["optimizer"]["param_groups"]]
    assert groups == [(sorted(g["params"]), g["lr"], g["weight_decay"]) for g in found["optimizer"]["param_groups"]]


def _captured(stage):
    strategy = built(arguments(3, deepspeed={"zero_optimization": {"stage": stage}}), recipe("gpt2", "groups"))
    strategy.build_optimizer()
    steps(strategy, 3, 1.0, last=2)
    held = strategy.capture()
    return len(held.weights), state_of(strategy)


@pytest.mark.parametrize("stage", of_stages(2, 3))
def test_a_run_under_zero_resumes_at_another_stage(stage):
    expected = trained_alone("gpt2", "groups", 3, 1.0)
    found = run_ranks(4, _captured, 5 - stage)
    assert all(0 == held for held, _ in found[1:])
    _, lines, weights = run_ranks(2, _goes_on, stage, 3, found[0][1])[0]
    assert_equal((expected[0][2:], *expected[1:]), (lines, weights), loss=2e-6, norm=5e-6, update=2e-5)


def _taken_over(model_is_made_anew, settings):
    """Trains at stage 3; also returns which weights had memory before the engine started, and what is here afterwards."""
    made = dataclasses.replace(recipe("gpt2"), model_is_made_anew=model_is_made_anew)
    strategy = built(arguments(3, deepspeed={"zero_optimization": {"stage": 3, **settings}}), made)
    before = [name for name, weight in strategy.model.named_parameters() if not weight.is_meta]
    strategy.build_optimizer()
    here = sum(weight.ds_tensor.numel() for weight in strategy.model.parameters())
    whole_size = sum(weight.ds_numel for weight in strategy.model.parameters())
    return (steps(strategy, 3, 1.0), whole(strategy)), before, here / whole_size


@pytest.mark.parametrize(
    ("model_is_made_anew", "settings"),
    thinned(
        [(True, {}), (False, {}), (True, {"offload_param": {"device": "cpu"}})],
        lambda model_is_made_anew, settings: model_is_made_anew == bool(settings),
    ),
)
def test_at_stage_3_no_process_holds_the_model_whole(model_is_made_anew, settings):
    expected = trained_alone("gpt2", "adamw", 3, 1.0)
    for found, before, share in run_ranks(2, _taken_over, model_is_made_anew, settings):
        assert_equal(expected, found, loss=2e-6, norm=5e-6, update=2e-5)
        assert before == []
        assert share == pytest.approx(0.5, abs=0.01)


def _facts(stage):
    strategy = built(arguments(deepspeed={"zero_optimization": {"stage": stage}}), recipe())
    return model_facts(strategy.view)


def test_the_size_of_a_model_is_that_of_the_whole():
    assert [model_facts(tiny_llama())] * 2 == run_ranks(2, _facts, 3)


@pytest.mark.parametrize("stage", of_stages(1, 3))
def test_one_process_needs_no_launcher(stage):
    expected = trained_alone("llama", "adamw", 1, 1.0)
    (found,) = run_ranks(1, _without_launcher, stage)
    assert_equal(expected, found, loss=2e-6, norm=5e-6, update=2e-5)


def _without_launcher(stage):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return trained(stage, "llama", "adamw", 1, 1.0)


def _after_discard(stage):
    strategy = built(arguments(3, deepspeed={"zero_optimization": {"stage": stage}}), recipe())
    strategy.build_optimizer()
    topology = strategy.topology
    dropped = window(7, 3, topology.dp_rank, topology.dp_size)
    strategy.forward_backward(dropped, denom=10.0)
    strategy.discard()
    first = steps(strategy, 3, 1.0), whole(strategy)
    give_state(strategy, {"model": strategy._recipe.make_model().state_dict()})
    strategy.build_optimizer()
    total, valid, _ = strategy.evaluate(dropped.batches[0])
    return first, (steps(strategy, 3, 1.0), whole(strategy)), float(strategy.reduce(total) / strategy.reduce(valid))


@pytest.mark.parametrize("stage", of_stages(1, 2, 3))
def test_dropped_gradients_leave_nothing_and_a_second_training_starts_from_the_beginning(stage):
    expected = trained_alone("llama", "adamw", 3, 1.0)
    for first, second, loss in run_ranks(2, _after_discard, stage):
        assert_equal(expected, first, loss=2e-6, norm=5e-6, update=2e-5)
        assert_equal(expected, second, loss=2e-6, norm=5e-6, update=2e-5)
        assert 3 < loss < 5


def test_a_missing_deepspeed_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(DistributedError, match=r"ask for deepspeed, and it is not installed") as caught:
        import_deepspeed("cpu")
    assert "FG740" == caught.value.code
    assert caught.value.hint.startswith("pip install 'forgather[deepspeed]', or set strict: false")


def _refused(args, made):
    try:
        built(args, made).build_optimizer()
    except TrainingError as error:
        return error.code, error.message, error.hint
    return None


@pytest.mark.parametrize(
    ("given", "optimizer", "expected"),
    [
        (
            {"zero_optimization": {"reduce_bucket_sise": 5}},
            "adamw",
            ("FG741", "no setting 'reduce_bucket_sise'", "did you mean 'reduce_bucket_size'?"),
        ),
        (
            {"zero_optimization": {"overlap_comm": "often"}},
            "adamw",
            ("FG741", "overlap_comm is 'often': Input should be a valid boolean", "None"),
        ),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 3e-4}}},
            "adamw",
            ("FG742", "optimizer.params.lr is 0.0003", '"auto"'),
        ),
        ("auto", "muon", ("FG744", "Muon needs whole weights", "AdamW")),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_it_starts(given, optimizer, expected):
    (found,) = run_ranks(1, _refused, arguments(deepspeed=given), recipe("llama", optimizer))
    assert expected[0] == found[0]
    assert expected[1] in found[1]
    assert expected[2] in str(found[2])


def test_weights_in_double_precision_and_other_axes_are_refused():
    made = Recipe(make_model=lambda: tiny_llama().double(), make_rule=loss_rule, make_optimizer=OPTIMIZERS["adamw"])
    ((code, message, hint),) = run_ranks(1, _refused, arguments(), made)
    assert ("FG744", "make the model in float32, or leave deepspeed out") == (code, hint)
    assert "is float64, and DeepSpeed keeps weights in float32" in message
    sliced, of_two = arguments(), environment()
    sliced.__dict__["tensor_parallel_size"] = 2  # which the arguments refuse by themselves
    of_two.__dict__["facts"] = ProcessFacts(world_size=2)
    with pytest.raises(TrainingError, match="tensor_parallel_size 2") as caught:
        deepspeed_strategy(of_two, sliced)
    assert "FG744" == caught.value.code


def _recorded(args):
    built(args, recipe()).build_optimizer()
    return json.loads((Path(args.logging_dir) / "deepspeed.json").read_text())


def test_the_filled_config_is_in_the_run_folder(tmp_path):
    args = arguments(3, logging_dir=str(tmp_path / "run"), bf16=True)
    found = run_ranks(2, _recorded, args)
    assert found[0]["train_batch_size"] == 12
    assert found[0]["bf16"] == {"enabled": True}


def _in_bf16(stage):
    strategy = built(arguments(3, bf16=True, deepspeed={"zero_optimization": {"stage": stage}}), recipe())
    strategy.build_optimizer()
    lines = steps(strategy, 3, 1.0)
    captured = strategy.capture()
    return (
        lines,
        {str(value.dtype) for value in captured.weights.values()},
        {str(w.dtype) for w in strategy.model.parameters()},
    )


@pytest.mark.parametrize("stage", of_stages(1, 2, 3))
def test_bf16_also_keeps_weights_in_float32(stage):
    expected, *_ = trained_alone("llama", "adamw", 3, 1.0)
    for rank, (lines, kept, computed) in enumerate(run_ranks(2, _in_bf16, stage)):
        assert [loss for loss, _ in lines] == pytest.approx([loss for loss, _ in expected], rel=2e-2)
        assert {"torch.bfloat16"} == computed
        assert kept == ({"torch.float32"} if rank == 0 else set())
