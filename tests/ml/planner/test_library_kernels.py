"""What an operator of a library allocates inside of itself is recorded, by the library's own function."""

import pytest
import torch
from torch import nn

from forgather.ml.planner import library_kernels
from forgather.ml.planner.allocations import Region
from forgather.ml.planner.library_kernels import kernel_notes, kernel_of
from forgather.ml.planner.operations import WorkCounter
from forgather.ml.planner.peaks import peaks
from forgather.ml.planner.rank_recorder import TEMPORARIES, RankRecorder

LIBRARY = torch.library.Library("forgather_tests", "FRAGMENT")
LIBRARY.define("product(Tensor states, Tensor packed) -> Tensor")


def product(states, packed):
    return nn.functional.linear(states, packed.float().mul_(0.5))


LIBRARY.impl("product", product, "CPU")
PRODUCT = "bitsandbytes.gemm_4bit"


@pytest.fixture
def kernels(monkeypatch):
    monkeypatch.setitem(library_kernels._KERNELS, "forgather_tests.product", f"{__name__}:product")
    monkeypatch.setitem(library_kernels._KERNELS, PRODUCT, f"{__name__}:product")


def recorded():
    states, packed = torch.ones(8, 64), torch.ones(32, 64, dtype=torch.uint8)
    work = WorkCounter(lambda: "forward")
    recorder = RankRecorder(lambda: Region("forward", 0), lambda allocation: "activations", work, "cpu")
    with recorder:
        result = torch.ops.forgather_tests.product(states, packed)
    (found,) = peaks(recorder.allocations, lambda allocation: allocation.category).values()
    assert (8, 32) == result.shape
    return found.categories, {operation.name: operation.flops for operation in work.operations}


def test_what_a_kernel_frees_is_temporary_and_its_products_are_counted(kernels):
    uses, flops = recorded()

    weight = 4 * 32 * 64
    assert {"activations": 4 * 8 * 32, TEMPORARIES: weight} == uses
    assert 2 * 8 * 32 * 64 == sum(flops.values()) == flops["aten.mm"]


def test_an_operator_that_is_not_known_allocates_its_result_only():
    assert {"activations": 4 * 8 * 32} == recorded()[0]


def test_a_gpu_dequantizes_a_weight_for_more_than_four_tokens_and_nothing_in_a_step(kernels):
    few, many = (torch.ones(4, 64),), (torch.ones(5, 64),)
    assert [None, product] == [kernel_of(PRODUCT, args, "cuda") for args in (few, many)]
    assert product is kernel_of(PRODUCT, few, "cpu")
    assert kernel_of("forgather_tests.product", many, "cuda") is None


def test_notes_say_what_kernels_of_a_library_are_not_counted():
    class Linear4bit(nn.Linear):
        __module__ = "bitsandbytes.nn.modules"

    model = nn.Sequential(Linear4bit(2, 2))
    assert ["1,536" in note for note in kernel_notes(model, None, "cuda")] == [True]
    assert ["other kernels" in note for note in kernel_notes(model, None, "cpu")] == [True]
    assert [] == list(kernel_notes(nn.Linear(2, 2), None, "cpu"))
    notes = [*kernel_notes(nn.Conv1d(2, 2, 1), None, "cpu"), *kernel_notes(nn.Conv1d(2, 2, 1), None, "cuda")]
    assert [("oneDNN" in note, "cuDNN" in note) for note in notes] == [(True, False), (False, True)]
