"""What launchers tell a process, by the variables that each of them sets."""

import doctest

import pytest

from forgather import launcher_env
from forgather.errors import DistributedError
from forgather.launcher_env import NodeFacts, ProcessFacts, is_worker, node_facts, process_facts

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[007-008]",
    "SLURM_JOB_ID": "41234",
}
POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
}


def test_the_examples_of_the_module_hold():
    assert 0 == doctest.testmod(launcher_env).failed


def test_torchrun_is_known_with_its_attempt():
    facts = process_facts(TORCHRUN)

    assert ProcessFacts(3, 1, 4, 2, ("host", 29400), 2, True) == facts
    assert "torchrun" == facts.launcher
    assert is_worker(TORCHRUN)


def test_each_task_of_a_slurm_step_is_a_rank():
    facts = process_facts(STEP)

    assert ProcessFacts(5, 1, 8, 4, ("gpu007", 21234)) == facts
    assert ("SLURM", True) == (facts.launcher, is_worker(STEP))


def test_a_torchrun_inside_a_slurm_step_speaks_first():
    assert "torchrun" == process_facts({**STEP, **TORCHRUN}).launcher


def test_one_task_on_each_machine_is_a_machine_whose_processes_are_to_be_made():
    environ = {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}

    assert NodeFacts(2, 1, ("gpu007", 21234), "SLURM") == node_facts(environ)
    assert not is_worker(environ)


def test_the_shell_of_a_batch_job_is_no_rank():
    environ = {name: value for name, value in STEP.items() if not name.startswith("SLURM_STEP")}

    assert (ProcessFacts(), None, False) == (process_facts(environ), node_facts(environ), is_worker(environ))


def test_a_pod_is_one_machine_of_the_job():
    assert NodeFacts(3, 1, ("job-master-0", 23456), "Kubeflow") == node_facts(POD)
    assert not is_worker(POD)
    assert (1, 0, 3, 1) == ((facts := process_facts(POD)).rank, facts.local_rank, facts.world_size, 1)
    assert 1 == facts.local_world_size


def test_what_kubeflow_tells_torchrun_counts_machines():
    environ = {**POD, "WORLD_SIZE": "12", "PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_PORT": "1"}

    assert NodeFacts(3, 2, ("job-master-0", 1), "Kubeflow") == node_facts(environ)


def test_a_worker_in_a_pod_is_a_worker():
    assert is_worker({**POD, **TORCHRUN})


def test_mpirun_is_known():
    environ = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}

    assert (1, 0, 2) == ((facts := process_facts(environ)).rank, facts.local_rank, facts.world_size)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "²", "WORLD_SIZE": "2"}, "RANK is '²', which is not a whole number"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "2"}, "RANK is '999"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"}, "MASTER_PORT is 0, but a port"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "99999"}, "MASTER_PORT is 99999"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "7", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 7 and LOCAL_W"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK is 0 and LOCAL_WORLD_SIZE is 0"),
    ],
)
def test_numbers_that_make_no_sense_are_named(environ, message):
    with pytest.raises(DistributedError, match=message) as caught:
        process_facts(environ)

    assert "FG701" == caught.value.code


def test_a_pod_beyond_the_number_of_pods_is_named():
    with pytest.raises(DistributedError, match="this pod is number 9 of 2") as caught:
        node_facts({"PET_NNODES": "2", "PET_NODE_RANK": "9"})

    assert "FG701" == caught.value.code


def test_a_job_of_slurm_has_a_number_that_int_reads_or_none():
    environ = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "²"}

    assert ("localhost", 29500) == process_facts(environ).master


def test_a_number_that_is_none_is_named():
    with pytest.raises(DistributedError, match="SLURM_STEP_NUM_TASKS is 'x'") as caught:
        process_facts({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "x"})

    assert "FG701" == caught.value.code
