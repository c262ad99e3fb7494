"""Traces of tasks, losses, adapters, quantized weights and optimizers need the memory that real runs need."""

import functools
import importlib.util
import json

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forgather.ml.models import from_pretrained
from forgather.ml.planner.model_builders import building, loading_fakes
from forgather.ml.planner.rank_recorder import OTHER_MODELS
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.preference_losses import KTOLoss
from tests.ml.fixtures import tiny_llama
from tests.ml.planner.task_cells import FULL, PAIRS, QUICK, TaskCell, feedback, measured, traced, trainer
from tests.ml.planner.test_rank_trace import planned


def parameter(cell):
    marks = [] if cell in QUICK else [pytest.mark.matrix]
    if cell.needs is not None and importlib.util.find_spec(cell.needs) is None:
        marks.append(pytest.mark.skip(reason=f"{cell.needs} is not installed"))
    return pytest.param(cell, marks=marks)


@pytest.fixture(scope="module")
def traces_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return functools.cache(lambda cell: traced(cell, folder))


# torch looks at gradients of real tensors that meet fake ones.
@pytest.mark.parametrize("cell", list(map(parameter, (*QUICK, *FULL))), ids=str)
def test_the_traced_peak_is_the_measured_one(cell, traces_of, tmp_path, record_property):
    pairs = list(zip(measured(cell, tmp_path), map(planned, traces_of(cell)), strict=True))

    record_property("peaks", json.dumps(pairs))
    for real, plan in pairs:
        assert -cell.below <= plan / real - 1 <= cell.above, (real, plan)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_of_a_folder_needs_its_config_only(tmp_path, is_tied):
    stored = tiny_llama(tie_word_embeddings=is_tied)
    stored.config.save_pretrained(tmp_path)

    with loading_fakes(), building(FakeTensorMode(allow_non_fake_inputs=True)):
        model = from_pretrained(tmp_path, dtype="bfloat16")

    assert {(FakeTensor, torch.bfloat16)} == {(type(weight), weight.dtype) for weight in model.parameters()}
    assert sum(map(torch.numel, stored.parameters())) == sum(map(torch.numel, model.parameters()))


class Packed(nn.Parameter):
    """A weight of a class of its own, as bitsandbytes has them."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data, False)


def test_a_fake_tensor_becomes_a_weight_of_another_class_and_stays_fake():
    with loading_fakes(), FakeTensorMode() as fake:
        weight = Packed(torch.ones(4, 3))
        weight.data = torch.ones(2, 1, dtype=torch.uint8)
        assert isinstance(weight, Packed) and isinstance(weight, FakeTensor)
        assert (fake, (2, 1), torch.uint8) == (weight.fake_mode, weight.shape, weight.dtype)
        assert type(weight + 1) is FakeTensor

    assert "_make_subclass" not in vars(torch.Tensor)


def test_a_real_mask_selects_as_many_fake_rows_as_it_has_true_values():
    mask = torch.tensor([True, False, True])
    with FakeTensorMode(allow_non_fake_inputs=True), RealIntegers():
        values = torch.ones(3, 5)
        assert (2, 5) == values[mask].shape
        values[mask] = 0.0


class DeeperLayersAreDroppedMore(nn.Module):
    """A constructor that reads settings from a row of numbers, and values of a weight."""

    def __init__(self):
        super().__init__()
        self.rates = [one.item() for one in torch.linspace(0, 0.1, 4) * 3]
        self.weight = nn.Parameter(torch.randn(3))
        nn.init.trunc_normal_(self.weight)
        self.is_positive = bool((self.weight > 0).any())


def test_constructors_may_read_rows_of_numbers_and_initial_weights():
    with building(FakeTensorMode(allow_non_fake_inputs=True)):
        model = DeeperLayersAreDroppedMore()
    assert pytest.approx([0, 0.1, 0.2, 0.3]) == model.rates
    assert isinstance(model.weight, FakeTensor)


@pytest.mark.matrix
def test_an_evaluation_has_the_estimate_that_its_loss_needs(tmp_path):
    rows = feedback()[:16]
    make = trainer(
        args={"eval_strategy": "epoch"}, rows=lambda: rows, eval_dataset=rows, adapter={}, loss_fn=KTOLoss(), **PAIRS
    )
    trace = traced(TaskCell("KTO", make), tmp_path)[0]
    assert any(region.phase == "evaluation" for region in trace.peaks)


def test_the_weights_of_a_teacher_have_a_row_of_their_own(traces_of):
    (trace,) = traces_of(QUICK[0])
    _, peak = trace.peak

    assert peak.categories["parameters"] == peak.categories[OTHER_MODELS]
