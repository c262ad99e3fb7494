"""The survey: which checks run on this machine, in which order.

Takes what the user asked for; yields one result after the other, so that a slow check does not delay the lines before.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import MappingProxyType
from typing import Any

from forgather.doctor import devices, folders, libraries, network, system, variables
from forgather.doctor.config_needs import check_config
from forgather.doctor.meeting import Place, between_machines
from forgather.doctor.result import CheckResult, attempt, not_checked
from forgather.doctor.traffic import PROBE, all_reduce_here
from forgather.launch.process_request import ProcessRequest
from forgather.project.git_state import git_state
from forgather.project.project import Project
from forgather.project.versions import installed_versions


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What the doctor is asked to look at.

    Args:
        folder: the folder of runs.
        place: the place of this machine among several; None for one machine.
        port: a port that must be free; None for none.
        timeout: the maximum time of an all-reduce, in seconds.
        project: the project with a config; None without one.
        asked: the processes of that config; None without one.
        groups: the groups of checks that run; None for all.
    """

    folder: str
    place: Place | None = None
    port: int | None = None
    timeout: float = 60
    project: Project | None = None
    asked: ProcessRequest | None = None
    groups: Collection[str] | None = None


def survey(wanted: Wanted) -> Iterator[CheckResult]:
    """Yields the result of each check of this machine, and of those between machines."""
    for group in GROUPS if wanted.groups is None else [one for one in GROUPS if one in wanted.groups]:
        yield from GROUPS[group](wanted)


def _libraries(wanted: Wanted) -> Iterator[CheckResult]:
    yield from libraries.check_versions(_installed())


def _installed() -> dict[str, str | None]:
    record = libraries.tested_versions()
    return installed_versions(sorted({*record["oldest"], *record["tested"]}))


@cache
def _device_facts() -> dict[str, Any] | None:
    try:
        facts: dict[str, Any] = import_module(PROBE).device_facts()
    except (ImportError, OSError):
        return None
    return facts


def _devices(wanted: Wanted) -> Iterator[CheckResult]:
    facts = _device_facts()
    if facts is None:
        yield not_checked("devices", "PyTorch cannot be imported")
        return
    yield devices.check_devices(facts, devices.gpus_of_system(), os.environ)
    yield devices.check_device_memory(facts)
    yield from devices.check_connections(facts)


def _variables(wanted: Wanted) -> Iterator[CheckResult]:
    yield variables.check_variable_names(os.environ)
    yield from variables.check_interface_variables(os.environ, network.interfaces())


def _network(wanted: Wanted) -> Iterator[CheckResult]:
    place, addresses = wanted.place, network.interfaces()
    yield network.check_hostname(socket.gethostname(), addresses, is_alone=place is None)
    if wanted.port is not None and (place is None or place.rank == 0):
        yield network.check_port(wanted.port)
    if place is not None:
        yield network.check_rendezvous(place.master[0], addresses, node_rank=place.rank)


def _system(wanted: Wanted) -> Iterator[CheckResult]:
    each = wanted.asked.per_node if wanted.asked else 1
    yield attempt("memory", system.check_memory)
    yield attempt("shared memory", system.check_shared_memory)
    yield attempt("open files", system.check_open_files)
    yield attempt("processors", partial(system.check_processors, each if isinstance(each, int) else 1))


def _folders(wanted: Wanted) -> Iterator[CheckResult]:
    here = folders.existing_parent(wanted.folder)
    yield attempt("run folder", partial(folders.check_folder, wanted.folder))
    yield attempt("file system", partial(folders.check_file_system, here, is_alone=wanted.place is None))
    yield attempt("disk speed", partial(system.check_disk_speed, here))
    yield attempt("clock", partial(system.check_clock, here))
    yield from folders.check_caches(os.environ)


def _config(wanted: Wanted) -> Iterator[CheckResult]:
    if wanted.project is not None and wanted.asked is not None:
        facts = _device_facts()
        yield from check_config(wanted.project, wanted.asked, len(facts["devices"]) if facts else 0)


def _all_reduce(wanted: Wanted) -> Iterator[CheckResult]:
    if _device_facts() is None:
        yield not_checked("all-reduce (gloo)", "PyTorch cannot be imported")
        return
    backends = import_module(PROBE).backends()
    for backend in ("gloo", "nccl"):
        if backend in backends:
            yield attempt(f"all-reduce ({backend})", partial(all_reduce_here, backend, timeout=wanted.timeout))
        else:
            reason = "not measured: it needs two GPUs" if backend == "nccl" else "this PyTorch is built without it"
            yield not_checked(f"all-reduce ({backend})", reason)


def _machines(wanted: Wanted) -> Iterator[CheckResult]:
    if wanted.place is None:
        return
    facts = _device_facts()
    compared = {
        "versions": _installed() | ({"CUDA": facts["built_with"]} if facts else {}),
        "git": git_state(wanted.project.meta.project_dir if wanted.project else os.getcwd()),
        "address": network.own_address(socket.gethostname(), network.interfaces(), os.environ),
        "gpus": len(facts["devices"]) if facts else 0,
    }
    yield from between_machines(wanted.place, compared, folders.existing_parent(wanted.folder))


GROUPS: Mapping[str, Callable[[Wanted], Iterator[CheckResult]]] = MappingProxyType(
    {
        "libraries": _libraries,
        "devices": _devices,
        "variables": _variables,
        "network": _network,
        "system": _system,
        "folders": _folders,
        "config": _config,
        "all-reduce": _all_reduce,
        "machines": _machines,
    }
)
"""The groups of checks, in their order."""
