"""Each check of the doctor finds the fault that it is for, names the fix, and finds nothing on a sound machine."""

import json
import os
import resource
import socket
import tomllib
from pathlib import Path

import pytest

from forgather import Project
from forgather.doctor import devices, folders, libraries, network, system, variables
from forgather.doctor.config_needs import check_config
from forgather.doctor.result import State, attempt
from forgather.launch.process_request import ProcessRequest
from scripts.write_tested_versions import record
from tests.project.workbench import make_project

ROOT = Path(__file__).parents[2]
GPU = {"name": "L4", "free_bytes": 22 * 2**30, "total_bytes": 23 * 2**30}
CPU = {
    "torch": "2.13.0+cpu",
    "built_with": "",
    "problem": "",
    "devices": [],
    "without_peer_access": [],
    "nvlinks": None,
}
TWO = {**CPU, "torch": "2.13.0", "built_with": "12.8", "devices": [GPU, GPU], "nvlinks": 12}
LO = {"lo": "127.0.0.1", "eth0": "10.0.0.5"}


def is_wrong(result, *words):
    """A fault has a fix, and says what was found."""
    assert State.WRONG is result.state, result
    assert result.fix
    for word in words:
        assert word in f"{result.found} {result.fix}", result
    return True


def is_ok(result):
    assert State.OK is result.state, result
    return True


def is_not_checked(result, reason):
    assert State.NOT_CHECKED is result.state and reason in result.found, result
    return True


# variables


@pytest.mark.parametrize(
    ("variable", "advice"),
    [
        ("NCCL_TIMEOUT", "timeout_seconds of distributed_env"),
        ("NCCL_TIMEOUT_SECONDS", "timeout_seconds of distributed_env"),
        ("NCCL_SOCKET_IFNAM", "did you mean NCCL_SOCKET_IFNAME?"),
        ("NCCL_DEBUGS", "did you mean NCCL_DEBUG?"),
        ("TORCH_NCCL_BLOCKING_WAITS", "did you mean TORCH_NCCL_BLOCKING_WAIT?"),
        ("NCCL_IFNAME", "NCCL_SOCKET_IFNAME names the interface"),
        ("NCCL_QQQQQQ", "remove it"),
    ],
)
def test_a_variable_that_no_library_reads_is_found(variable, advice):
    assert is_wrong(
        variables.check_variable_names({variable: "1", "NCCL_DEBUG": "INFO"}), f"no library reads {variable}", advice
    )


@pytest.mark.parametrize(
    "variable",
    ["NCCL_DEBUG", "NCCL_IB_TIMEOUT", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
     "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_VERSION"],
)  # fmt: skip
def test_a_variable_that_exists_is_no_fault(variable):
    assert is_ok(variables.check_variable_names({variable: "1", "PATH": "/bin"}))


def test_the_list_of_variables_names_its_sources():
    recorded = json.loads((ROOT / "forgather/doctor/nccl_variables.json").read_text())
    assert any("nccl" in source for source in recorded["sources"]) and 300 < len(recorded["names"])


@pytest.mark.parametrize(
    ("variable", "value", "selected"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", "eth0"), ("NCCL_SOCKET_IFNAME", "=eth0", "eth0"),
        ("NCCL_SOCKET_IFNAME", "^docker,lo", "eth0"), ("NCCL_SOCKET_IFNAME", "=eth", None),
        ("NCCL_SOCKET_IFNAME", "ib", None), ("NCCL_SOCKET_IFNAME", "^eth,lo", None),
        ("GLOO_SOCKET_IFNAME", "eth0", "eth0"), ("GLOO_SOCKET_IFNAME", "eth", None), ("GLOO_SOCKET_IFNAME", "eth0,ib0", None),
    ],
)  # fmt: skip
def test_an_interface_that_does_not_exist_is_found(variable, value, selected):
    (result,) = variables.check_interface_variables({variable: value}, LO)
    if selected is None:
        assert is_wrong(result, value, "eth0")
    else:
        assert is_ok(result) and f"selects {selected}" in result.found


# the system


def test_little_memory_is_found(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 64000000 kB\nMemAvailable:   800000 kB\n")
    assert is_wrong(system.check_memory(str(tmp_path / "meminfo"), str(tmp_path)), "0.8 GiB available")
    assert is_ok(system.check_memory(cgroup=str(tmp_path)))


def test_the_limit_of_a_container_counts(tmp_path):
    (tmp_path / "memory.max").write_text(f"{4 * 2**30}\n")
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "meminfo").write_text("MemAvailable:   64000000 kB\n")
    result = system.check_memory(str(tmp_path / "meminfo"), str(tmp_path))
    assert is_wrong(result, "1.0 GiB available in this container")
    assert 2**30 == result.values["available_bytes"]
    (tmp_path / "memory.max").write_text("max\n")
    assert is_ok(system.check_memory(str(tmp_path / "meminfo"), str(tmp_path)))


def test_small_shared_memory_is_found(tmp_path, monkeypatch):
    assert is_not_checked(system.check_shared_memory(str(tmp_path / "none")), "there is no")
    # The smallest file system that exists everywhere has no room at all.
    assert is_wrong(system.check_shared_memory("/proc"), "0.00 GiB free", "--shm-size")
    assert is_ok(system.check_shared_memory(str(tmp_path)))


def test_the_advice_where_a_limit_has_no_end_is_a_number(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    assert is_wrong(system.check_open_files(), "256", "ulimit -n 65536")


def test_a_low_limit_of_open_files_is_found():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert is_wrong(system.check_open_files(), "1024", "ulimit -n")
        if hard >= 4096 or hard == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
            assert is_ok(system.check_open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("away", "said"), [(-600, "600 s ahead"), (3600, "3600 s behind")])
def test_a_clock_that_differs_from_the_file_system_is_found(tmp_path, away, said):
    import time

    assert is_wrong(system.check_clock(str(tmp_path), now=time.time() + away), said, "set-ntp")
    assert is_ok(system.check_clock(str(tmp_path)))


def test_a_clock_that_was_never_set_is_found(tmp_path):
    assert is_wrong(system.check_clock(str(tmp_path), now=1_000_000.0), "before this program was installed")


def test_a_slow_disk_is_found(tmp_path):
    slow = system.check_disk_speed(str(tmp_path), num_bytes=2**20, least=1e15)
    assert is_wrong(slow, "MB/s", "output_dir") and 0 < slow.values["bytes_per_second"]
    assert is_ok(system.check_disk_speed(str(tmp_path), num_bytes=2**20, least=1.0))
    assert [] == list(tmp_path.iterdir())


def test_few_processors_are_told():
    result = system.check_processors(10_000)
    assert State.NOTE is result.state and "for 10000 processes" in result.found


# folders


def test_a_folder_that_cannot_be_written_to_is_found(tmp_path):
    assert is_wrong(folders.check_folder("/proc/1/forgather"), "cannot be written to", "output_dir")
    assert is_ok(folders.check_folder(str(tmp_path / "not" / "yet")))
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("broken", "said"),
    [("os.fsync", "flushed (fsync)"), ("os.replace", "renamed over another file"), ("fcntl.flock", "locked (flock)")],
)
def test_what_a_file_system_cannot_do_is_named(tmp_path, monkeypatch, broken, said):
    def fail(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(broken, fail)
    assert is_wrong(folders.check_folder(str(tmp_path)), f"cannot be {said}: Operation not supported")


@pytest.mark.parametrize("below", ["", "/runs"])
def test_a_file_in_the_place_of_a_folder_is_found(tmp_path, below):
    file = tmp_path / "out"
    file.write_text("")
    assert is_wrong(folders.check_folder(f"{file}{below}"), f"{file} is no folder", "output_dir")


def test_a_full_folder_is_found(tmp_path, monkeypatch):
    facts = os.statvfs(tmp_path)
    full = os.statvfs_result([facts.f_bsize, facts.f_frsize, facts.f_blocks, 5, 5, *list(facts)[5:]])
    monkeypatch.setattr("os.statvfs", lambda _: full)
    assert is_wrong(folders.check_folder(str(tmp_path)), "MiB free", "ckpt prune")


def test_network_file_systems_are_known(tmp_path):
    mounts = tmp_path / "mountinfo"

    def check(kind, options, place=tmp_path, *, is_alone=False):
        line = f"36 35 98:0 / {str(place).replace(' ', chr(92) + '040')} rw,noatime shared:1 - {kind} srv:/x rw,{options}\n"
        mounts.write_text("22 1 8:1 / / rw - ext4 /dev/sda rw\n" + line)
        return folders.check_file_system(str(place), mounts=str(mounts), is_alone=is_alone)

    spaced = tmp_path / "a b"
    spaced.mkdir()
    assert is_ok(check("nfs4", "vers=4.2")) and "nfs4" in check("nfs4", "vers=4.2").found
    assert is_ok(check("lustre", "flock", spaced))
    assert is_wrong(check("nfs", "nolock"), "do not see each other's locks")
    assert State.NOTE is check("ext4", "data=ordered").state
    assert is_ok(check("ext4", "data=ordered", is_alone=True))


def test_a_cache_that_cannot_be_written_to_is_found(tmp_path):
    environ = {
        name: str(tmp_path) for name in ("HF_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME")
    }
    assert all(map(is_ok, folders.check_caches(environ)))
    results = list(folders.check_caches({**environ, "HF_HOME": "/proc/1/cache"}))
    assert is_wrong(results[0], "HF_HOME: /proc/1/cache cannot be written to", "export HF_HOME=")
    assert all(map(is_ok, results[1:]))


# the network


def test_a_hostname_that_does_not_resolve_is_found():
    name = "no-such-machine.invalid"
    assert is_wrong(network.check_hostname(name, LO, is_alone=False), "does not resolve", f"10.0.0.5 {name}")
    assert State.NOTE is network.check_hostname(name, LO, is_alone=True).state


def test_a_hostname_that_resolves_to_the_loopback_is_found():
    assert is_wrong(network.check_hostname("localhost", LO, is_alone=False), "127.0.0.1", "GLOO_SOCKET_IFNAME=eth0")
    alone = network.check_hostname("localhost", LO, is_alone=True)
    assert is_ok(alone) and "gloo takes lo; NCCL takes eth0" in alone.found


def test_a_hostname_of_another_machine_is_found():
    assert is_wrong(network.check_hostname("192.0.2.77", LO, is_alone=False), "no interface has this address")


@pytest.mark.parametrize("host", ["a..b", "x" * 70, "."])
def test_a_text_that_is_no_name_of_a_machine_is_found(host):
    assert State.WRONG is network.check_hostname(host, {}, is_alone=False).state
    found = network.check_rendezvous(host, {}, node_rank=1)
    assert State.WRONG is found.state and "does not resolve" in found.found
    assert "127.0.0.1" == network.own_address(host, {}, {})


def test_interfaces_have_addresses():
    assert "127.0.0.1" == network.interfaces()["lo"]
    assert "10.0.0.5" == network.own_address("localhost", LO, {"GLOO_SOCKET_IFNAME": "eth0"})
    assert "127.0.0.1" == network.own_address("localhost", LO, {})


def test_a_port_that_is_taken_is_found():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        assert is_wrong(network.check_port(port), f"{port} is taken", "--master-port")
    assert is_ok(network.check_port(port))


def test_a_wrong_rendezvous_address_is_found():
    check = network.check_rendezvous
    assert is_wrong(check("192.0.2.1", LO, node_rank=0), "no address of this machine", "--master-addr")
    assert is_wrong(check("127.0.0.1", LO, node_rank=1), "which is this machine", "--master-addr")
    assert is_wrong(check("no-such-machine.invalid", LO, node_rank=1), "does not resolve")
    assert is_ok(check("10.0.0.5", LO, node_rank=0)) and is_ok(check("192.0.2.1", LO, node_rank=1))
    assert State.NOTE is check("10.0.0.5", LO, node_rank=1).state


# libraries


def test_versions_are_compared():
    record_ = libraries.tested_versions()
    sound = {**record_["oldest"], **record_["tested"]}
    assert all(map(is_ok, libraries.check_versions(sound)))
    results = list(libraries.check_versions({**sound, "torch": "2.9.1+cu128", "accelerate": None}))
    assert is_wrong(results[0], "accelerate is not installed") and is_wrong(results[1], "2.9.1+cu128", "torch>=2.10")
    (other,) = libraries.check_versions({**sound, "torch": "2.99.0+cu130", "peft": None})
    assert State.NOTE is other.state and "torch 2.99.0+cu130 (tested: " in other.found


def test_the_recorded_versions_are_those_of_the_project():
    assert record() == libraries.tested_versions()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert len(needed) == len(record()["oldest"])


# devices, by facts: this suite runs without a GPU


@pytest.mark.parametrize(
    ("facts", "gpus", "environ", "words"),
    [
        (CPU, 2, {}, ("2 GPUs, and PyTorch 2.13.0+cpu is built without CUDA", "install")),
        ({**TWO, "devices": [], "problem": "The NVIDIA driver is too old"}, 2, {}, ("too old", "CUDA 12.8")),
        ({**TWO, "devices": []}, 2, {"CUDA_VISIBLE_DEVICES": ""}, ("hides all 2 GPUs", "unset CUDA_VISIBLE_DEVICES")),
    ],
)
def test_gpus_that_pytorch_cannot_use_are_found(facts, gpus, environ, words):
    assert is_wrong(devices.check_devices(facts, gpus, environ), *words)


def test_devices_are_described():
    assert is_ok(devices.check_devices(TWO, 2, {}))
    assert State.NOTE is devices.check_devices(CPU, 0, {}).state
    assert "hides 6" in devices.check_devices(TWO, 8, {"CUDA_VISIBLE_DEVICES": "0,1"}).found
    assert "slowest" in devices.check_devices({**TWO, "devices": [GPU, {**GPU, "name": "T4"}]}, 2, {}).fix


def test_memory_that_other_processes_hold_is_found():
    held = {**GPU, "free_bytes": 2**30}
    assert is_wrong(devices.check_device_memory({**TWO, "devices": [GPU, held]}), "GPU 1: 22.0 GiB")
    assert is_ok(devices.check_device_memory(TWO))
    assert is_not_checked(devices.check_device_memory(CPU), "not measured")


def test_gpus_that_do_not_reach_each_other_are_found():
    peer, link = devices.check_connections({**TWO, "without_peer_access": [(1, 0)], "nvlinks": 0})
    assert is_wrong(peer, "1-0", "peer access") and State.NOTE is link.state
    assert all(map(is_ok, devices.check_connections(TWO)))
    for facts, reason in ((CPU, "no GPU"), ({**TWO, "devices": [GPU]}, "one GPU")):
        assert all(is_not_checked(one, reason) for one in devices.check_connections(facts))
    assert is_not_checked(list(devices.check_connections({**TWO, "nvlinks": None}))[1], "nvidia-smi")


def test_gpus_of_the_driver_are_counted(tmp_path):
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "proc/driver/nvidia/gpus" / name).mkdir(parents=True)
    assert 2 == devices.gpus_of_system(str(tmp_path))


# configs, and checks that cannot run


def test_what_a_config_needs_is_checked(tmp_path):
    project = Project("pipeline_1f1b.yaml", project_dir=str(ROOT / "projects/parallel"))
    sound = list(check_config(project, ProcessRequest(per_node=2), devices=0))
    assert 2 == len(sound) and all(map(is_ok, sound))
    _, layout, device = check_config(project, ProcessRequest(per_node=8), devices=4)
    assert is_wrong(layout, "as many micro-batches as stages") and is_wrong(device, "8 processes, and there are 4 GPUs")
    _, unknown = check_config(project, ProcessRequest(per_node="gpu"), devices=0)
    assert is_not_checked(unknown, "as many as the machine has devices")


def test_a_package_that_a_config_needs_is_found_missing(tmp_path):
    text = "main: !partial:no_such_library:train\n"
    project = Project("a.yaml", project_dir=str(make_project(tmp_path / "P", {"templates/configs/a.yaml": text})))
    assert is_wrong(next(check_config(project, ProcessRequest(), devices=0)), "no_such_library")


def test_a_check_that_cannot_run_says_why(tmp_path):
    def fail():
        raise PermissionError(13, "Permission denied")

    assert is_not_checked(attempt("memory", fail), "PermissionError: [Errno 13] Permission denied")
    missing = attempt("memory", lambda: system.check_memory("/no/such/file"))
    assert is_not_checked(missing, "No such file")
    # A sandbox may show less than Linux does.
    (tmp_path / "meminfo").write_text("MemTotal: 100 kB\n")
    assert is_not_checked(attempt("memory", lambda: system.check_memory(str(tmp_path / "meminfo"))), "MemAvailable")
