"""How many processes a run asks for: config, options, and what a launcher started."""

import argparse
import os

import pytest

from forgather.errors import ProjectError
from forgather.launch.multi_process import children_environment, refuse_other_process_count
from forgather.launch.process_request import (
    ProcessRequest,
    add_process_options,
    asked_processes,
    refuse_missing_rendezvous,
    torchrun_words,
)
from forgather.launcher_env import NodeFacts, ProcessFacts
from forgather.project.project import Project
from tests.project.workbench import make_project


def asked(folder, *words, meta="{nproc_per_node: 2}", node=None, handed=()):
    make_project(folder, {"templates/configs/a.yaml": f"meta: {meta}\nmain: !partial:int\n"})
    parser = argparse.ArgumentParser()
    add_process_options(parser)
    return asked_processes(Project("a", folder), parser.parse_args(words), node, handed)


@pytest.mark.parametrize(
    ("meta", "per_node"),
    [("{}", 1), ("{nproc_per_node: 4}", 4), ("{nproc_per_node: gpu}", "gpu")],
)
def test_the_config_says_how_many_processes_run(tmp_path, meta, per_node):
    assert per_node == asked(tmp_path, meta=meta).per_node


def test_one_process_needs_no_launcher(tmp_path):
    assert asked(tmp_path, meta="{}").is_one
    assert not asked(tmp_path, meta="{nproc_per_node: gpu}").is_one
    assert not asked(tmp_path, meta="{}", handed=("--max-restarts", "2")).is_one


def test_an_option_beats_the_config(tmp_path):
    assert (3, "--nproc-per-node") == (
        (found := asked(tmp_path, "--nproc_per_node", "3")).per_node,
        found.source,
    )


def test_devices_are_one_process_each_where_the_config_leaves_the_number_open(tmp_path):
    assert 3 == asked(tmp_path, "-d", "0,2,5", meta="{nproc_per_node: auto}").per_node
    assert 2 == asked(tmp_path, "-d", "0,2,5").per_node


SET = """[config_metadata]
    -- set ns.nproc_per_node = 3
"""
SIZES = """\
meta: {nproc_per_node: auto}
main: !partial:int
  kwargs:
    args: !call:forgather.ml:AccelTrainingArguments {data_parallel_size: 2, tensor_parallel_size: 3}
"""


@pytest.mark.parametrize(
    ("words", "per_node"),
    [
        ([], 6),
        (["--nnodes", "2", "--master-addr", "a"], 3),
        (["--nnodes", "4", "--master-addr", "a"], 6),
        (["--nproc-per-node", "2"], 2),
    ],
)
def test_sizes_that_multiply_to_a_number_are_what_auto_means(tmp_path, words, per_node):
    make_project(tmp_path, {"templates/configs/b.yaml": SIZES})
    parser = argparse.ArgumentParser()
    add_process_options(parser)

    assert per_node == asked_processes(Project("b", tmp_path), parser.parse_args(words), None).per_node


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-d", "0"], "asks for 2 processes, and --devices names 1"),
        (["-d", "0,0"], "a device is named twice"),
        (["-d", ","], "it names no device"),
        (["-d", "x,y"], "'x' is not a device"),
        (["-d", "0,-1"], "'-1' is not a device"),
        (["-d", "²,0"], "'²' is not a device"),
        (["-d", "0 1,2"], "'0 1' is not a device"),
        (["--nnodes", "²"], "--nnodes is '²'"),
        (["--master-port", "0"], "--master-port is 0, but a port is between 1 and 65535"),
        (["--master-port", "-5"], "--master-port is -5"),
        (["--master-port", "65536"], "--master-port is 65536"),
        (["--nnodes", "two"], "--nnodes is 'two'"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "a"], "--node-rank is 2, and there are 2 machines"),
        (["--node-rank", "1"], "--node-rank is 1, and there is 1 machine"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, words, message):
    with pytest.raises(ProjectError, match=message) as caught:
        asked(tmp_path, *words)

    assert "FG462" == caught.value.code


def test_several_machines_are_told_where_they_meet(tmp_path):
    for words in (["--nnodes", "2"], ["--nnodes", "2", "--master-port", "1234"]):
        with pytest.raises(ProjectError, match="a run on 2 machines has no address to meet at") as caught:
            refuse_missing_rendezvous(asked(tmp_path, *words))
        assert "FG462" == caught.value.code

    refuse_missing_rendezvous(asked(tmp_path, "--nnodes", "2", "--master-addr", "host"))
    refuse_missing_rendezvous(asked(tmp_path, "--nnodes", "2", handed=("--rdzv-endpoint", "host:1")))


@pytest.mark.parametrize("number", ["²", "٣", "0", "-1", "1e3", "1025", "99999999999999999999", ""])
def test_a_number_of_processes_that_no_machine_has_is_a_word_of_usage(capsys, number):
    parser = argparse.ArgumentParser()
    add_process_options(parser)

    with pytest.raises(SystemExit):
        parser.parse_args([f"--nproc-per-node={number}"])
    told = capsys.readouterr().err
    assert "is not a number of processes" in told or "processes that a machine may have" in told


def test_one_machine_meets_at_a_free_port():
    assert ["--nproc-per-node=2", "--standalone"] == torchrun_words(ProcessRequest(per_node=2))


def test_a_port_that_is_given_is_the_one_to_meet_at(tmp_path):
    words = torchrun_words(asked(tmp_path, "--master-port", "1234"))

    assert ["--nnodes=1", "--node-rank=0", "--master-addr=127.0.0.1", "--master-port=1234"] == words[1:]


def test_several_machines_meet_where_they_are_told(tmp_path):
    found = asked(tmp_path, "--nnodes", "2", "--node-rank", "1", "--master-addr", "host", "--master-port", "1234")

    assert 4 == found.world_size
    assert ["--nnodes=2", "--node-rank=1", "--master-addr=host", "--master-port=1234"] == torchrun_words(found)[1:]


def test_a_job_of_several_machines_tells_where_they_meet(tmp_path):
    found = asked(tmp_path, node=NodeFacts(4, 3, ("gpu007", 20123), "SLURM"))

    assert ["--nnodes=4", "--node-rank=3", "--master-addr=gpu007", "--master-port=20123"] == torchrun_words(found)[1:]


def test_what_torchrun_is_to_get_is_handed_to_it(tmp_path):
    words = torchrun_words(asked(tmp_path, handed=("--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1")))

    assert ["--nproc-per-node=2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "host:1"] == words


@pytest.mark.parametrize(
    ("started", "words"),
    [
        ("/opt/forgather/__main__.py", "-m forgather -t a.yaml train ..., or"),
        ("/opt/bin/fgcli", "-m forgather -t a.yaml train ..., or"),
        ("my train.py", "'my train.py' ..., or"),
    ],
)
def test_a_launcher_that_started_another_number_is_refused_with_what_would_work(started, words, monkeypatch):
    monkeypatch.setattr("sys.argv", [started])
    facts = ProcessFacts(0, 0, 1, 1, launcher="accelerate launch")
    with pytest.raises(ProjectError, match="accelerate launch started 1 process on this machine, and") as caught:
        refuse_other_process_count(ProcessRequest(per_node=2), facts, "a.yaml")

    assert ("FG461", 2, 1) == (caught.value.code, caught.value.expected, caught.value.found)
    assert f"torchrun --nproc-per-node 2 {words}" in caught.value.hint
    assert "--nproc-per-node 1" in caught.value.hint


def test_a_word_is_met_by_any_number():
    refuse_other_process_count(ProcessRequest(per_node="auto"), ProcessFacts(0, 0, 3, 3, launcher="torchrun"), "a.yaml")


def test_sizes_may_be_met_on_several_machines():
    refuse_other_process_count(ProcessRequest(per_node=8), ProcessFacts(5, 1, 8, 4, launcher="torchrun"), "a.yaml")


def test_a_number_of_the_library_is_no_wish_but_one_process_is_no_several(tmp_path):
    default = ProcessRequest(per_node=2, is_default=True)
    refuse_other_process_count(default, ProcessFacts(0, 0, 4, 4, launcher="torchrun"), "a.yaml")
    with pytest.raises(ProjectError, match="torchrun started 1 process on this machine"):
        refuse_other_process_count(default, ProcessFacts(0, 0, 1, 1, launcher="torchrun"), "a.yaml")


def test_a_number_that_the_project_writes_is_a_wish(tmp_path):
    text = "-- extends 'trainers/accel_trainer.yaml'\n"
    make_project(tmp_path, {"templates/configs/a.yaml": text, "templates/configs/b.yaml": f"{text}{SET}"})
    parser = argparse.ArgumentParser()
    add_process_options(parser)

    found = [asked_processes(Project(name, tmp_path), parser.parse_args([]), None) for name in "ab"]

    assert [(2, True), (3, False)] == [(one.per_node, one.is_default) for one in found]


@pytest.mark.parametrize("given", [{}, {"PYTHONPATH": "/mine", "PYTHONSAFEPATH": "1"}])
def test_what_started_processes_inherit_stays_out_of_the_environment_of_this_one(monkeypatch, given):
    for variable in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in given.items():
        monkeypatch.setenv(variable, value)
    before = dict(os.environ)
    with children_environment():
        inside = dict(os.environ)
    assert before == dict(os.environ)
    assert given.get("PYTHONSAFEPATH", "forgather") == inside["PYTHONSAFEPATH"]
    assert inside["PYTHONPATH"].split(os.pathsep)[1:] == [given["PYTHONPATH"]] if given else "PYTHONPATH" in inside
