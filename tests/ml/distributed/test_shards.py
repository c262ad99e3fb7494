"""Who writes which part of a state, and what another layout reads of it: files, names, errors on every rank."""

import functools
import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoModelForCausalLM

from forgather.errors import CheckpointError, ForgatherError
from forgather.ml.checkpoint.checkpoint_dir import Draft
from forgather.ml.checkpoint.files import json_bytes
from forgather.ml.checkpoint.reader import CheckpointReader, whole_weights
from forgather.ml.checkpoint.retention import Retention
from forgather.ml.checkpoint.save_plan import LocalState, SavePlanner, merged_optimizers
from forgather.ml.checkpoint.storage import LocalStorage
from forgather.ml.distributed import collectives
from forgather.ml.distributed.host_tree import HostTree
from forgather.ml.strategy.state import local_optimizer_state, local_state, restore_optimizer, restore_weights
from forgather.ml.trainer.checkpoint_writer import CheckpointWriter
from forgather.ml.trainer.snapshot import Snapshot
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.states import read, write
from tests.ml.fixtures import largest_difference, tiny_llama

gang = functools.partial(run_ranks, start_group=True)


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def sliced(whole, placements, shape=None):
    """A DTensor of `whole`, of which this rank has its part; nobody is asked."""
    mesh = init_device_mesh("cpu", shape or (dist.get_world_size(),))
    sizes, offsets = compute_local_shape_and_global_offset(whole.shape, mesh, placements)
    local = whole[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


# -- what is written ---------------------------------------------------------------------------------------------------


def _each_its_part(folder):
    weights = {
        "rows": sliced(numbers(5, 4), [Shard(0)]),
        "few": sliced(numbers(1, 3), [Shard(0)]),
        "all": numbers(2, 2),
    }
    return sorted(write(LocalState(weights=weights), folder))


def test_each_rank_writes_what_lies_there_and_what_all_hold_is_written_once(tmp_path):
    found = gang(3, _each_its_part, tmp_path)
    assert [[f"weights-0000{rank}-of-00003.safetensors"] for rank in (2, 3)] == found[1:]
    keys = []
    for file in sorted(tmp_path.glob("weights-*")):
        with safe_open(file, framework="pt") as stream:
            keys += stream.keys()
    assert ["all", "few", "rows@0,0", "rows@2,0", "rows@4,0"] == sorted(keys)
    index = json.loads((tmp_path / "index.json").read_text())["tensors"]["model"]["rows"]
    assert ("F32", [5, 4]) == (index["dtype"], index["shape"])
    assert [([0, 0], [2, 4]), ([2, 0], [2, 4]), ([4, 0], [1, 4])] == [
        (c["offsets"], c["sizes"]) for c in index["chunks"]
    ]
    whole = dict(whole_weights(tmp_path))
    assert torch.equal(numbers(5, 4), whole["rows"]) and torch.equal(numbers(1, 3), whole["few"])


def _reads(folder):
    targets = {
        "columns": sliced(torch.zeros(6, 8), [Shard(1)]),
        "blocks": sliced(torch.zeros(6, 8), [Shard(0), Shard(1)], (2, 2)),
        "rows of rows": sliced(torch.zeros(6, 8), [Shard(0), Shard(0)], (2, 2)),
        "replicas": sliced(torch.zeros(6, 8), [Replicate(), Shard(0)], (2, 2)),
    }
    with CheckpointReader(folder) as saved:
        for target in targets.values():
            saved.read(saved.weights["w"], target)
    return {name: target.full_tensor() for name, target in targets.items()}


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_slices_of_one_kind_are_read_into_slices_of_any(placements, tmp_path):
    gang(3, _writes_one, tmp_path, placements)
    for found in gang(4, _reads, tmp_path):
        assert all(torch.equal(numbers(6, 8), value) for value in found.values()), found


def _writes_one(folder, placements):
    write(LocalState(weights={"w": sliced(numbers(6, 8), placements)}), folder)


def _copies(folder):
    model = tiny_llama(tie_word_embeddings=True)
    write(local_state(model.state_dict(keep_vars=True), None), folder)
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder)


def test_whole_weights_in_several_files_load_at_once(tmp_path):
    gang(3, _copies, tmp_path)
    assert 3 == len(list(tmp_path.glob("model-0000?-of-00003.safetensors")))
    assert json.loads((tmp_path / "index.json").read_text())["aliases"] == {
        "lm_head.weight": "model.embed_tokens.weight"
    }
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 0 == largest_difference(tiny_llama(tie_word_embeddings=True).state_dict(), loaded.state_dict())
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


class Averages(nn.Module):
    """Replicas see other rows, so that their buffers differ."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("mean", torch.full((1024,), float(collectives.rank())))


def _buffers(folder):
    model = Averages()
    first = collectives.rank() == 0
    write(local_state(model.state_dict(keep_vars=True), None, is_first=first), folder)


def test_buffers_are_those_of_the_first_replica(tmp_path):
    gang(3, _buffers, tmp_path)
    assert 0.0 == read(tmp_path)["model"]["mean"].max()


def _half_summed(folder):
    model = nn.Linear(4, 2, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = sliced(numbers(2, 4), [Shard(0)])
    model.weight = nn.Parameter(weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = torch.full((4,), 1.0 + dist.get_rank())
    optimizer.state[model.weight] = {
        "columns": DTensor.from_local(local, mesh, [Partial()], run_check=False),
        "count": torch.tensor(3.0),
        "history": [torch.ones(2), {"deep": torch.tensor(7)}],
    }
    write(local_state(model.state_dict(keep_vars=True), local_optimizer_state(model, optimizer)), folder)
    fresh = torch.optim.SGD(model.parameters(), lr=0.5)
    with CheckpointReader(folder) as saved:
        restore_optimizer(model, fresh, saved)
    state = fresh.state[model.weight]
    return state["columns"].full_tensor(), state["count"], state["history"][1]["deep"], fresh.param_groups[0]["lr"]


def test_what_has_another_shape_than_its_weight_is_kept_whole(tmp_path):
    for columns, count, deep, rate in gang(2, _half_summed, tmp_path):
        assert torch.equal(torch.full((4,), 3.0), columns)
        assert (3.0, 7, 0.1) == (float(count), int(deep), rate)


def test_groups_of_equal_settings_apart_are_one_group():
    one = {"state": {"a": 1}, "param_groups": [{"params": ["a"], "lr": 1}, {"params": [], "lr": 2}]}
    other = {"state": {"b": 2, "a": 1}, "param_groups": [{"params": ["a", "b"], "lr": 1}, {"params": ["c"], "lr": 2}]}
    merged = merged_optimizers([one, other])
    assert {"a": 1, "b": 2} == merged["state"]
    assert [(["a", "b"], 1), (["c"], 2)] == [(group["params"], group["lr"]) for group in merged["param_groups"]]


def test_a_parameter_is_in_the_group_of_its_settings_whatever_groups_its_stage_has():
    one = {"state": {}, "param_groups": [{"params": ["a"], "lr": 1, "weight_decay": 0.1}]}
    other = {
        "state": {},
        "param_groups": [
            {"params": ["n"], "lr": 1, "weight_decay": 0.0},
            {"params": ["b"], "lr": 1, "weight_decay": 0.1},
        ],
    }
    merged = merged_optimizers([one, other])
    assert [(["a", "b"], 0.1), (["n"], 0.0)] == [
        (group["params"], group["weight_decay"]) for group in merged["param_groups"]
    ]
    assert [(["n"], 0.0), (["b", "a"], 0.1)] == [
        (group["params"], group["weight_decay"]) for group in merged_optimizers([other, one])["param_groups"]
    ]


def _changes():
    planning, found = SavePlanner(), []
    for names in (["a"], ["a"], ["a", "b"]):
        shards = planning.plan(LocalState(weights={name: sliced(numbers(4, 2), [Shard(0)]) for name in names}))
        found.append(sorted(key for tensors in shards.tensors.values() for key in tensors))
    return found


def test_a_plan_that_is_remembered_follows_what_changes():
    first, second = gang(2, _changes)
    assert [["a@0,0"], ["a@0,0"], ["a@0,0", "b@0,0"]] == first
    assert [["a@2,0"], ["a@2,0"], ["a@2,0", "b@2,0"]] == second


def _sent_by_saves():
    """Returns the calls of the host tree by each of several saves, and what this rank keeps of the plan of all."""
    planning, sent, found = SavePlanner(), [], []

    def noted(name):
        whole = getattr(HostTree, name)

        def note(tree, *args, **given):
            sent.append(name)
            return whole(tree, *args, **given)

        return note

    for name in ("all_reduce", "broadcast_objects", "all_gather", "gather", "gather_distinct", "scatter"):
        setattr(HostTree, name, noted(name))

    def save(names, lr, dtype=torch.float32, placement=None):
        sent.clear()
        weights = {name: sliced(numbers(4, 2).to(dtype), [placement or Shard(0)]) for name in names}
        optimizer = {"state": {}, "param_groups": [{"params": list(names), "lr": lr}]}
        files = planning.plan(LocalState(weights=weights, optimizer=optimizer))
        rate = json.loads(files.texts["optimizer.json"])["param_groups"][0]["lr"] if files.texts else None
        found.append(([*sent], rate))

    save(["a"], 1)
    save(["a"], 2)
    save(["a", "b"], 2)  # another parameter
    save(["a", "b"], 2, torch.bfloat16)
    save(["a", "b"], 2, torch.bfloat16, Shard(1))
    save(["a", "b"], 3, torch.bfloat16, Shard(1))
    return found, sorted(planning._texts), len(planning._parts)


def test_a_plan_is_sent_only_for_a_new_structure_and_lies_on_the_main_process():
    again = ["all_reduce", "all_reduce", "gather_distinct"]
    planned = ["all_reduce", "all_reduce", "gather", "scatter", "gather_distinct"]
    first, second = gang(2, _sent_by_saves)
    assert [planned, again, planned, planned, planned, again] == [sent for sent, _ in first[0]]
    assert [sent for sent, _ in first[0]] == [sent for sent, _ in second[0]]
    assert [1, 2, 2, 2, 2, 3] == [rate for _, rate in first[0]]
    assert (["index.json"], 2) == first[1:]
    assert ([], 2) == second[1:]


# -- what fails --------------------------------------------------------------------------------------------------------


def _error(act):
    try:
        act()
    except ForgatherError as error:
        return error.code, error.message
    except Exception as error:  # noqa: BLE001 - the error is what is looked at
        return type(error).__name__, str(error)
    return None


def _fails_on(rank, error):
    def act():
        if dist.get_rank() == rank or rank is None:
            raise error
        return dist.get_rank()

    return _error(lambda: collectives.run_collectively(act)), collectives.run_and_gather(dist.get_rank)


def test_the_first_failure_of_any_rank_is_that_of_all():
    one = CheckpointError("no space", code="FG609")
    assert [(("FG609", "rank 1: no space"), [0, 1, 2])] * 3 == gang(3, _fails_on, 1, one)
    assert [(("FG609", "no space"), [0, 1, 2])] * 3 == gang(3, _fails_on, None, one)
    first, second, third = (found for found, _ in gang(3, _fails_on, 1, ZeroDivisionError("of one")))
    assert ("ZeroDivisionError", "of one") == second
    assert first == third and "FG854" == first[0] and "rank 1 failed" in first[1] and "of one" in first[1]


class Full(LocalStorage):
    """A disk that is full for one rank."""

    def create(self, file):
        if dist.get_rank() == 1 and file.name == "part-1.safetensors":
            raise OSError(28, "No space left on device")
        return super().create(file)


def _full_disk(folder):
    checkpoints = CheckpointWriter(folder, Full(), retention=Retention(), max_steps=9, facts={})
    snapshot = Snapshot(step=3, tensors={f"part-{dist.get_rank()}.safetensors": {"w": torch.ones(2)}}, texts={})
    return _error(lambda: checkpoints.write(snapshot))


def test_a_disk_that_is_full_for_one_rank_is_told_by_all_and_nothing_half_made_stays(tmp_path):
    for code, message in gang(3, _full_disk, tmp_path):
        assert "FG609" == code
        assert message.startswith("rank 1: the checkpoint of step 3") and "No space left" in message
    assert [] == list(tmp_path.iterdir())


def _cannot_hold():
    value = object() if dist.get_rank() == 1 else 1
    odd = torch.zeros(2, dtype=torch.complex128) if dist.get_rank() == 0 else torch.zeros(2)
    optimizer = {"state": {"w": {"thing": value}}, "param_groups": []}
    return (
        _error(lambda: SavePlanner().plan(LocalState(weights={}, optimizer=optimizer))),
        _error(lambda: SavePlanner().plan(LocalState(weights={"w": odd}))),
    )


def test_a_value_that_no_file_holds_is_told_by_all():
    for tree, tensor in gang(2, _cannot_hold):
        assert ("FG606", "rank 1: optimizer.state.w.thing is a object, which a checkpoint cannot hold") == tree
        assert ("FG606", "rank 0: model/w is a torch.complex128, which a checkpoint cannot hold") == tensor


def _another_model(folder):
    model = tiny_llama(vocab_size=80 if dist.get_rank() == 1 else 64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with CheckpointReader(folder) as saved:
        found = _error(lambda: restore_weights(model, model.state_dict(), [model], saved))
    return found, largest_difference(before, model.state_dict())


def test_weights_that_fit_one_rank_alone_change_none(tmp_path):
    model = tiny_llama(seed=9)
    run_ranks(1, _writes_model, tmp_path, model)
    for (code, message), moved in gang(2, _another_model, tmp_path):
        assert ("FG605", 0) == (code, moved)
        assert message.startswith(
            "rank 1: the weights do not fit LlamaForCausalLM: 'model.embed_tokens.weight' has shape (64, 32),"
        )
        assert "not (80, 32); 'lm_head.weight'" in message


def _writes_model(folder, model, optimizer=None):
    write(local_state(model.state_dict(keep_vars=True), optimizer), folder)


class Two(nn.Module):
    def __init__(self, first="a", second="b", size=2):
        super().__init__()
        setattr(self, first, nn.Parameter(torch.ones(size)))
        setattr(self, second, nn.Parameter(torch.ones(2)))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Two("a", "c"), "'c' is missing; 'b' is not in the model"),
        (Two("x", "y"), "'x' is missing; 'y' is missing; 'a' is not in the model; and 1 more"),
        (Two(size=5), "'a' has shape (2,), not (5,)"),
    ],
)
def test_names_and_shapes_of_another_model_are_told(other, said, tmp_path):
    _writes_model(tmp_path, Two())
    with CheckpointReader(tmp_path) as saved:
        code, message = _error(lambda: restore_weights(other, other.state_dict(), [other], saved))
    assert ("FG605", f"the weights do not fit Two: {said}") == (code, message)


def test_the_optimizer_state_of_other_parameters_is_told(tmp_path):
    model = Two()
    optimizer = torch.optim.AdamW(model.parameters())
    _writes_model(tmp_path, model, local_optimizer_state(model, optimizer))
    model.b.requires_grad_(False)
    frozen = torch.optim.AdamW([model.a])
    with CheckpointReader(tmp_path) as saved:
        code, message = _error(lambda: restore_optimizer(model, frozen, saved))
    assert ("FG605", "the optimizer state does not fit AdamW: it has 'b', which is not trained") == (code, message)


class Computed(nn.Linear):
    """Its state is not the memory of its weights."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[f"{prefix}doubled"] = self.weight.detach() * 2

    def _load_from_state_dict(self, state_dict, prefix, *args):
        with torch.no_grad():
            self.weight.copy_(state_dict[f"{prefix}doubled"] / 2)


def test_a_module_that_computes_its_state_loads_it_itself(tmp_path):
    model, other = Computed(2, 2), Computed(2, 2)
    _writes_model(tmp_path, model)
    with CheckpointReader(tmp_path) as saved:
        restore_weights(other, other.state_dict(), [other], saved)
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["tensors"]["model"]["a"].update(shape=[3]),
        lambda index: index["tensors"]["model"]["a"]["chunks"].clear(),
        lambda index: index["tensors"]["model"]["a"]["chunks"][0].update(file="../other.safetensors"),
        lambda index: index["tensors"]["model"]["a"]["chunks"][0].update(key="z"),
        lambda index: index["tensors"]["model"]["a"].update(dtype="F64"),
        lambda index: index["aliases"].update(c="nowhere"),
        lambda index: index.pop("tensors"),
    ],
)
def test_an_index_that_does_not_fit_the_files_is_told_as_what_no_run_writes(change, tmp_path):
    _writes_model(tmp_path, Two())
    index = json.loads((tmp_path / "index.json").read_text())
    change(index)
    Draft(LocalStorage(), tmp_path).write("index.json", [json_bytes(index)])
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(tmp_path)
    assert "FG611" == caught.value.code
