"""Printed launch files: each is valid by the schema of its program, and starts on each machine what was asked for."""

import ast
import doctest
import functools
import json
import os
import re
import shlex
import subprocess
import sys

import jsonschema
import pytest
from ruamel.yaml import YAML

from forgather import Project
from forgather.cli.parsing import parse
from forgather.errors import ForgatherError, ProjectError
from forgather.launch import launch_job as launch_job_module
from forgather.launch import plan_run
from forgather.launch.dry_run import dry_run_layout
from forgather.launch.launch_files import KINDS, launch_file
from forgather.launch.launch_job import LaunchJob, launch_job, shell_text
from forgather.launch.layout_check import refuse_other_layout
from forgather.launch.process_request import ProcessRequest, asked_processes
from forgather.launcher_env import NodeFacts, node_facts
from tests.matrix import thinned
from tests.project.workbench import TINY_TRAINING, make_project
from tests.runs.launch_cells import CELLS, ROOT, Cell, file_of, plan_of, printed, request

RECORDED = ROOT / "tests/runs/recorded"
YAML_KINDS = ("kubeflow", "skypilot", "dstack")
FSDP = Cell("parallel", "fsdp2", 4)
# Source: the section OPTIONS of the manual page sbatch(1) of SLURM 24.05; the options that a training job may have.
SBATCH = {
    "account", "array", "begin", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task", "deadline",
    "dependency", "distribution", "error", "exclude", "exclusive", "export", "gpu-bind", "gpus", "gpus-per-node",
    "gpus-per-task", "gres", "hint", "hold", "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type",
    "mail-user", "mem", "mem-per-cpu", "mem-per-gpu", "nice", "no-requeue", "nodelist", "nodes", "ntasks",
    "ntasks-per-gpu", "ntasks-per-node", "open-mode", "output", "partition", "priority", "qos", "requeue",
    "reservation", "signal", "switches", "threads-per-core", "time", "time-min", "tmp", "wait", "wckey",
}  # fmt: skip


@functools.cache
def schema(kind):
    recorded = json.loads((RECORDED / f"{kind}.json").read_text())
    return jsonschema.Draft202012Validator(recorded["schema"])


def valid(kind, text):
    """Returns the data of a valid file."""
    data = YAML(typ="safe").load(text)
    schema(kind).validate(data)
    return data


def directives(text):
    lines = text.splitlines()
    first = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])
    return dict((line.removeprefix("#SBATCH --") + "=").split("=")[:2] for line in lines if line.startswith("#SBATCH"))


@pytest.fixture
def machine(tmp_path):
    """Runs shell text on a stand-in of a machine; returns the arguments of the program that it starts in the end."""
    for name in ("python", "torchrun", "accelerate", "srun"):
        file = tmp_path / name
        note = 'import json, sys; open(sys.argv[1], "w").write(json.dumps(sys.argv[2:]))'
        file.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(note)} {tmp_path}/words "$@"\n')
        file.chmod(0o755)

    def run(text, **environ):
        found = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **environ}
        done = subprocess.run(["bash", "-c", text], env=found, capture_output=True, text=True, cwd=ROOT, check=False)
        assert 0 == done.returncode, done.stderr
        return json.loads((tmp_path / "words").read_text())

    return run


def asked_on_machine(cell, words, node=None):
    """Returns the processes that `fgcli` starts with the words that a launch file gives it."""
    assert ["-m", "forgather"] == words[:2]
    _, invocation = parse(words[2:])
    return asked_processes(plan_of(cell.project, cell.config).project, invocation.options, node, invocation.handed)


@pytest.mark.parametrize("cell", thinned(CELLS, lambda cell: cell.is_quick), ids=lambda cell: cell.name)
def test_the_files_of_a_config_are_valid(cell, record_property):
    texts = {kind: printed(cell, kind) for kind in KINDS}
    # A config that cannot be laid out in so many processes is refused under every program.
    assert 1 == len({text is None for text in texts.values()})
    if texts["slurm"] is None:
        record_property("refused_files", len(KINDS))
        return
    asked = request(cell)
    for kind in ("slurm", "torchrun", "accelerate"):
        read = subprocess.run(["bash", "-n"], input=texts[kind], capture_output=True, text=True, check=False)
        assert (0, "") == (read.returncode, read.stderr)
    assert set(directives(texts["slurm"])) <= SBATCH
    data = {kind: valid(kind, texts[kind]) for kind in YAML_KINDS}
    nodes = (
        data["kubeflow"]["spec"]["trainer"]["numNodes"],
        data["skypilot"]["num_nodes"],
        data["dstack"].get("nodes", 1),
    )
    assert (cell.nodes,) * 3 == nodes
    assert asked.per_node == data["kubeflow"]["spec"]["trainer"]["numProcPerNode"] == data["dstack"]["resources"]["gpu"]
    (call,) = [
        node for node in ast.walk(ast.parse(texts["ray"])) if isinstance(node, ast.Call) and "start" == getattr(node.func, "id", "")
    ]  # fmt: skip
    given = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    assert (cell.nodes, asked.per_node) == (given["nodes"], given["resources"]["GPU"])
    assert not any("hf_never_written" in text for text in texts.values())
    if cell.nodes > 1:
        assert all(str(ROOT) in text for text in texts.values())
    record_property("valid_files", len(texts))


def test_a_pipeline_of_more_stages_than_the_model_has_blocks_for_is_refused():
    with pytest.raises(
        ProjectError, match="in 8 processes: 16 stages are requested, and the model has 8 blocks "
    ) as caught:
        file_of(Cell("parallel", "pipeline_interleaved", 4), "slurm")
    assert ("FG530", 10) == (caught.value.code, caught.value.span.line)


@pytest.mark.parametrize("cell", thinned(CELLS, lambda cell: False), ids=lambda cell: cell.name)
def test_a_run_refuses_the_processes_that_no_file_is_printed_for_and_no_others(cell, record_property):
    asked, plan = request(cell), plan_of(cell.project, cell.config)
    is_printed = printed(cell, "slurm") is not None
    try:
        dry_run_layout(plan, gpus=asked.per_node, nodes=cell.nodes)
    except ForgatherError as error:
        # FG745: a dry run is for trainers of Forgather. Other numbers: data and models that this machine does not have.
        if is_printed and (not error.code.startswith("FG7") or error.code == "FG745"):
            pytest.skip(str(error))
        assert not is_printed, error
    except ImportError as error:
        pytest.skip(str(error))
    else:
        assert is_printed
    record_property("printed and run", is_printed)


@pytest.mark.parametrize("kind", YAML_KINDS)
def test_a_schema_refuses_what_its_program_refuses(kind):
    data = valid(kind, printed(FSDP, kind))
    with pytest.raises(jsonschema.ValidationError):
        schema(kind).validate({**data, "voluems": {}})
    wrong = {"kubeflow": {"spec": {}}, "skypilot": {"num_nodes": "four"}, "dstack": {"nodes": 0}}[kind]
    with pytest.raises(jsonschema.ValidationError):
        schema(kind).validate({**data, **wrong})
    recorded = json.loads((RECORDED / f"{kind}.json").read_text())
    assert 100 < recorded["accepted_files"] and recorded["refuses"]


def test_machines_of_a_cloud_start_the_processes_that_the_config_asks_for(machine):
    data = {kind: valid(kind, printed(FSDP, kind)) for kind in YAML_KINDS}
    sky = {"SKYPILOT_NUM_NODES": "4", "SKYPILOT_NODE_RANK": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": "2"}  # fmt: skip
    dstack = {"DSTACK_NODES_NUM": "4", "DSTACK_NODE_RANK": "2", "DSTACK_MASTER_NODE_IP": "10.0.0.1"}
    of_sky = asked_on_machine(FSDP, machine(data["skypilot"]["run"], **sky))
    of_dstack = asked_on_machine(FSDP, machine(data["dstack"]["commands"][0], **dstack))

    assert of_sky == of_dstack
    assert (2, 4, 2, ("10.0.0.1", 29500)) == (of_sky.per_node, of_sky.num_nodes, of_sky.node_rank, of_sky.master)


def test_a_pod_of_a_trainjob_starts_the_processes_that_the_config_asks_for(machine):
    trainer = valid("kubeflow", printed(FSDP, "kubeflow"))["spec"]["trainer"]
    words = machine(in_pod(trainer["args"][0]))
    pod = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "fsdp2-node-0-0", "PET_MASTER_PORT": "29400"}
    asked = asked_on_machine(FSDP, words, node_facts(pod))

    assert (2, 4, 3, ("fsdp2-node-0-0", 29400)) == (asked.per_node, asked.num_nodes, asked.node_rank, asked.master)


def test_a_task_of_slurm_starts_the_processes_that_the_config_asks_for(machine):
    text = printed(FSDP, "slurm")
    words = machine(text, SLURM_CPUS_ON_NODE="8", SLURM_JOB_ID="7")
    asked = asked_on_machine(FSDP, words[words.index("python") + 1 :], NodeFacts(4, 1, ("gpu7", 20007), "SLURM"))

    assert (2, 4, 1) == (asked.per_node, asked.num_nodes, asked.node_rank)
    assert ("4", "1", "TERM@300", "") == tuple(
        map(directives(text).get, ("nodes", "ntasks-per-node", "signal", "requeue"))
    )


def test_a_machine_of_skypilot_without_enough_gpus_starts_nothing(machine):
    script = valid("skypilot", printed(FSDP, "skypilot"))["run"]
    with pytest.raises(AssertionError, match="each machine needs 2 GPUs: sky launch --gpus NAME:2"):
        machine(script, SKYPILOT_NUM_GPUS_PER_NODE="1")


def in_pod(text, **variables):
    """Returns an argument as Kubernetes hands it to a container.

    Source: `Expand` in third_party/forked/golang/expansion of Kubernetes 1.31.
    """
    return re.sub(
        r"\$(?:(\$)|\((\w+)\))",
        lambda found: found[1] or variables.get(found[2], found[0]),
        text,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_words_with_line_breaks_and_quotes_arrive_unchanged(kind, machine, monkeypatch):
    monkeypatch.chdir(ROOT)
    value = "trainer_args.run_name=a b'\"\n$HOME\\x\t`id` é ☃ #\x01 $(HOME) $((1)) ${A:?b} 🚀\udc80a\xa0"
    # A pod has this variable, and so do the machines of the other programs.
    monkeypatch.setenv("HF_TOKEN", "hf_never_written")
    text = file_of(Cell("parallel", "fsdp2", 1), kind, words=("--set", value))
    if kind == "ray":
        call = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List))  # fmt: skip
        arrived = ast.literal_eval(call.args[0])
    else:
        data = valid(kind, text) if kind in YAML_KINDS else None
        script = {
            "kubeflow": lambda: in_pod(data["spec"]["trainer"]["args"][0], HOME="/root"),
            "skypilot": lambda: data["run"],
            "dstack": lambda: data["commands"][0],
        }.get(kind, lambda: text)()
        environ = {
            "SLURM_CPUS_ON_NODE": "8",
            "SLURM_JOB_ID": "7",
            "SKYPILOT_NUM_GPUS_PER_NODE": "8",
            "LC_ALL": "C",
        }
        arrived = machine(script, **environ)
    assert value == arrived[arrived.index("--set") + 1]


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("kubeflow", {"nproc_per_node": "gpu"}, "--nproc-per-node is gpu, and Kubeflow must be told how many GPUs"),
        ("ray", {"nproc_per_node": "auto"}, "and Ray must be told how many GPUs"),
        ("dstack", {"nnodes": "1:4", "node_rank": None}, "dstack takes a number of machines, and --nnodes is 1:4"),
        ("accelerate", {"nnodes": "1:4", "node_rank": None}, "accelerate launch takes a number of machines"),
        ("accelerate", {"nproc_per_node": "xpu"}, "one process for each NVIDIA GPU, and --nproc-per-node is xpu"),
        ("torchrun", {"nnodes": "1:4", "node_rank": None}, "only with a rendezvous that lets them join later"),
        ("slurm", {"nnodes": "3"}, None),
        ("slurm", {"nnodes": "1:4", "node_rank": None}, None),
    ],
)
def test_processes_that_a_program_cannot_start_are_refused(kind, options, reason, monkeypatch):
    monkeypatch.chdir(ROOT)
    if reason is None:
        assert "#SBATCH --nodes=" + options["nnodes"].replace(":", "-") in file_of(FSDP, kind, **options)
        return
    with pytest.raises(ProjectError, match=re.escape(reason)) as refused:
        file_of(FSDP, kind, **options)
    assert "FG530" == refused.value.code and refused.value.hint


@pytest.mark.parametrize(
    ("config", "nodes", "reason"),
    [
        ("single", 4, "single.yaml cannot run in 4 processes: its trainer runs in one process"),
        ("pipeline_1f1b", 4, "cannot run in 8 processes: 'Schedule1F1B' needs as many micro-batches as stages (8)"),
        ("hybrid", 4, "cannot run in 16 processes: 'Schedule1F1B' needs as many micro-batches as stages (8)"),
    ],
)
def test_a_config_that_cannot_be_laid_out_is_refused_with_its_line(config, nodes, reason, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ProjectError, match=re.escape(reason)) as refused:
        file_of(Cell("parallel", config, nodes), "slurm")
    assert "FG530" == refused.value.code and refused.value.span


@pytest.mark.parametrize(("processes", "fits"), [(4, True), (2, False), (8, False), (16, False)])
def test_sizes_that_are_all_given_fit_one_number_of_processes(processes, fits):
    sizes = [("+trainer_args.pipeline_parallel_size", "2")]
    project = Project("hybrid.yaml", str(ROOT / "projects/parallel"), overrides=sizes)
    if fits:
        refuse_other_layout(project, processes)
        return
    with pytest.raises(ProjectError, match=f"cannot run in {processes} processes: its parallel sizes multiply to 4"):
        refuse_other_layout(project, processes)


@pytest.mark.parametrize("value", ["a=$$b", "a=${{ secrets.b }}"])
def test_a_command_that_dstack_would_change_is_refused(value, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ProjectError, match="which dstack replaces"):
        file_of(FSDP, "dstack", words=("--set", value))


@pytest.mark.parametrize("kind", YAML_KINDS)
@pytest.mark.parametrize("name", ["a:b", "a\nb", "a\udc80"])
def test_a_folder_that_no_container_can_have_is_refused(kind, name, monkeypatch):
    job = launch_job_module.LaunchJob(name="a", folder="/", words=(), asked=request(FSDP), folders=(f"/{name}",))
    with pytest.raises(ProjectError, match="no volume can be mounted"):
        launch_file(kind, job)


def test_a_variable_that_no_shell_can_set_is_refused(tmp_path):
    config = "main: !partial:builtins:dict\n  a: !env 'A $(touch x)'\n"
    folder = make_project(tmp_path / "odd", {"templates/configs/odd.yaml": config})
    plan = plan_run(Project("odd.yaml", str(folder)))
    with pytest.raises(ProjectError, match="which no shell can set"):
        launch_job_module.launch_job(request(Cell("parallel", "fsdp2", 1)), ["train"], plan)


def test_a_secret_on_the_command_line_is_refused(monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ProjectError, match="a launch file would show it") as refused:
        file_of(FSDP, "slurm", words=("--set", "trainer_args.api_key=s3cr3tvalue99"))
    assert "FG531" == refused.value.code
    assert "s3cr3tvalue99" not in str(refused.value)


def test_a_name_of_a_variable_that_would_be_a_line_of_the_script_is_refused(tmp_path):
    config = '[optimizer]\n    == super()\n    eps: !env "A\\ntouch pwned"\n'
    rows = "".join(json.dumps({"text": f"row {number}"}) + "\n" for number in range(8))
    files = {"templates/configs/plain.yaml": TINY_TRAINING + config, "rows.jsonl": rows}
    plan = plan_run(Project("plain.yaml", str(make_project(tmp_path, files))))
    with pytest.raises(ProjectError, match=r"variable 'A\\ntouch pwned', which no shell can set") as refused:
        launch_job(ProcessRequest(per_node=1), ["train"], plan, environ={})
    assert "FG530" == refused.value.code


@pytest.mark.parametrize("kind", YAML_KINDS)
def test_a_folder_may_have_any_character(kind):
    folder = "/data/\U0001f600 \xfc 'quoted' \"twice\" # {no comment}"
    request = ProcessRequest(per_node=1, num_nodes=2)
    data = valid(
        kind, launch_file(kind, LaunchJob(name="job", folder=folder, words=(), asked=request, folders=(folder,)))
    )
    assert json.dumps(folder, ensure_ascii=False)[1:-1] in json.dumps(data, ensure_ascii=False)


def test_the_examples_of_the_module_hold():
    assert 0 == doctest.testmod(launch_job_module).failed


def test_shell_text_is_one_line():
    assert "\n" not in shell_text(["a\nb", "c\r\vd", "\u2028"])
