"""Scripts that start a run elsewhere."""

import os
import subprocess

import pytest

from forgather.launch.launch_files import launch_file
from forgather.launch.launch_job import LaunchJob
from forgather.launch.process_request import ProcessRequest

WORDS = ("-t", "ddp", "train", "--set", "trainer_args.max_steps=3")


def written(kind, asked, devices=None, folder="/a folder", resume=()):
    job = LaunchJob(name="ddp", folder=folder, words=WORDS, asked=asked, devices=devices, resume=resume)
    return launch_file(kind, job)


@pytest.mark.parametrize("kind", ["slurm", "torchrun", "accelerate"])
@pytest.mark.parametrize(
    "asked",
    [
        ProcessRequest(per_node=4),
        ProcessRequest(per_node="gpu", num_nodes=2, master=("host", 1234)),
        ProcessRequest(per_node=2, num_nodes=4, master=("host", None), attempts=3),
    ],
)
def test_every_script_is_one_that_a_shell_can_read(kind, asked):
    text = written(kind, asked, devices="0,1")
    read = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)

    assert (0, "") == (read.returncode, read.stderr)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "cd '/a folder'\nexport CUDA_VISIBLE_DEVICES=0,1\n" in text
    assert "-m forgather -t ddp train --set trainer_args.max_steps=3" in text


def test_a_batch_job_has_one_task_on_each_machine():
    text = written("slurm", ProcessRequest(per_node=4, num_nodes=2))

    assert "#SBATCH --nodes=2\n" in text
    assert "#SBATCH --ntasks-per-node=1\n" in text
    assert "#SBATCH --gpus-per-node=4\n#SBATCH --cpus-per-task=16\n" in text
    assert 1 == text.count("srun")
    assert "torchrun" not in text


def test_a_batch_job_of_an_open_number_of_processes_has_whole_machines():
    text = written("slurm", ProcessRequest(per_node="auto", num_nodes=2))

    assert "#SBATCH --exclusive\n" in text
    assert "per-node=auto" not in text


@pytest.mark.parametrize(("ends", "restarts", "queued"), [(143, None, True), (143, 1, True), (1, None, False)])
def test_a_batch_job_that_runs_out_of_time_is_queued_again_and_goes_on(tmp_path, ends, restarts, queued):
    for name, status in (("srun", ends), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*"\nexit {status}\n')
        (tmp_path / name).chmod(0o755)
    asked = ProcessRequest(per_node=2, handed=("--max-restarts", "2"))
    text = written("slurm", asked, folder=str(tmp_path), resume=("--resume", "auto"))
    told = {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8"} | ({"SLURM_RESTART_COUNT": "1"} if restarts else {})
    environ = {**os.environ, **told, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.run(["bash", "-c", text], env=environ, capture_output=True, text=True, check=False)

    again = " --resume auto" if restarts else ""
    step = "srun --kill-on-bad-exit=1 --cpus-per-task=8 python -m forgather -t ddp train --set trainer_args.max_steps=3"
    assert [f"{step}{again} -- --max-restarts 2"] + ["scontrol requeue 7"] * queued == job.stdout.splitlines()
    assert ends == job.returncode


def test_options_of_the_batch_system_stand_before_the_first_command():
    lines = written("slurm", ProcessRequest(per_node=4)).splitlines()
    first = next(n for n, line in enumerate(lines) if not line.startswith("#"))

    assert [] == [line for line in lines[first:] if line.startswith("#SBATCH")]


def test_words_for_torchrun_are_kept():
    asked = ProcessRequest(per_node=4, handed=("--max-restarts", "2"))

    assert "torchrun --nproc-per-node=4 --standalone --max-restarts 2 -m forgather" in written("torchrun", asked)


def test_accelerate_reads_no_setting_from_a_file():
    text = written("accelerate", ProcessRequest(per_node=4, num_nodes=2, master=("host", 1234)))

    assert '--num_processes "$(( 4 * 2 ))" --num_machines 2 --multi_gpu' in text
    assert "--main_process_ip host --main_process_port 1234 --mixed_precision no --dynamo_backend no" in text
    assert "--max_restarts" not in text
    assert " --max_restarts 3 " in written("accelerate", ProcessRequest(per_node=4, attempts=3))
