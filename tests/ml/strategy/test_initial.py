"""Every rank gets the initial weights of one process, whichever part of the model it holds."""

import functools
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from forgather.errors import DistributedError, TrainingError
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.losses import loss_rule
from forgather.ml.strategy import initial_room, seed_checkpoint
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.initial_weights import make_initial_weights
from forgather.ml.strategy.meta_model import tensors_of
from forgather.ml.types import Topology
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.models import Plain, gpt2, llama, whole
from tests.patience import patience


def recipe_of(make, *, anew=True, fills="sequential", stored_in=None):
    return Recipe(
        make_model=make,
        make_rule=loss_rule,
        make_optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        model_is_made_anew=anew,
        initial_weights=fills,
        stored_in=stored_in,
    )


def started():
    environment = DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))
    device = environment.start(use_cpu=True)
    return Topology(
        rank=environment.rank,
        world_size=environment.world_size,
        device=device,
        is_writer=environment.rank == 0,
        local_rank=environment.local_rank,
    )


def alone():
    return Topology(rank=0, world_size=1, device=torch.device("cpu"), is_writer=True)


def seeded(make):
    seed_everything(11)
    return make()


def closed_over():
    model = Plain()
    model.act = lambda value: value  # cannot be sent to another rank
    return model


MAKERS = {"llama": llama, "gpt2": gpt2, "plain": Plain, "not sent": closed_over}


def same_tensors(left, right):
    right_by_name = {fqn: tensor for fqn, _, _, tensor in tensors_of(right)}
    left_by_name = {fqn: tensor for fqn, _, _, tensor in tensors_of(left)}
    assert list(right_by_name) == list(left_by_name)
    for fqn, tensor in left_by_name.items():
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(right_by_name[fqn], full), fqn
        assert isinstance(tensor, nn.Parameter) == isinstance(right_by_name[fqn], nn.Parameter)


def whole_and_sharded(name):
    topology = started()
    if topology.rank:
        seed_everything(99 + topology.rank)
    weights = make_initial_weights(recipe_of(functools.partial(seeded, MAKERS[name])), topology)
    drawn = torch.rand(3).tolist()
    meta = weights.on_meta()
    assert {"meta"} == {tensor.device.type for _, _, _, tensor in tensors_of(meta)}
    for block in [module for module in meta.modules() if isinstance(module, nn.ModuleList)][0]:
        fully_shard(block)
    fully_shard(meta)
    weights.fill(meta)
    same_tensors(meta, seeded(MAKERS[name]))
    weights.fill(meta)  # a second time, in place
    same_tensors(meta, seeded(MAKERS[name]))
    same_tensors(whole(weights), seeded(MAKERS[name]))
    return drawn


@pytest.mark.parametrize("name", list(MAKERS))
def test_every_rank_has_the_weights_and_the_random_numbers_of_one_process(name):
    seeded(MAKERS[name])
    expected = torch.rand(3).tolist()
    assert [expected] * 3 == run_ranks(3, whole_and_sharded, name)


def test_a_tied_weight_stays_tied():
    weights = make_initial_weights(recipe_of(gpt2), alone())
    model = whole(weights)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_part_of_a_model_is_filled_by_its_names():
    weights = make_initial_weights(recipe_of(llama), alone())
    part = weights.on_meta()
    part.model.embed_tokens = part.lm_head = None
    part.model.layers = nn.ModuleDict({"1": part.model.layers[1]})
    weights.fill(part)
    assert torch.equal(llama().model.layers[1].mlp.up_proj.weight, part.model.layers["1"].mlp.up_proj.weight)


def test_a_name_that_the_model_lacks_is_reported_with_the_nearest_one():
    weights = make_initial_weights(recipe_of(llama), alone())
    with pytest.raises(DistributedError, match="no 'model.norm.weigth'.*did you mean 'model.norm.weight'") as caught:
        weights.read("model.norm.weigth")
    assert caught.value.code == "FG731"


def broadcast_of_the_first():
    topology = started()
    model = llama(seed=topology.rank)
    weights = make_initial_weights(recipe_of(lambda: model, anew=False), topology)
    same_tensors(model, llama(seed=0))
    assert weights.on_meta() is model
    assert {"meta"} == {parameter.device.type for parameter in model.parameters()}
    weights.fill(model)
    same_tensors(model, llama(seed=0))


def test_a_model_that_exists_gets_the_weights_of_the_first_rank():
    run_ranks(2, broadcast_of_the_first)


def other_model_on_rank_one():
    topology = started()
    model = llama(layers=1 + topology.rank)
    with pytest.raises(DistributedError, match="rank 1 has a different model than rank 0") as caught:
        make_initial_weights(recipe_of(lambda: model, anew=False), topology)
    return caught.value.code


def test_different_models_are_refused_on_every_rank():
    assert ["FG732"] * 2 == run_ranks(2, other_model_on_rank_one)


def second_rank_is_told():
    topology = started()

    def broken():
        raise ValueError("a broken constructor")

    try:
        make_initial_weights(recipe_of(broken), topology)
    except (ValueError, DistributedError) as error:
        return type(error).__name__, str(error)


def test_the_other_ranks_name_the_rank_that_could_not_make_the_model():
    first, second = run_ranks(2, second_rank_is_told, timeout=10)
    assert ("ValueError", "a broken constructor") == first
    assert second[0] == "DistributedError"
    assert "FG730" in second[1]
    assert "rank 0 could not make the model: ValueError: a broken constructor" in second[1]


def test_a_model_larger_than_the_memory_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setattr(seed_checkpoint, "available_bytes", lambda: 100_000)
    with pytest.raises(TrainingError, match="takes .*and this machine has 97.7 KiB") as caught:
        make_initial_weights(recipe_of(llama), alone())
    assert caught.value.code == "FG733"


def test_a_temporary_folder_that_is_too_small_for_a_model_is_named(monkeypatch, caplog):
    usage = shutil.disk_usage("/")
    make_initial_weights(recipe_of(llama), alone())
    assert "initial weights:" not in caplog.text
    monkeypatch.setattr(initial_room.shutil, "disk_usage", lambda place: usage._replace(free=1024))
    make_initial_weights(recipe_of(llama), alone())
    assert "where 1.0 KiB are free: set initial_weights: counter, by which" in caplog.text
