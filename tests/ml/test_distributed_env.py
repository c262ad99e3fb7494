"""Process facts come from the environment, and reading them starts nothing."""

import doctest
import logging

import pytest
import torch

import forgather.ml.distributed.env as env_module
from forgather.errors import DistributedError
from forgather.ml.distributed import DistributedEnvironment, ProcessFacts, process_facts
from forgather.ml.log import get_logger


def test_one_process_without_a_launcher():
    assert ProcessFacts(0, 0, 1, 1) == process_facts({})


def test_the_variables_of_a_launcher_are_read():
    environ = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert ProcessFacts(5, 1, 8, 4) == process_facts(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', which is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'"),
    ],
)
def test_variables_that_make_no_sense_are_refused(environ, message):
    with pytest.raises(DistributedError, match=message) as caught:
        process_facts(environ)
    assert "FG701" == caught.value.code


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"backend": "ncl"}, "did you mean 'nccl'?"),
        ({"timeout_seconds": 0}, "above zero"),
        ({"timeout_seconds": "60"}, "above zero"),
        ({"init_method": "x"}, "env://"),
    ],
)
def test_settings_that_no_group_accepts_are_refused(given, hint):
    with pytest.raises(DistributedError, match="FG702") as caught:
        DistributedEnvironment(**given)
    assert hint in caught.value.hint


def test_several_environments_of_one_process_are_one_and_start_nothing():
    first, second = DistributedEnvironment(), DistributedEnvironment()
    assert first == second and hash(first) == hash(second)
    assert (0, 0, 1, 1) == (first.rank, first.local_rank, first.world_size, first.local_world_size)
    assert not torch.distributed.is_initialized()


def test_the_backend_follows_the_device():
    environment = DistributedEnvironment()
    expected = {"cuda": "nccl", "xpu": "xccl"}.get(environment.device.type, "gloo")
    assert expected == environment.resolved_backend
    assert "mpi" == DistributedEnvironment(backend="mpi").resolved_backend


def test_a_line_is_logged_on_rank_zero_unless_all_ranks_speak(monkeypatch, caplog):
    logger = get_logger("forgather.ml.test")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with caplog.at_level(logging.INFO):
        logger.info("once")
        logger.info("here %d", 3, all_ranks=True)
    assert ["[rank 1] here 3"] == caplog.messages


def test_the_examples_in_the_docstrings_hold():
    assert 0 == doctest.testmod(env_module).failed


def test_a_process_that_sees_one_accelerator_alone_is_the_first_on_its_machine_for_libraries(monkeypatch):
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    environment = DistributedEnvironment()
    assert environment.facts_on(torch.device("cuda", 0)).local_rank == 0
    assert environment.facts_on(torch.device("cpu")) == environment.facts
    assert environment.facts.local_rank == 3


def test_a_backend_of_accelerators_on_the_cpu_is_told_and_replaced(caplog):
    environment = DistributedEnvironment(backend="nccl")
    try:
        environment.start(use_cpu=True)
        assert "gloo" == torch.distributed.get_backend()
    finally:
        environment.shutdown()
    assert ["backend 'nccl' needs an accelerator, and this run is on the CPU: gloo is used"] == caplog.messages
