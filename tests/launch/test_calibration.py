"""Runs that calibrate a device: what they have measured, and which of them are refused."""

import json
import platform

import pytest

from forgather.errors import PlanError
from forgather.launch.calibration import calibration_of, measured_run
from forgather.project.run_reader import PastRun

HERE = platform.node()


def lines_of(*seconds):
    return [{"step": step, "steps_per_second": 1 / took} for step, took in enumerate(seconds, start=1)]


def a_run(folder, *, lines=None, host=HERE, threads="1", on_gpu=False):
    folder.mkdir()
    measured = lines_of(9.0, 2.0, 1.0, 4.0) if lines is None else lines
    peak = {"memory_peak_bytes": 1} if on_gpu else {}
    text = "".join(json.dumps({**line, **peak}) + "\n" for line in [{"loss": 1.0}, *measured])
    (folder / "metrics.jsonl").write_text(text)
    facts = {"hostname": host, "processors": {"count": 8, "OMP_NUM_THREADS": threads}}
    return PastRun(str(folder), {**facts, "processes": {"total": 2, "per_node": 2}, "config": "a.yaml"})


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (None, 2.0),
        ([{"step": 50, "steps_per_second": 4.0}], 0.25),
        ([*lines_of(1.0, 3.0, 3.0), {"steps_per_second": "nan"}, {"steps_per_second": 0.0}], 3.0),
    ],
    ids=["the first quarter is left out", "one line of many steps", "lines that measured nothing"],
)
def test_the_time_of_a_step_is_the_median_of_lines(tmp_path, lines, seconds):
    run = measured_run(a_run(tmp_path / "run", lines=lines), None)
    assert (seconds, False, (2, 1), 1) == (run.seconds, run.on_gpu, run.processes, run.threads)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        ([], "no step of the run was measured"),
        ([{"step": 3, "steps_per_second": -1.0}], "no step of the run was measured"),
        ([{"step": 3, "steps_per_second": 1.0}], "only the first steps of the run were measured"),
    ],
)
def test_a_run_without_measured_steps_is_refused(tmp_path, lines, what):
    with pytest.raises(PlanError, match=what) as info:
        measured_run(a_run(tmp_path / "run", lines=lines), None)
    assert ("FG996", str(tmp_path / "run" / "metrics.jsonl")) == (info.value.code, info.value.span.file)


def test_a_run_without_metrics_is_refused(tmp_path):
    run = a_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(PlanError, match="cannot be read") as info:
        measured_run(run, None)
    assert "FG996" == info.value.code


def test_damaged_metrics_are_located(tmp_path):
    run = a_run(tmp_path / "run")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"steps_per_second": 1}\n{"steps\n{"steps_per_second": 1}\n')
    with pytest.raises(Exception, match="line 2") as info:
        measured_run(run, None)
    assert ("FG851", 2) == (info.value.code, info.value.span.line)


@pytest.mark.parametrize(
    ("changes", "name", "what"),
    [
        ([{"host": "elsewhere"}], None, "the run is from the machine 'elsewhere'"),
        ([{"host": "here"}, {"host": "there"}], "h200", "the runs are from the machines here and there"),
        ([{}, {"on_gpu": True}], None, "some of the runs used GPUs, and some did not"),
        ([{"threads": "2"}, {"threads": "1"}], None, "the processes of the runs had 1 and 2 threads"),
    ],
)
def test_runs_of_another_device_are_refused(tmp_path, changes, name, what):
    runs = [measured_run(a_run(tmp_path / str(number), **one), None) for number, one in enumerate(changes)]
    with pytest.raises(PlanError, match=what) as info:
        calibration_of(runs, name)
    assert "FG996" == info.value.code
