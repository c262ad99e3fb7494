"""A pipeline apart from its updates: evaluation, text, state, changing lengths, dropout, and what is refused."""

import dataclasses
import functools
import gc
import itertools
import warnings

import pytest
import torch
from torch import nn

from forgather.errors import DistributedError, TrainingError
from forgather.ml.losses import loss_rule
from forgather.ml.model_inputs import DOCUMENTS
from forgather.ml.strategy.pipeline.local_stages import TiedParameter, tied_weights
from forgather.ml.strategy.pipeline.microbatch_split import part_of, step_inputs
from forgather.ml.strategy.pipeline.schedules import Placement, num_micro_batches, place_stages
from forgather.ml.types import PaddingBatch
from forgather.pipeline_schedules import SCHEDULES
from tests.matrix import thinned
from tests.ml.distributed.gang import RankFailed, import_compiler, run_ranks
from tests.ml.distributed.pipeline_runs import (
    MODELS,
    differences,
    make_gpt2,
    make_llama,
    pipeline,
    recipe,
    rows_of,
    single_run,
    train,
    weights_of,
    windows,
)
from tests.ml.distributed.states import give_state, state_of

EXACT = 1e-10


def of_two(schedule, quick=None):
    """1F1B and another schedule, of which every run of the suite trains `quick`: the other one unless it says so."""
    return thinned(["Schedule1F1B", schedule], lambda name: name == (quick or schedule))


# -- plain numbers -----------------------------------------------------------------------------------------------------


def test_stages_lie_in_loops_or_in_a_v():
    loops, v = place_stages("ScheduleLoopedBFS", 3, stages_per_rank=2, num_stages=None), Placement(3, 2, v_shaped=True)
    assert [(0, 3), (1, 4), (2, 5)] == [loops.stages_of(rank) for rank in range(3)]
    assert [(0, 5), (1, 4), (2, 3)] == [v.stages_of(rank) for rank in range(3)]
    assert (2, 0) == (loops.last_rank, v.last_rank)


def test_stages_per_rank_follow_from_the_cuts_or_the_schedule():
    assert 1 == place_stages("Schedule1F1B", 4, stages_per_rank=None, num_stages=None).stages_per_rank
    assert 3 == place_stages("ScheduleInterleaved1F1B", 2, stages_per_rank=None, num_stages=6).stages_per_rank


@pytest.mark.parametrize(
    ("schedule", "ranks", "per_rank", "stages", "words"),
    [
        ("Schedule1F1B", 2, 2, None, "Schedule1F1B runs one stage on each rank, and there are 2"),
        ("ScheduleZBVZeroBubble", 2, 1, None, "runs two stages on each rank, and stages_per_rank is 1"),
        ("ScheduleGPipe", 2, None, 3, "cut into 3 stages, which do not distribute evenly over 2 ranks"),
        ("ScheduleLoopedBFS", 4, 2, 4, "cut into 4 stages, and 4 ranks with stages_per_rank 2 hold 8"),
        ("Schedule1FB1", 2, None, None, "no schedule 'Schedule1FB1'"),
    ],
)
def test_stages_that_do_not_fit_the_schedule_are_refused(schedule, ranks, per_rank, stages, words):
    with pytest.raises(DistributedError, match=words) as caught:
        place_stages(schedule, ranks, stages_per_rank=per_rank, num_stages=stages)
    assert caught.value.code == "FG760"


@pytest.mark.parametrize(
    ("schedule", "rows", "chunks", "words"),
    [
        ("ScheduleGPipe", 2, 8, r"2 rows .* cannot be split evenly into 8 micro-batches"),
        ("Schedule1F1B", 8, 2, r"needs as many micro-batches as stages \(4\), and there are 2"),
        ("ScheduleInterleaved1F1B", 18, 9, "in 2 rounds"),
    ],
)
def test_micro_batches_that_cannot_run_are_refused(schedule, rows, chunks, words):
    placement = place_stages(schedule, 4, stages_per_rank=None, num_stages=None)
    with pytest.raises(DistributedError, match=words) as caught:
        num_micro_batches(schedule, placement, rows, chunks)
    assert caught.value.code == "FG761"


def test_there_are_as_many_micro_batches_as_stages_where_the_rows_allow_it():
    placement = place_stages("ScheduleGPipe", 4, stages_per_rank=None, num_stages=None)
    assert [4, 6, 2, 4] == [num_micro_batches("ScheduleGPipe", placement, rows, None) for rows in (8, 6, 2, 4)]


def test_parts_of_a_batch_are_its_rows_in_order():
    batch = {"input_ids": torch.arange(8).view(4, 2), "labels": torch.arange(4), "position_ids": torch.zeros(1, 2)}
    parts = [part_of(batch, index, 2) for index in range(2)]
    assert batch["input_ids"].equal(torch.cat([part["input_ids"] for part in parts]))
    assert (4, 2) == tuple(step_inputs(batch).every["position_ids"].shape)
    assert isinstance(part_of(PaddingBatch(batch), 0, 2), PaddingBatch)


@pytest.mark.parametrize("position_rows", [4, 1])
def test_a_part_of_a_prepared_batch_knows_the_documents_of_its_own_rows(position_rows):
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [0, 0, 1, 2], [0, 1, 2, 0]])[-position_rows:]
    batch = {"input_ids": torch.zeros(4, 4, dtype=torch.long), "position_ids": positions}
    rule = loss_rule(make_llama(layers=1))
    prepared = rule.prepared({**batch, "labels": batch["input_ids"]})
    for index in range(2):
        part = part_of(prepared, index, 2)
        alone = rule.prepared({name: value for name, value in part.items() if name != DOCUMENTS})
        assert torch.equal(alone[DOCUMENTS].starts_BT, part[DOCUMENTS].starts_BT)
        assert torch.equal(prepared[DOCUMENTS].starts_BT[index * 2 : index * 2 + 2], part[DOCUMENTS].starts_BT)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"input_ids": torch.zeros(1, 8), "cu_seq_lens_q": torch.zeros(3)}, "flattened into one"),
        ({"input_ids": torch.zeros(2, 8), "source": ["a", "b"]}, "'source', which is a list"),
        ({"input_ids": torch.zeros(2, 8), "scale": torch.tensor(1.0)}, "'scale', which is a number"),
        ({"input_ids": torch.zeros(2, 8), "position_ids": torch.zeros(3, 8)}, "2 rows, and 'position_ids' has 3"),
        ({"labels": torch.zeros(2, 8)}, "no inputs besides its labels"),
        ((torch.zeros(2), torch.zeros(2), torch.zeros(2)), "a tuple with 2 inputs"),
    ],
)
def test_a_batch_that_cannot_be_split_by_rows_is_refused(batch, words):
    with pytest.raises(TrainingError, match=words) as caught:
        step_inputs(batch)
    assert caught.value.code == "FG764"


# -- evaluation and text -----------------------------------------------------------------------------------------------


def _evaluates(model, schedule):
    strategy = pipeline(recipe(MODELS[model]), world=2, schedule_class=schedule)
    batch = rows_of(5, 3, 13, packed=True)  # another shape, and rows that no number of micro-batches divides
    total, count, _ = strategy.evaluate(strategy.rule.prepared(batch))
    logits = strategy.view(**{name: value for name, value in batch.items() if name != "labels"}).logits
    text = strategy.view.generate(batch["input_ids"][:2, :4], max_new_tokens=6)
    (losses, norms) = train(strategy, windows(1, 1, 4))  # and training continues
    return float(strategy.reduce(total)), strategy.reduce(count), logits, text, losses, norms


@pytest.mark.parametrize(
    ("model", "schedule"),
    thinned(
        itertools.product(MODELS, ["ScheduleGPipe", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]),
        lambda model, schedule: (model == "llama") == (schedule == "ScheduleGPipe"),
    ),
)
def test_evaluation_and_text_are_those_of_the_whole_model(model, schedule):
    *_, one = single_run(recipe(MODELS[model]), [])
    batch = rows_of(5, 3, 13, packed=True)
    total, count, _ = one.evaluate(one.rule.prepared(batch))
    with torch.no_grad():
        # With a cache, transformers does not look at positions for the borders of documents.
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = one.model(**inputs, use_cache=False).logits
        text = one.model.generate(
            batch["input_ids"][:2, :4], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    for found in run_ranks(2, _evaluates, model, schedule):
        assert found[0] == pytest.approx(float(total), rel=EXACT)
        assert found[1] == count
        assert torch.allclose(logits, found[2], rtol=EXACT, atol=EXACT)
        assert text.equal(found[3])
        assert all(value > 0 for value in (*found[4], *found[5]))


def _padded_prompts():
    view = pipeline(recipe(make_llama), world=2).view
    view.generate(torch.zeros(1, 2, dtype=torch.long), attention_mask=torch.tensor([[0, 1]]))


def test_padded_prompts_are_refused():
    with pytest.raises(RankFailed, match=r"\[FG765\] the prompts are padded"):
        run_ranks(2, _padded_prompts)


def _stops_at_the_end(token):
    view = pipeline(recipe(make_llama), world=2).view
    return view.generate(torch.tensor([[1, 2]]), max_new_tokens=5, eos_token_id=token, do_sample=True)


def test_text_ends_at_the_end_of_text():
    free = run_ranks(2, _stops_at_the_end, None)[0]
    first = int(free[0, 2])
    assert [1, 2, first] == run_ranks(2, _stops_at_the_end, first)[1][0].tolist()


# -- state -------------------------------------------------------------------------------------------------------------


def recipe_of(model):
    """Returns a recipe of as many blocks as two stages on each of four ranks need."""
    return recipe(functools.partial(MODELS[model], layers=8))


def _captures(model, schedule, world):
    strategy = pipeline(recipe_of(model), world=world, schedule_class=schedule, pipeline_chunks=4)
    train(strategy, windows(2, 1, 4))
    state = state_of(strategy)
    exported = {name: value.clone() for name, value in strategy.export()}
    return state, exported


def _goes_on(model, schedule, world, state):
    strategy = pipeline(recipe_of(model), world=world, schedule_class=schedule, pipeline_chunks=4)
    give_state(strategy, state)
    found = train(strategy, windows(4, 1, 4)[2:])
    return (*found, weights_of(strategy))


# Pairs of layouts resume in tests/reliability, too.
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model", "layouts"),
    [
        ("gpt2", [("Schedule1F1B", 2)]),
        ("gpt2", [("ScheduleLoopedBFS", 4), ("ScheduleDualPipeV", 2)]),
        ("llama", [("Schedule1F1B", 2), ("ScheduleLoopedBFS", 4), ("ScheduleDualPipeV", 2)]),
    ],
)
def test_any_layout_resumes_from_a_captured_state(model, layouts):
    want = single_run(recipe_of(model), windows(4, 1, 4))
    state, exported = run_ranks(2, _captures, model, "ScheduleZBVZeroBubble", 2)[0]
    half = state_of(single_run(recipe_of(model), windows(2, 1, 4))[-1])
    assert list(half["model"]) == list(state["model"]) == sorted(exported)
    assert list(half["optimizer"]["state"]) == list(state["optimizer"]["state"])
    names = [[sorted(group["params"]) for group in whole["optimizer"]["param_groups"]] for whole in (half, state)]
    assert names[0] == names[1]
    for name, value in half["model"].items():
        assert torch.allclose(value, state["model"][name], rtol=1e-9, atol=1e-12)
        assert state["model"][name].equal(exported[name])
    wrong = {}
    for schedule, world in layouts:
        losses, norms, weights = run_ranks(world, _goes_on, model, schedule, world, state)[0]
        off = differences(want, (want[0][:2] + losses, want[1][:2] + norms, weights))
        wrong |= {(schedule, name): value for name, value in off.items() if not value <= 1e-9}
    assert {} == wrong


# -- changing lengths, dropout, recomputation, frozen stages, compilation ------------------------------------------------


def _varies(schedule, settings):
    strategy = pipeline(recipe(make_gpt2), world=2, schedule_class=schedule, **settings)
    found = train(strategy, windows(3, 3, 4, lengths=(10, 7, 12, 10)))
    return (*found, weights_of(strategy))


@pytest.mark.parametrize("schedule", of_two("ScheduleDualPipeV"))
def test_lengths_may_change_from_one_batch_to_the_next(schedule):
    want = single_run(recipe(make_gpt2), windows(3, 3, 4, lengths=(10, 7, 12, 10)))
    found = run_ranks(2, _varies, schedule, {"pipeline_chunks": 4})
    off = differences(want, found[0])
    assert all(value <= EXACT for value in off.values()), off


def test_recomputed_activations_change_nothing():
    want = single_run(recipe(make_gpt2), windows(3, 3, 4, lengths=(10, 7, 12, 10)))
    settings = {"pipeline_chunks": 4, "checkpoint_sequential": True}
    off = differences(want, run_ranks(2, _varies, "ScheduleInterleaved1F1B", settings)[0])
    assert all(value <= EXACT for value in off.values()), off


def _drops(schedule, data, world):
    strategy = pipeline(
        recipe(functools.partial(make_gpt2, dropout=0.3)),
        world=world,
        data=data,
        rows=4 // data,
        schedule_class=schedule,
    )
    torch.manual_seed(7)
    share = {"dp_rank": strategy.topology.dp_rank, "dp_size": data}
    train(strategy, windows(1, 2, 4), **share)
    kept = torch.get_rng_state()
    state = state_of(strategy)
    first = train(strategy, windows(2, 2, 4)[1:], **share)
    give_state(strategy, state)
    torch.set_rng_state(kept)
    again = train(strategy, windows(2, 2, 4)[1:], **share)
    return first, again, kept.tolist()


@pytest.mark.parametrize(("world", "data"), thinned([(2, 1), (4, 2)], lambda world, data: world == 4))
def test_dropout_is_the_same_after_a_resume_and_the_global_random_state_stays_equal(world, data):
    found = run_ranks(world, _drops, "ScheduleGPipe", data, world)
    assert all(first == again for first, again, _ in found)
    assert all(kept == found[0][2] for *_, kept in found)


def _masks():
    strategy = pipeline(recipe(functools.partial(make_gpt2, dropout=0.3)), world=4, data=2, rows=2)
    torch.manual_seed(7)
    with strategy._rng.isolated():
        return torch.rand(3).tolist()


def test_every_stage_of_every_replica_drops_other_units():
    assert 4 == len({tuple(found) for found in run_ranks(4, _masks)})


def _freeze(model, blocks):
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or any(f"layers.{block}." in name for block in blocks):
            parameter.requires_grad_(False)
    return model


def frozen_llama():
    return _freeze(make_llama(layers=8), range(4))


def _trains_frozen(schedule):
    strategy = pipeline(recipe(frozen_llama), world=2, schedule_class=schedule, pipeline_chunks=4)
    return (*train(strategy, windows(2, 1, 4)), weights_of(strategy))


@pytest.mark.parametrize("schedule", of_two("ScheduleInterleaved1F1B"))
def test_frozen_stages_train_under_schedules_that_allow_it(schedule):
    want = single_run(recipe(frozen_llama), windows(2, 1, 4))
    off = differences(want, run_ranks(2, _trains_frozen, schedule)[0])
    assert all(value <= EXACT for value in off.values()), off


def test_frozen_stages_are_refused_under_zero_bubble_schedules():
    with pytest.raises(RankFailed, match=r"\[FG763\] stages 0, 1 of 4 have no trainable weight"):
        run_ranks(2, _trains_frozen, "ScheduleZBVZeroBubble")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(6, 6, dtype=torch.float64) for _ in range(4)])
        self.head = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def plain_windows():
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(3):
        x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
        made.append([(x, torch.randint(0, 3, (4,), generator=generator))])
    return made


def train_plain(strategy):
    from forgather.ml.types import Window

    found = []
    for batches in plain_windows():
        denom = strategy.reduce(sum(strategy.rule.count(batch) for batch in batches))
        share = strategy.forward_backward(Window(batches, 0, 0, 0), denom=denom)
        found.append(float(strategy.reduce(share)))
        strategy.update(max_norm=1.0, want_norm=True, before_step=lambda norm: None, after_step=lambda: None)
    return found


def _trains_plain(loss_fn):
    return train_plain(pipeline(recipe(Plain, loss_fn=loss_fn), world=2, split_spec={"blocks.1": "end"}))


def test_a_plain_module_trains_with_a_loss_of_the_user():
    the_recipe = recipe(Plain, loss_fn=nn.CrossEntropyLoss())
    *_, one = single_run(the_recipe, [])
    want = train_plain(one)
    for found in run_ranks(2, _trains_plain, nn.CrossEntropyLoss()):
        assert found == pytest.approx(want, rel=EXACT)


def test_a_loss_that_the_model_computes_is_refused():
    with pytest.raises(RankFailed, match=r"\[FG762\] Plain computes its loss itself"):
        run_ranks(2, _trains_plain, None)


def _fp16():
    pipeline(recipe(make_llama, autocast=torch.float16), world=2)


def test_float16_is_refused():
    with pytest.raises(RankFailed, match=r"\[FG767\] fp16 is on"):
        run_ranks(2, _fp16)


def compile_whole(model):
    model.compile(backend="eager")


def _compiled(schedule):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # of torch.compile
    strategy = pipeline(
        recipe(make_llama, prepare=[compile_whole]), world=2, schedule_class=schedule, pipeline_chunks=4
    )
    return (*train(strategy, windows(2, 1, 4)), weights_of(strategy))


@pytest.mark.parametrize("schedule", of_two("ScheduleZBVZeroBubble", quick="Schedule1F1B"))
def test_compiled_blocks_train_equally(schedule):
    import_compiler()
    want = single_run(recipe(make_llama), windows(2, 1, 4))
    off = differences(want, run_ranks(2, _compiled, schedule)[0])
    assert all(value <= EXACT for value in off.values()), off


def _bf16(schedule):
    make = functools.partial(make_llama, dtype=torch.float32)
    strategy = pipeline(recipe(make, autocast=torch.bfloat16), world=2, schedule_class=schedule, pipeline_chunks=4)
    return (*train(strategy, windows(2, 1, 4)), weights_of(strategy))


@pytest.mark.parametrize("schedule", of_two("ScheduleZBVZeroBubble"))
def test_bfloat16_is_as_near_as_its_digits_allow(schedule):
    make = functools.partial(make_llama, dtype=torch.float32)
    want = single_run(recipe(make, autocast=torch.bfloat16), windows(2, 1, 4))
    off = differences(want, run_ranks(2, _bf16, schedule)[0])
    assert off["loss"] < 2e-3
    assert off["grad_norm"] < 2e-2


def _uneven_rows():
    strategy = pipeline(recipe(make_llama), world=2, pipeline_chunks=2)
    train(strategy, windows(1, 1, 3))


def test_rows_that_do_not_split_are_refused_on_every_rank_before_a_stage_runs():
    with pytest.raises(RankFailed, match=r"\[FG761\] 3 rows"):
        run_ranks(2, _uneven_rows, timeout=15)


def _one_rank():
    strategy = pipeline(recipe(make_gpt2), world=1, schedule_class="ScheduleGPipe")
    return (*train(strategy, windows(2, 2, 4)), weights_of(strategy))


def test_one_rank_is_a_pipeline_too():
    off = differences(single_run(recipe(make_gpt2), windows(2, 2, 4)), run_ranks(1, _one_rank)[0])
    assert all(value <= EXACT for value in off.values()), off


class End(nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, 2))


def _unlike_ends():
    rank = torch.distributed.get_rank()
    weight = TiedParameter(((0, "weight"), (1, "weight")))
    tied_weights({rank: End(4 - rank)}, [weight], Placement(2, 1, v_shaped=False), torch.distributed.group.WORLD)


def test_ends_of_a_tied_weight_that_are_sliced_differently_are_refused():
    with pytest.raises(RankFailed, match=r"\[FG766\] the tied weight 'weight' is sliced differently"):
        run_ranks(2, _unlike_ends, start_group=True)


# -- negative controls ---------------------------------------------------------------------------------------------------


def _wrong(how):
    strategy = pipeline(recipe(make_gpt2), world=2, pipeline_chunks=4)
    if how == "gradients x 2":
        real = strategy.forward_backward

        def doubled(window, *, denom, after_micro_batch=None):
            share = real(window, denom=denom)
            for parameter in strategy._parameters:
                parameter.grad *= 2
            return share

        strategy.forward_backward = doubled
    if how == "mean of means":
        real_step = strategy._micro_step
        parts = itertools.count(1)

        def own_mean(batch, denom, **settings):
            next(parts)
            return real_step(batch, strategy.rule.count(batch) * 3, **settings)

        strategy._micro_step = own_mean
    if how == "tied gradients not added":
        strategy._tied = []
    if how == "tied weight counted twice":
        strategy._counted_elsewhere = set()
    return (*train(strategy, windows(3, 3, 4)), weights_of(strategy))


@pytest.mark.parametrize(
    ("how", "seen_in"),
    # The bench of test_cells.py has the first two, too.
    thinned(
        [
            ("gradients x 2", "grad_norm"),
            ("mean of means", "loss"),
            ("tied gradients not added", "grad_norm"),
            ("tied weight counted twice", "grad_norm"),
        ],
        lambda how, seen_in: how == "tied gradients not added",
    ),
)
def test_what_is_wrong_is_seen(how, seen_in):
    want = single_run(recipe(make_gpt2), windows(3, 3, 4))
    assert differences(want, run_ranks(2, _wrong, how)[0])[seen_in] > 1e-4


def test_every_schedule_of_torch_is_known():
    from torch.distributed.pipelining.schedules import get_schedule_class

    assert all(get_schedule_class(name.removeprefix("Schedule")).__name__ == name for name in SCHEDULES)


# -- memory ------------------------------------------------------------------------------------------------------------


class Packed(nn.Parameter):
    """A weight of a class of its own, as quantized ones are: it cannot be moved to the meta device and filled again."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)


class Scales:
    """What bitsandbytes keeps with a layer and with its weight."""


def packed_llama():
    model = make_llama()
    for block in model.model.layers:
        layer = block.self_attn.q_proj
        layer.weight = Packed(layer.weight.detach())
        layer.quant_state = layer.weight.quant_state = Scales()
    return model


def living_and_held():
    quantized = dataclasses.replace(recipe(packed_llama), model_is_made_anew=False)
    strategy = pipeline(quantized, world=2, schedule_class="Schedule1F1B")
    gc.collect()
    kinds = [type(one) for one in gc.get_objects()]
    held = sum(isinstance(weight, Packed) for weight in strategy.local.parameters())
    return kinds.count(Packed), kinds.count(Scales), held


def test_a_rank_keeps_no_packed_weight_of_other_stages():
    for weights, scales, held in run_ranks(2, living_and_held):
        # A stage has a copy of each layer, and the scales of a layer are copied with it.
        assert (2, 4, 2) == (weights, scales, held)
