"""No step of one process reads a value of the device, on a device whose tensors have none."""

import functools
import warnings

import pytest
import torch

from tests.matrix import thinned
from tests.ml.distributed.bench import make_model, packed_rows
from tests.ml.distributed.gang import RankFailed, run_ranks
from tests.ml.fake_accelerator import steps_without_values

llama = functools.partial(make_model, "llama", torch.float32, 2)
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
CASES = {
    "accumulated and clipped": {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0},
    "bf16, recomputed": {"bf16": True, "gradient_checkpointing": True},
    "compiled": COMPILED,
    "compiled by blocks": {**COMPILED, "torch_compile_regions": True},
    "compiled, bf16, recomputed": {**COMPILED, "bf16": True, "gradient_checkpointing": True},
}


def steps(make, **settings):
    torch.set_num_threads(1)
    # torch.compile looks at gradients of tensors that have none, and warns of itself.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    return steps_without_values(make, packed_rows(1, 6), **settings)


@pytest.mark.parametrize("name", thinned(CASES, lambda name: name == "accumulated and clipped"))
def test_a_step_reads_no_value_of_the_device(name):
    assert [3] == run_ranks(1, functools.partial(steps, llama, **CASES[name]))


def _reading():
    model = llama()
    model.lm_head.register_forward_hook(_raises_for_large)
    return model


def _raises_for_large(module, inputs, output):
    if output.max() > 1e9:
        raise AssertionError("too large")


def test_a_read_raises_at_its_line():
    with pytest.raises(RankFailed, match=r"in _raises_for_large\n +if output.max\(\) > 1e9:[\s\S]*DataDependentOutput"):
        run_ranks(1, functools.partial(steps, _reading))
