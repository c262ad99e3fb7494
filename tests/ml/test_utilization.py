"""The MFU of log lines: speeds times the FLOPs of the plan, and nothing without a plan."""

import json

import pytest

from forgather.ml.trainer.utilization import Utilization

STEP = {"model_flops": 6e9, "peak_flops": 1e12}
PLAN = {"time": {"step": STEP}, "rows_per_update": 4, "tokens_per_row": 10, "world_size": 2}


def written(folder, plan):
    (folder / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))


def test_a_plan_that_is_written_during_the_run_counts_from_then_on(tmp_path):
    utilization = Utilization(str(tmp_path))
    line = {"tokens_per_second": 2000.0, "samples_per_second": 7.0}
    assert {} == utilization.metrics(line)
    written(tmp_path, PLAN)
    # 50 steps a second of 6 GFLOPs, on two devices of 1 TFLOP/s.
    assert {"mfu": pytest.approx(50 * 6e9 / 2e12)} == utilization.metrics(line)
    assert {} == utilization.metrics({"loss": 1.0})


def test_rows_without_tokens_count_as_rows(tmp_path):
    written(tmp_path, {**PLAN, "tokens_per_row": None})
    line = {"samples_per_second": 200.0}
    assert {"mfu": pytest.approx(50 * 6e9 / 2e12)} == Utilization(str(tmp_path)).metrics(line)


@pytest.mark.parametrize("plan", ["{", "[]", {**PLAN, "time": None}, {**PLAN, "world_size": 0}])
def test_without_a_time_there_is_no_mfu(tmp_path, plan):
    written(tmp_path, plan)
    assert {} == Utilization(str(tmp_path)).metrics({"tokens_per_second": 1.0})
