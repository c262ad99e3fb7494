"""A plan for a GPU keeps what autocast and dropout of a GPU keep, and a plan for a CPU what those of a CPU keep."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from forgather.ml.planner import gpu_operators as module
from forgather.ml.planner.allocations import AllocationRecorder, Region
from forgather.ml.planner.gpu_operators import gpu_operators, widened

HALF, FULL = torch.bfloat16, torch.float32
ROWS, WIDTH = 64, 32
# Operators that models compute under autocast, and the dtype of their results on a GPU.
RESULTS = {
    "pow": (lambda x: x**3.0, FULL),
    "softmax": (lambda x: functional.softmax(x, -1), FULL),
    "softmax in half": (lambda x: functional.softmax(x, -1, dtype=HALF), HALF),
    "log_softmax": (lambda x: x.log_softmax(-1), FULL),
    "sum": (lambda x: x.sum(), FULL),
    "sum over a dimension": (lambda x: x.sum(0), FULL),
    "cumsum": (lambda x: x.cumsum(0), FULL),
    "layer_norm": (lambda x: functional.layer_norm(x, (WIDTH,)), FULL),
    "group_norm": (lambda x: functional.group_norm(x, 2), FULL),
    "rms_norm": (lambda x: functional.rms_norm(x, (WIDTH,)), FULL),
    "rsqrt": (lambda x: x.rsqrt(), FULL),
    "exp": (lambda x: x.exp(), FULL),
    "norm": (lambda x: x.norm(), FULL),
    "linear": (lambda x: functional.linear(x.float(), x.float()), HALF),
    "gelu": (lambda x: functional.gelu(x), HALF),
    "add": (lambda x: x + x, HALF),
    "mean": (lambda x: x.mean(), HALF),
}


@pytest.mark.parametrize(("compute", "dtype"), RESULTS.values(), ids=RESULTS)
def test_autocast_returns_the_dtype_of_a_gpu(compute, dtype):
    x = torch.linspace(0.1, 2, ROWS * WIDTH).view(ROWS, WIDTH).to(HALF).requires_grad_()
    with gpu_operators("cuda"), torch.autocast("cpu", HALF):
        found = compute(x)
    assert dtype == found.dtype
    expected = compute(x.float()) if dtype is FULL else compute(x)
    assert torch.allclose(expected.float(), found.float(), rtol=0.02)
    found.sum().backward()
    assert x.grad.isfinite().all()


def test_nothing_changes_without_autocast_for_a_cpu_and_afterwards():
    x = torch.ones(4, 8, dtype=HALF)
    for device_type, autocast in (("cuda", False), ("cpu", True)):
        with gpu_operators(device_type), torch.autocast("cpu", HALF, enabled=autocast):
            assert HALF == (x**3.0).dtype
    with pytest.raises(ZeroDivisionError), gpu_operators("cuda"):
        raise ZeroDivisionError
    with torch.autocast("cpu", HALF):
        assert HALF == (x**3.0).dtype


def test_each_operator_that_torch_treats_on_a_gpu_alone_has_one_kind():
    kinds = (set(widened()), set(module._LOWERED), set(module._PROMOTED))
    assert sum(map(len, kinds)) == len(set.union(*kinds))
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert all(has(f"aten::{name}", "AutocastCUDA") for kind in kinds for name in kind)
    assert module._WITH_DTYPE < kinds[0]
    names = {name: [one.name for one in module._operator(name)._schema.arguments] for name in widened()}
    assert module._WITH_DTYPE == {name for name in names if "dtype" in names[name]} - {"norm.ScalarOpt_dtype"}


def kept_by(compute, device_type):
    """Returns the bytes that a graph keeps beside its result."""
    with FakeTensorMode(), gpu_operators(device_type), AllocationRecorder(lambda: Region("forward", 0)) as recorder:
        x = torch.empty(2, 4, ROWS, WIDTH, requires_grad=True)
        result = compute(x)
        kept = sum(item.num_bytes for item in recorder.allocations if item.died is None)
        return kept - x.nbytes - result.nbytes


@pytest.mark.parametrize(("device_type", "mask"), [("cpu", 4), ("cuda", 1)])
def test_dropout_keeps_the_mask_of_the_device(device_type, mask):
    assert mask * 2 * 4 * ROWS * WIDTH == kept_by(lambda x: functional.dropout(x, 0.1), device_type)
    assert kept_by(lambda x: functional.dropout(x, 0.1, training=False) + 0, device_type) == 0


def test_attention_that_keeps_its_scores_keeps_the_mask_of_the_device():
    def attend(x):
        with sdpa_kernel(SDPBackend.MATH):
            return functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    on_cpu, on_gpu = kept_by(attend, "cpu"), kept_by(attend, "cuda")
    assert 3 * 2 * 4 * ROWS * ROWS == on_cpu - on_gpu


def test_dropout_computes_what_torch_defines():
    with gpu_operators("cuda"):
        x = torch.ones(1000, requires_grad=True)
        found = functional.dropout(x, 0.25)
        assert {0.0, 4 / 3} == {round(value, 4) * 1.0 if value == 0 else 4 / 3 for value in found.tolist()}
        found.sum().backward()
        assert torch.equal(x.grad, found.detach())
        assert functional.dropout(x, 1.0).eq(0).all()
