"""What is known about the devices of a run: from the command line, else from `meta`, else from this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forgather.launch.planning import Device, device_of, free_on
from forgather.planner.fit import largest_peak, refuse_without_room
from forgather.project.project import Project
from forgather.project.targets import run_meta
from forgather.project.trainer_arguments import TrainerArguments, trainer_arguments

_AXES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size", "context_parallel_size")


@dataclass(frozen=True, kw_only=True)
class Room:
    """What is known about the devices of a run.

    Args:
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        devices: the device of each pipeline rank, or one for all; empty if unknown.
        limits: the bytes that each pipeline rank may take for tensors, or one number for all; empty if they follow from
            the devices.
        assumed_type: the kind of the devices if none is known, "cpu" or "cuda"; None lets `limits` decide.
    """

    gpus: int
    nodes: int
    devices: tuple[Device, ...] = ()
    limits: tuple[int, ...] = ()
    assumed_type: str | None = None

    @property
    def device_type(self) -> str:
        """Torch's name of the kind of the devices."""
        # The memory of a run on a CPU is not limited, so that a limit is that of a GPU somewhere else.
        assumed = self.assumed_type or ("cuda" if self.limits else "cpu")
        return self.devices[0].type if self.devices else assumed

    @property
    def device(self) -> Device | None:
        """The device of each process; None if it is unknown, or not the same for all."""
        return self.devices[0] if len({one.hardware.name for one in self.devices}) == 1 else None

    @property
    def cluster(self) -> dict[str, Any]:
        """The arguments of a plan."""
        return {"gpus": self.gpus, "nodes": self.nodes, "device_type": self.device_type}

    def limits_of(self, arguments: TrainerArguments) -> tuple[float, ...]:
        """Returns the bytes that tensors may take; empty if nothing limits them."""
        sizes = {axis: size for axis in _AXES if isinstance(size := arguments.plain(axis), int) and size > 1}
        return self.limits_on(sizes or {"processes": self.gpus * self.nodes})

    def limits_on(self, mesh: Mapping[str, int], convolution_bytes: int = 0) -> tuple[float, ...]:
        """Returns the bytes that tensors may take; empty if nothing limits them.

        Args:
            mesh: the size of each mesh axis, which has a communicator.
            convolution_bytes: the bytes of the arguments and results of the largest convolution.

        Raises:
            PlanError: FG992 if a device has no room for tensors.
        """
        if self.limits:
            return self.limits
        known = [one for one in self.devices if one.hardware.memory_bytes is not None]
        for one in known:
            refuse_without_room(one.hardware, mesh, held_bytes=one.held_bytes)
        return tuple(
            largest_peak(one.hardware, mesh, held_bytes=one.held_bytes, convolution_bytes=convolution_bytes)
            for one in known
        )


def room_of(
    project: Project,
    *,
    gpus: int,
    nodes: int,
    hardware: str | None = None,
    memory: int | None = None,
    free: int | None = None,
    device_type: str | None = None,
) -> Room:
    """Returns what is known about the devices of a run: from the arguments, else from `meta`, else from this machine.

    Args:
        project: the project, opened with the config.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        hardware: the name of the device of each process, or a file; None if it is not given.
        memory: the bytes that each process may take; None if they are not given.
        free: the bytes that are free on each device; None for all of them, or of the GPUs here, what no process holds.
        device_type: the kind of the devices if none is named or found, "cpu" or "cuda"; None if it is not given.

    Raises:
        ProjectError: FG948 if `meta` has a wrong value.
        PlanError: FG994 or FG995 if there is no such hardware.
    """
    meta = run_meta(project.graph)
    names = (hardware,) if hardware is not None else meta.hardware
    arguments = trainer_arguments(project.graph)
    found = [device_of(name, gpus=gpus) for name in names]
    if not found:
        found = [None if arguments and arguments.plain("use_cpu") else device_of(None, gpus=gpus)]
    known = (free_on(one, free, device_type) for one in found)
    limits = (memory,) if memory is not None else meta.device_memory
    devices = tuple(one for one in known if one is not None)
    return Room(gpus=gpus, nodes=nodes, devices=devices, limits=limits, assumed_type=device_type)
