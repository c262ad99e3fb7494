"""Operators that are remembered give what torch's own mode of fake tensors gives, each time."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forgather.ml.planner import remembered_fakes
from forgather.ml.planner.operators import EagerMode
from forgather.ml.planner.remembered_fakes import RememberingFakes, run_below

ATEN = torch.ops.aten


def one(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def written(given, out):
    returned = ATEN.add.out(given, given, out=out)
    return [returned is out, out]


# Each gives its results for a tensor; some differ only by what a careless key leaves out.
CALLS = {
    "sum": lambda x: x + x,
    "integer": lambda x: one(3, dtype=torch.int64) + 1,
    "float": lambda x: one(3, dtype=torch.int64) + 1.0,
    "bool": lambda x: one(3, dtype=torch.bool) + True,
    "double": lambda x: x.double() * 2,
    "half": lambda x: x.half() * 2,
    "transposed": lambda x: x.t() * 2,
    "strided": lambda x: x[:, ::2] * 2,
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:],
    "offset": lambda x: x[2:][:1],
    "expanded": lambda x: x[:1].expand(4, -1),
    "unsafe view": lambda x: ATEN._unsafe_view(x, [6, 4]),
    "parts": lambda x: x.split(2),
    "list": lambda x: ATEN.split_with_sizes(x, [1, 3]),
    "several": lambda x: torch.max(x, dim=1),
    "joined": lambda x: torch.cat([x, x[:2]]),
    "in place": lambda x: x.add_(1),
    "copy": lambda x: torch.empty_like(x, dtype=torch.float16).copy_(x),
    "foreach": lambda x: torch._foreach_add_([x, x.clone()], 1),
    "foreach new": lambda x: torch._foreach_sqrt([x, x.clone()]),
    "whole number of an index": lambda x: x[torch.tensor([0, 1])],
    "nonzero": lambda x: x.new_zeros(3).to(torch.bool).any(),
    "resized": lambda x: x.clone().resize_(2, 2),
    "matmul": lambda x: x @ x.t(),
    "layouts": lambda x: (x * 3, x.t().contiguous().t() * 3),
    "offsets": lambda x: (x[1:3].view(-1), x[2:4].view(-1)),
    "given result": lambda x: written(x, torch.empty_like(x)),
    "resized result": lambda x: written(x, torch.empty(0)),
    "conjugate": lambda x: torch.complex(x, x).conj() * 2,
    "device": lambda x: x.to(device="cpu", dtype=torch.float64),
    "empty": lambda x: torch.empty_like(x, dtype=torch.int32),
    "alias": lambda x: x.detach(),
    "softmax": lambda x: torch.softmax(x, dim=-1, dtype=torch.float64),
}


def facts(result, given):
    if isinstance(result, tuple | list):
        return [facts(part, given) for part in result]
    if not isinstance(result, torch.Tensor):
        return result
    memory = result.untyped_storage()
    return (
        *(result.dtype, tuple(result.shape), result.stride(), result.storage_offset(), result.device),
        *(memory.nbytes(), memory._cdata == given.untyped_storage()._cdata, result is given, result.is_conj()),
        *(str(torch._C._dispatch_key_set(result)), result.requires_grad),
        {name: value for name, value in vars(result).items() if name != "fake_mode"},
    )


def results(mode, name, above=contextlib.nullcontext):
    with mode(allow_non_fake_inputs=True), above():
        found = []
        for shape in ((4, 6), (4, 6), (4, 8), (4, 6)):
            given = one(*shape) if name != "unsafe view" else one(4, 6)
            found.append(facts(CALLS[name](given), given))
        return found


@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_torch(name):
    assert results(RememberingFakes, name) == results(FakeTensorMode, name)


class Above(EagerMode):
    """A mode above that of fake tensors, as those of a trace are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run_below(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", CALLS)
def test_results_for_a_mode_above_are_those_of_torch(name):
    """The first run may fill what is remembered, the second one finds it."""
    expected = results(FakeTensorMode, name)
    assert results(RememberingFakes, name, Above) == expected
    assert results(RememberingFakes, name, Above) == expected


def test_a_mode_above_asks_no_other_mode_for_known_results_of_fake_tensors():
    """Modes in between still get what has no fake tensor, or is new."""
    asked = []

    class Between(EagerMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            asked.append(func)
            return func(*args, **(kwargs or {}))

    with RememberingFakes(), Between(), Above():
        given = one(3, 5, 7)
        given + given
        asked.clear()
        given + given
        assert asked == []
        one(3, 5, 7)
        given.new_empty(11, 13) + 1
        assert asked[0] is ATEN.empty.memory_format
        assert asked[-1] is ATEN.add.Tensor


def test_most_operators_of_a_model_are_remembered(monkeypatch):
    known = {}
    monkeypatch.setattr(remembered_fakes, "_recipes", known)
    with RememberingFakes():
        model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        for _ in range(2):
            model(one(2, 4, 8)).sum().backward()
    assert sum(recipe is not None for recipe in known.values()) > 0.8 * len(known) > 20


def test_a_changed_default_type_is_seen():
    try:
        with RememberingFakes():
            numbers = one(3, dtype=torch.int64)
            single = (numbers / 2).dtype
            torch.set_default_dtype(torch.float64)
            assert (torch.float32, torch.float64) == (single, (numbers / 2).dtype)
    finally:
        torch.set_default_dtype(torch.float32)


def test_numbers_decide_results_of_new_tensors_but_not_of_what_is_written_in_place(monkeypatch):
    known = {}
    monkeypatch.setattr(remembered_fakes, "_recipes", known)
    with RememberingFakes():
        given, numbers = one(4), one(3, dtype=torch.int64)
        for value in (0.5, 0.25):
            torch._foreach_addcdiv_([given], [one(4)], [one(4)], [value])
            given.mul_(value)
        in_place = sum(
            key[0] in (ATEN._foreach_addcdiv_.ScalarList, ATEN.mul_.Scalar, ATEN.mul_.Tensor) for key in known
        )
        assert in_place == 2
        # The type of a number decides still, and so does its value where it may be a size.
        assert [(numbers * 2).dtype, (numbers * 2.0).dtype] == [torch.int64, torch.float32]
        assert [3, 5] == [len(torch.arange(0.0, end)) for end in (3.0, 5.0)]


def sharded(x):
    """Gathers and reduces as FSDP2 does, into memory of other sizes for each size of a weight."""
    ops, world, size = torch.ops.fsdp, 2, x.numel()
    gathered = ops.all_gather_copy_in([x.view(-1)], one(world * size), [size], size, 1)
    parts = [one(world, size)]
    ops.split_with_sizes_copy(gathered[1].view(world, -1), [size], dim=1, out=parts)
    sent = one(world, size)
    ops.chunk_cat([one(world * size)], dim=0, num_chunks=world, out=sent)
    return [*gathered, *parts, sent]


def test_messages_of_shards_are_those_of_torch(monkeypatch):
    monkeypatch.setattr(remembered_fakes, "_recipes", known := {})
    monkeypatch.setitem(CALLS, "sharded", sharded)
    assert results(RememberingFakes, "sharded") == results(FakeTensorMode, "sharded")
    remembered = {key[0].namespace for key, recipe in known.items() if recipe is not None}
    assert "fsdp" in remembered


def test_known_values_stay_known():
    with RememberingFakes():
        one(dtype=torch.int64) + 2
        assert [5, 7] == [int(torch.tensor(number) + 2) for number in (3, 5)]


def test_tensors_of_another_mode_are_refused_as_torch_does():
    with RememberingFakes():
        other = one(2)
    with RememberingFakes():
        one(2) + one(2)
        with pytest.raises(AssertionError, match="Mixing fake modes"):
            one(2) + other


def test_a_result_that_keeps_more_memory_than_it_needs_is_made_by_torch():
    with RememberingFakes() as mode:
        given = one(4)
        assert mode._recipe((given,), one(4)) is not None
        assert mode._recipe((given,), one(8)[:4]) is None
