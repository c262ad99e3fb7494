"""`accelerate launch` in charge: what it adds is told, and one process instead of several is refused."""

import os
import subprocess
import sys

from forgather.launch.process_request import added_settings
from forgather.launcher_env import accelerate_config
from tests.patience import patience
from tests.project.workbench import ROOT, make_project

IDLE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "True",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "FSDP_VERSION": "2",
}


def test_settings_that_change_nothing_are_not_told():
    assert [] == added_settings(IDLE)
    assert [] == added_settings({"ACCELERATE_USE_FSDP": "true"})


def test_settings_that_change_a_run_are_told():
    changed = {**IDLE, "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_FSDP": "true"}

    assert ["ACCELERATE_MIXED_PRECISION=bf16", "ACCELERATE_USE_FSDP=true", "FSDP_VERSION=2"] == added_settings(changed)
    assert ["ACCELERATE_USE_CPU=True"] == added_settings({**IDLE, "ACCELERATE_USE_CPU": "True"})
    assert ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS=4"] == added_settings(
        {**IDLE, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    )


def test_the_config_file_of_the_machine_is_found(tmp_path):
    assert accelerate_config({"HF_HOME": str(tmp_path)}) is None
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text("mixed_precision: bf16\n")

    assert str(tmp_path / "accelerate/default_config.yaml") == accelerate_config({"HF_HOME": str(tmp_path)})


def launched(bench, options, *words, hf_home):
    command = [sys.executable, "-m", "accelerate.commands.launch", *options]
    return subprocess.run(
        [*command, str(ROOT / "scripts" / "train_script.py"), *words],
        cwd=bench,
        env={**os.environ, "HF_HOME": str(hf_home)},
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )


def test_one_process_where_several_were_asked_for_is_refused_and_a_file_that_adds_settings_is_named(tmp_path):
    bench = make_project(
        tmp_path / "bench", {"templates/configs/a.yaml": "meta: {nproc_per_node: 2}\nmain: !partial:int\n"}
    )
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate/default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\n"
    )
    refused = launched(bench, ["--cpu", "--num_processes", "2"], "a", hf_home=tmp_path)
    told = launched(bench, [], "a", "--nproc-per-node", "1", hf_home=tmp_path)

    assert "error[FG461]: accelerate launch, which starts one process where there is no GPU, started 1 process" in (
        refused.stderr
    )
    assert "meta.nproc_per_node asks for 2" in refused.stderr
    assert 0 == told.returncode, told.stderr
    assert 1 == told.stderr.count("accelerate launch sets ACCELERATE_MIXED_PRECISION=bf16 (from its options, or ")
    assert "default_config.yaml); Trainer, AccelTrainer and PipelineTrainer go by the config alone" in told.stderr
