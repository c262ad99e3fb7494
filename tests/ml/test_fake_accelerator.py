"""No step of one process reads a value of the device, on a device whose tensors have none."""

import functools
import multiprocessing
import re
import traceback
import warnings

import pytest
import torch

from tests.ml.distributed.bench import make_model, packed_rows
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


def steps(make, settings):
    """Returns the number of steps, or the traceback of what ended them."""
    torch.set_num_threads(1)
    # torch.compile looks at gradients of tensors that have none, and warns of itself.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    try:
        return steps_without_values(make, packed_rows(1, 6), **settings)
    except Exception:  # noqa: BLE001 - the traceback is what the test looks at
        return traceback.format_exc()


def in_a_new_process(make, **settings):
    """Calls `steps` in a process that has computed no gradient: torch's engine then knows the devices for good."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(steps, (make, settings))


@pytest.mark.matrix
@pytest.mark.parametrize("name", CASES)
def test_a_step_reads_no_value_of_the_device(name):
    assert 3 == in_a_new_process(llama, **CASES[name])


def _reading():
    model = llama()
    model.lm_head.register_forward_hook(_raises_for_large)
    return model


def _raises_for_large(module, inputs, output):
    if output.max() > 1e9:
        raise AssertionError("too large")


@pytest.mark.matrix
def test_a_read_raises_at_its_line():
    said = in_a_new_process(_reading)
    assert re.search(r"in _raises_for_large\n +if output.max\(\) > 1e9:[\s\S]*DataDependentOutput", said), said
