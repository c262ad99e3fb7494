"""Where torch lacks what plans of pipelines need, other plans are made, and those are refused by name."""

import pytest
from torch.distributed.pipelining import stage

from forgather.errors import PlanError
from forgather.ml.planner import stage_metadata
from tests.ml.planner.cells import Cell, pipeline, traced


@pytest.fixture
def older_torch(monkeypatch):
    monkeypatch.delattr(stage.PipelineStage, "_recv_meta")
    monkeypatch.delattr(stage_metadata.stage_values, "_derive_grad_metas")


def test_plans_without_pipelines_are_made(older_torch, tmp_path):
    before = stage.PipelineStage.__init__
    (found,) = traced(Cell("single", layers=1), tmp_path)
    assert found.peaks
    assert stage.PipelineStage.__init__ is before


def test_a_pipeline_is_refused(older_torch, tmp_path):
    with pytest.raises(PlanError, match=r"torch 2\S+ exchanges .* \(it has no _recv_meta\)") as caught:
        traced(pipeline("1F1B", "Schedule1F1B"), tmp_path)
    assert caught.value.code == "FG969"
