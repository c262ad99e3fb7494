"""A plan for a GPU keeps the scores of attention where a GPU has no fused kernel, and only there."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from forgather.ml.planner.allocations import AllocationRecorder, Region
from forgather.ml.planner.gpu_attention import GpuAttention

ROWS, HEADS, LENGTH, WIDTH = 2, 4, 32, 8
FLOAT, HALF = torch.float32, torch.bfloat16
KINDS = {
    "plain": ({}, False, False),
    "mask": ({"mask": True}, False, False),
    "dropout": ({"dropout_p": 0.1}, True, False),
    "mask and dropout": ({"mask": True, "dropout_p": 0.1}, True, False),
    "grouped, half": ({"dtype": HALF, "key_heads": 2}, False, False),
    "grouped, half, mask": ({"dtype": HALF, "key_heads": 2, "mask": True}, False, True),
    "grouped": ({"key_heads": 2}, False, True),
    "grouped, autocast": ({"key_heads": 2, "autocast": True}, False, False),
    "transposed mask": ({"mask": "transposed"}, False, True),
    "transposed mask and dropout": ({"mask": "transposed", "dropout_p": 0.1}, True, True),
    "learned mask": ({"mask": "learned"}, True, False),
    "narrow heads": ({"width": 6}, False, True),
    "narrow heads, half": ({"width": 4, "dtype": HALF}, False, False),
    "narrow heads, half, mask": ({"width": 4, "dtype": HALF, "mask": True}, False, True),
    "grouped, autocast, mask": ({"key_heads": 2, "mask": True, "autocast": True}, False, True),
}


def keeps_scores(device_type, *, dtype=FLOAT, key_heads=HEADS, mask=False, dropout_p=0.0, autocast=False, width=WIDTH):
    attention = GpuAttention(device_type)
    casts = torch.autocast("cpu", HALF, enabled=autocast)
    with FakeTensorMode(), casts, attention, AllocationRecorder(lambda: Region("forward", 0)) as recorder:
        states = [
            torch.empty(ROWS, heads, LENGTH, width, dtype=dtype, requires_grad=True)
            for heads in (HEADS, key_heads, key_heads)
        ]
        given = torch.empty(ROWS, 1, LENGTH, LENGTH, dtype=dtype) if mask else None
        given = given.mT if mask == "transposed" else given
        given = given.requires_grad_() if mask == "learned" else given
        result = functional.scaled_dot_product_attention(
            *states, given, dropout_p=dropout_p, enable_gqa=key_heads != HEADS
        )
        kept = [item for item in recorder.allocations if item.died is None]
        assert (ROWS, HEADS, LENGTH, width) == result.shape
    scores = ROWS * HEADS * LENGTH * LENGTH * result.dtype.itemsize
    return any(item.num_bytes >= scores for item in kept), [*attention.notes()]


@pytest.mark.parametrize(("given", "on_cpu", "on_gpu"), KINDS.values(), ids=KINDS)
def test_scores_are_kept_where_a_device_has_no_fused_kernel(given, on_cpu, on_gpu):
    assert (on_cpu, []) == keeps_scores("cpu", **given)
    found, notes = keeps_scores("cuda", **given)
    assert on_gpu == found
    if on_gpu:
        assert ["all scores" in note for note in notes] == [True]
    else:
        words = ["keeps no scores"] * ("mask" in given or "dropout_p" in given) + ["V100"] * ("key_heads" in given)
        assert [word in note for word, note in zip(words, notes, strict=True)] == [True] * len(words)


def test_torch_computes_as_before_afterwards():
    before = functional.scaled_dot_product_attention
    with pytest.raises(ZeroDivisionError), GpuAttention("cuda"):
        assert functional.scaled_dot_product_attention is not before
        raise ZeroDivisionError
    assert functional.scaled_dot_product_attention is before


def test_a_learned_mask_gets_a_gradient_of_its_own_shape_at_the_peak_of_all_scores():
    peaks = {}
    for device_type in ("cpu", "cuda"):
        with FakeTensorMode(), GpuAttention(device_type), AllocationRecorder(lambda: Region("forward", 0)) as recorder:
            query = torch.empty(ROWS, HEADS, LENGTH, WIDTH, requires_grad=True)
            mask = torch.empty(1, HEADS, LENGTH, LENGTH, requires_grad=True)
            functional.scaled_dot_product_attention(query, query, query, mask).sum().backward()
            assert mask.grad.shape == mask.shape and query.grad.shape == query.shape
            sizes = [item.num_bytes for item in recorder.allocations]
        peaks[device_type] = sum(size >= ROWS * HEADS * LENGTH * LENGTH * 4 for size in sizes)
    assert peaks["cuda"] == 1 < peaks["cpu"]
