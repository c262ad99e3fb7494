"""What the launcher told this process, read from environment variables.

Takes RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE (set by torchrun and `accelerate launch`; one
process where they are absent). Gives `ProcessFacts` and `DistributedEnvironment`. Keeps true: this is
the only module of the ML tower that reads environment variables; reading them starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from forgather.errors import DistributedError, nearest

BACKENDS = ("auto", "gloo", "mpi", "nccl", "xccl")


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The position of one process.

    Args:
        rank: position among all processes.
        local_rank: position among the processes of this machine.
        world_size: number of processes.
        local_world_size: number of processes on this machine.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def process_facts(environ: Mapping[str, str] | None = None) -> ProcessFacts:
    """Returns the position of this process.

    Args:
        environ: environment variables; those of the process by default.

    Raises:
        DistributedError: FG701 where a variable is no number, or the numbers do not fit together.
    """
    environ = os.environ if environ is None else environ
    if "WORLD_SIZE" not in environ and "RANK" not in environ:
        return ProcessFacts()
    world_size = _number(environ, "WORLD_SIZE", 1)
    facts = ProcessFacts(
        rank=_number(environ, "RANK", 0),
        local_rank=_number(environ, "LOCAL_RANK", 0),
        world_size=world_size,
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", world_size),
    )
    if not 0 <= facts.rank < facts.world_size:
        raise DistributedError(
            f"RANK is {facts.rank} and WORLD_SIZE is {facts.world_size}",
            code="FG701",
            hint="RANK counts from 0 to WORLD_SIZE - 1; a launcher such as torchrun sets both",
        )
    return facts


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "").strip()
    if not text:
        return default
    if not text.isdigit():
        raise DistributedError(
            f"the environment variable {name} is {text[:80]!r}, which is no whole number",
            code="FG701",
            hint=f"unset {name}, or start the processes with torchrun, which sets it",
        )
    return int(text)


@dataclass(frozen=True)
class DistributedEnvironment:
    """The processes of a run, as facts. Building one starts nothing, and equal settings are equal objects.

    Args:
        backend: "auto" (nccl on CUDA, xccl on Intel GPUs, else gloo), or one of torch.distributed.
        init_method: how processes find one another; "env://" reads MASTER_ADDR and MASTER_PORT.
        timeout_seconds: how long a process waits for its peers.

    Raises:
        DistributedError: FG702 for settings that no process group accepts.

    Example:
        >>> DistributedEnvironment(backend="gloo") == DistributedEnvironment(backend="gloo")
        True
    """

    backend: str = "auto"
    init_method: str = "env://"
    timeout_seconds: float = 1800

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise DistributedError(
                f"no backend {self.backend!r}", code="FG702", hint=nearest(str(self.backend), BACKENDS)
            )
        is_number = isinstance(self.timeout_seconds, int | float) and not isinstance(self.timeout_seconds, bool)
        if not (is_number and self.timeout_seconds > 0):
            raise DistributedError(
                f"timeout_seconds is {self.timeout_seconds!r}", code="FG702", hint="give a number above zero"
            )
        if self.init_method != "env://" and not self.init_method.startswith(("tcp://", "file://")):
            raise DistributedError(
                f"init_method is {self.init_method!r}",
                code="FG702",
                hint='give "env://", "tcp://HOST:PORT" or "file://PATH"',
            )

    @cached_property
    def facts(self) -> ProcessFacts:
        """The position of this process, read once."""
        return process_facts()

    @property
    def rank(self) -> int:
        """Position among all processes."""
        return self.facts.rank

    @property
    def local_rank(self) -> int:
        """Position among the processes of this machine."""
        return self.facts.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.facts.world_size

    @property
    def local_world_size(self) -> int:
        """Number of processes on this machine."""
        return self.facts.local_world_size

    @cached_property
    def device(self) -> torch.device:
        """Where this process computes: its own accelerator where there is one, else the CPU."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        index = self.local_rank % max(torch.accelerator.device_count(), 1)
        return torch.device(accelerator.type, index)

    @property
    def resolved_backend(self) -> str:
        """The backend that "auto" stands for on this device."""
        if self.backend != "auto":
            return self.backend
        return {"cuda": "nccl", "xpu": "xccl"}.get(self.device.type, "gloo")
