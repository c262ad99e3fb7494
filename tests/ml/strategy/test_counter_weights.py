"""Each slice of a weight is computed by itself and equals that of one process; what cannot be computed so is refused."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from forgather.errors import DistributedError, TrainingError
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.random_state import forked_random
from forgather.ml.strategy import counter_weights
from forgather.ml.strategy.counter_weights import CounterWeights
from forgather.ml.strategy.initial_weights import make_initial_weights
from forgather.ml.strategy.meta_model import tensors_of
from forgather.ml.strategy.state import whole_box
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.strategy.models import gpt2, llama, whole
from tests.ml.strategy.test_initial import alone, recipe_of, started

FILLS = {
    "uniform_": (lambda w: nn.init.uniform_(w, -0.5, 1.5), 0.5, 2 / math.sqrt(12)),
    "normal_": (lambda w: nn.init.normal_(w, 0.1, 0.02), 0.1, 0.02),
    "trunc_normal_": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, -1.0, 1.0), 0.0, 0.5396),
    "trunc_normal_ of one side": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 0.0, 9.0), 0.7979, 0.6028),
    "xavier_uniform_": (lambda w: nn.init.xavier_uniform_(w), 0.0, math.sqrt(2 / 300)),
    "xavier_normal_": (lambda w: nn.init.xavier_normal_(w, 2.0), 0.0, 2 * math.sqrt(2 / 300)),
    "kaiming_uniform_": (lambda w: nn.init.kaiming_uniform_(w, a=math.sqrt(5)), 0.0, math.sqrt(1 / 600)),
    "kaiming_normal_": (lambda w: nn.init.kaiming_normal_(w, mode="fan_out"), 0.0, math.sqrt(2 / 100)),
    "zeros_": (lambda w: nn.init.zeros_(w), 0.0, 0.0),
    "ones_": (lambda w: nn.init.ones_(w), 1.0, 0.0),
    "constant_": (lambda w: nn.init.constant_(w, 0.25), 0.25, 0.0),
    "normal_, then arithmetic": (lambda w: nn.init.normal_(w).mul_(3).add_(1).div_(2).sub_(0.5), 0.0, 1.5),
    "cut off": (lambda w: nn.init.normal_(w).clamp_(-0.5, 0.5), 0.0, 0.4203),
}


class One(nn.Module):
    """A model of one weight, which a function fills."""

    def __init__(self, fill, shape=(100, 200), dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        with torch.no_grad():
            fill(self.weight)


def recorded(make, seed=5):
    with forked_random(seed):
        return CounterWeights(make)


def value(weights, name="weight"):
    return weights.part(name, whole_box(weights.shape(name)))


@pytest.mark.parametrize("name", FILLS)
def test_a_fill_has_the_mean_and_the_deviation_of_torchs(name):
    fill, mean, std = FILLS[name]
    found = value(recorded(lambda: One(fill))).double()
    torchs = One(fill).weight.detach().double()
    for values in (found, torchs):
        assert float(values.mean()) == pytest.approx(mean, abs=4 * std / math.sqrt(20_000) + 1e-9)
        assert float(values.std()) == pytest.approx(std, rel=0.03, abs=1e-9)
    # Bounds as well.
    assert float(found.min()) == pytest.approx(float(torchs.min()), abs=max(std, 1e-9))
    assert float(found.max()) == pytest.approx(float(torchs.max()), abs=max(std, 1e-9))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_has_the_same_numbers_rounded_once(dtype):
    fill = FILLS["normal_"][0]
    exact = value(recorded(lambda: One(fill, dtype=torch.float64)))
    assert torch.equal(exact.to(dtype), value(recorded(lambda: One(fill, dtype=dtype))))


@pytest.mark.parametrize("shape", [(7,), (7, 5), (3, 4, 5), (2, 3, 4, 5), (300, 70)])
def test_a_slice_is_computed_by_itself(shape):
    weights = recorded(lambda: One(FILLS["normal_"][0] if len(shape) > 1 else nn.init.uniform_, shape))
    every = value(weights)
    for dim in range(len(shape)):
        for start, stop in ((0, 1), (shape[dim] // 2, shape[dim]), (1, shape[dim] - 1), (2, 2)):
            box = list(whole_box(shape))
            box[dim] = slice(start, stop)
            assert torch.equal(every[tuple(box)], weights.part("weight", tuple(box)))
    box = tuple(slice(size // 3, size - size // 4) for size in shape)
    assert torch.equal(every[box], weights.part("weight", box))


def test_a_scalar_is_filled():
    weights = recorded(lambda: One(lambda w: w.fill_(3.5), ()))
    assert value(weights) == 3.5


def test_the_values_depend_on_seed_and_name_and_on_nothing_else(monkeypatch):
    class Two(nn.Module):
        def __init__(self, names):
            super().__init__()
            for name in names:
                self.register_parameter(name, nn.Parameter(torch.randn(40, 30)))

    one = recorded(lambda: Two("ab"))
    assert not torch.equal(value(one, "a"), value(one, "b"))
    assert torch.equal(value(one, "b"), value(recorded(lambda: Two("xbya")), "b"))
    assert not torch.equal(value(one, "a"), value(recorded(lambda: Two("ab"), seed=6), "a"))
    before = value(one, "a")
    monkeypatch.setattr(counter_weights, "CHUNK", 96)
    assert torch.equal(before, value(one, "a"))


class Various(nn.Module):
    """What else models do while they are built."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6, padding_idx=2)
        self.gates = nn.Parameter(torch.empty(12, 6))
        with torch.no_grad():
            self.gates.normal_()
            self.gates[3:6].fill_(7.0)
            self.gates[:, 1:3].zero_()
        self.scaled = nn.Parameter(torch.randn(5, 6) * 0.5 + 2)
        self.copied = nn.Parameter(self.scaled.detach().clone())
        self.turned = nn.Parameter(torch.eye(6) * 2)
        self.positions = nn.Parameter(self.table(8))
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(0, 6, 2).float() / 6))
        self.register_buffer("codes", torch.randn(4, 3), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.list = torch.tensor([3, 1, 2])
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    @staticmethod
    def table(length):
        positions = torch.arange(length).unsqueeze(1)
        rates = torch.exp(torch.arange(0, 6, 2) * (-math.log(10000.0) / 6))
        found = torch.zeros(length, 6)
        found[:, 0::2] = torch.sin(positions * rates)
        found[:, 1::2] = torch.cos(positions * rates)
        return found


def test_regions_copies_ties_tables_and_buffers():
    with forked_random(5):
        model = whole(make_initial_weights(recipe_of(Various, fills="counter"), alone()))
    plain = Various()
    assert model.head.weight is model.embedding.weight
    assert not model.embedding.weight[2].any()
    assert model.embedding.weight[1].all()
    expected = torch.zeros(12, 6, dtype=torch.bool)
    expected[3:6] = True
    expected[:, 1:3] = False
    assert torch.equal(expected, model.gates == 7)
    assert not model.gates[:, 1:3].any()
    assert (model.gates != 0).sum() == 12 * 4
    assert torch.equal(model.scaled, model.copied)
    assert float(model.scaled.detach().mean()) == pytest.approx(2, abs=0.4)
    for name in ("turned", "positions", "frequencies", "mask", "list"):
        assert torch.equal(getattr(plain, name), getattr(model, name)), name
        assert getattr(plain, name).dtype == getattr(model, name).dtype
    assert torch.equal(model.norm.running_var, torch.ones(6))
    assert model.norm.num_batches_tracked == 0
    assert model.codes.std() > 0.3


def test_a_dtype_that_is_set_while_the_model_is_built_holds_for_its_tables():
    def make():
        kept = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Various()
        finally:
            torch.set_default_dtype(kept)

    weights = recorded(make)
    plain = make()
    assert torch.bfloat16 == weights.part("positions", whole_box((8, 6))).dtype
    assert torch.equal(plain.positions, value(weights, "positions"))
    assert torch.equal(plain.frequencies, value(weights, "frequencies"))


def test_a_conversion_while_the_model_is_built_rounds_the_numbers():
    exact = recorded(lambda: One(FILLS["normal_"][0]))
    halves = recorded(lambda: One(FILLS["normal_"][0]).to(torch.bfloat16))
    assert torch.equal(value(exact).bfloat16(), value(halves))


REFUSED = {
    "orthogonal": (lambda w: nn.init.orthogonal_(w), "'weight' is filled by way of "),
    "an exponential": (lambda w: w.uniform_().log_(), "'weight' is filled by way of log_"),
    "a product": (lambda w: w.copy_(torch.randn(100, 3) @ torch.randn(3, 200)), "is filled by way of mm"),
    "nothing": (lambda w: None, "'weight' is left as torch.empty makes it"),
    "a part": (lambda w: w[:50].normal_(), "'weight' is left as torch.empty makes it"),
    "every second row": (lambda w: w.normal_()[::2].zero_(), "'weight' is filled in parts of another layout"),
    "a value": (lambda w: w.normal_().mul_(float(w.std())), "cannot be built without values"),
    "a permutation": (lambda w: w.copy_(torch.randperm(20_000).view(100, 200)), "is filled by way of randperm"),
    "a tail": (lambda w: nn.init.trunc_normal_(w, 0.0, 1.0, 5.0, 6.0), "which is the tail alone"),
}


OF_OTHER_ELEMENTS = {
    "complex numbers": (lambda: torch.randn(3, dtype=torch.complex64), "randn of complex numbers"),
    "real parts": (lambda: torch.view_as_complex(torch.randn(3, 2)), "a view of another dtype"),
    "parts of complex numbers": (
        lambda: torch.view_as_complex(torch.view_as_real(torch.zeros(3, dtype=torch.complex64)).normal_()), "normal_",
    ),
    "bits": (lambda: torch.rand(3).view(torch.int32).mul_(2).view(torch.float32), "mul_"),
    "a tail of a view": (lambda: torch.view_as_complex(nn.init.trunc_normal_(torch.zeros(3, 2))), "a view of another"),
}  # fmt: skip


class Made(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(make())


@pytest.mark.parametrize("name", REFUSED)
def test_another_initialization_is_refused_by_name(name):
    fill, message = REFUSED[name]
    with pytest.raises(TrainingError, match=message) as caught:
        recorded(lambda: One(fill))
    assert caught.value.code == "FG619"
    assert "initial_weights: sequential" in caught.value.hint


@pytest.mark.parametrize("name", OF_OTHER_ELEMENTS)
def test_numbers_drawn_for_elements_of_another_kind_are_refused(name):
    make, reason = OF_OTHER_ELEMENTS[name]
    with pytest.raises(TrainingError, match=f"filled by way of {reason}") as caught:
        recorded(lambda: Made(make))
    assert "FG619" == caught.value.code


def test_constants_written_through_another_dtype_are_what_torch_writes():
    def bits():
        found = torch.empty(3)
        found.view(torch.int32).fill_(0x3F800000)
        return found

    assert torch.equal(torch.ones(3), value(recorded(lambda: Made(bits))))
    whole = value(recorded(lambda: Made(lambda: torch.zeros(3, dtype=torch.complex64).add_(2j))))
    assert torch.equal(torch.full((3,), 2j), whole)


def seeded(make):
    seed_everything(11)
    return make()


def slices(name):
    topology = started()
    if topology.rank:
        seed_everything(99 + topology.rank)
    make = functools.partial(seeded, {"llama": llama, "gpt2": gpt2, "various": Various}[name])
    weights = make_initial_weights(recipe_of(make, fills="counter"), topology)
    drawn = torch.rand(3).tolist()
    meta = weights.on_meta()
    fully_shard(meta)
    weights.fill(meta)
    alone = CounterWeights(make)
    for fqn, _, _, tensor in tensors_of(meta):
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(alone.part(fqn, whole_box(alone.shape(fqn))), full), fqn
    return drawn


@pytest.mark.parametrize("name", thinned(["llama", "gpt2", "various"], lambda name: name == "various"))
def test_every_rank_computes_its_slices_of_the_weights_of_one_process(name):
    first, *others = run_ranks(3, slices, name)
    assert [first] * 2 == others


def other_model_on_rank_one():
    topology = started()
    with pytest.raises(DistributedError, match="rank 1 has a different model than rank 0") as caught:
        make_initial_weights(recipe_of(lambda: llama(seed=topology.rank), fills="counter"), topology)
    return caught.value.code


def test_different_fills_are_refused_on_every_rank():
    assert ["FG732"] * 2 == run_ranks(2, other_model_on_rank_one)


class Halves(nn.Module):
    """A model whose weight is the first half of a memory, of which the second half is filled last."""

    def __init__(self):
        super().__init__()
        both = torch.empty(8).normal_()
        both[4:].fill_(5.0)
        self.weight = nn.Parameter(both[:4])


def test_a_part_of_a_memory_does_not_get_the_values_of_another_part():
    with pytest.raises(TrainingError, match=r"FG619.*'weight' is filled in parts of another layout"):
        recorded(Halves)


def test_a_weight_in_a_wider_dtype_has_the_rounding_of_its_own():
    made = recorded(lambda: One(nn.init.normal_, (50,), torch.bfloat16))
    box = whole_box(made.shape("weight"))
    assert torch.equal(made.part("weight", box).float(), made.part("weight", box, torch.float32))
