"""What the launcher told this process, read from environment variables.

Takes the variables that launchers set (`forgather/launcher_env.py` knows their names; one process where they are
absent). Gives `ProcessFacts` and `DistributedEnvironment`. Keeps true: this is
the only module of the ML tower that reads environment variables; reading them starts nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from forgather import launcher_env
from forgather.errors import DistributedError, nearest
from forgather.launcher_env import ProcessFacts
from forgather.ml.distributed.group import GroupSettings, shutdown, start, start_pretended

_log = logging.getLogger(__name__)

# Where NCCL's collectives time out, what each process did last is written to a file.
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
BACKENDS = ("auto", "gloo", "mpi", "nccl", "xccl")


def process_facts(environ: Mapping[str, str] | None = None) -> ProcessFacts:
    """Returns the position of this process.

    Args:
        environ: environment variables; those of the process by default.

    Raises:
        DistributedError: FG701 where a variable is no number, or the numbers do not fit together.
    """
    return launcher_env.process_facts(os.environ if environ is None else environ)


def who_started() -> str:
    """Returns who started this process, for people."""
    return launcher_env.started_by(os.environ)


def count_of(asked: int | str) -> int:
    """Returns how many processes "gpu" and "auto" are on this machine; a number is itself."""
    if isinstance(asked, int):
        return asked
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return devices or (1 if asked in ("gpu", "xpu") else os.cpu_count() or 1)


@contextlib.contextmanager
def alone_among(facts: ProcessFacts) -> Iterator[None]:
    """Makes this process one of many that do not exist: a group of torch answers for them at once, with anything."""
    # Nobody meets there.
    meeting = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    kept = {name: os.environ.get(name) for name in meeting}
    with libraries_see(facts):
        os.environ.update(meeting)
        start_pretended(facts.rank, facts.world_size)
        try:
            yield
        finally:
            shutdown()
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


@contextlib.contextmanager
def accelerator_for_deepspeed(device_type: str) -> Iterator[None]:
    """Names the device to DeepSpeed, which looks once, when it is imported: without this it never takes the CPU."""
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = device_type
    try:
        yield
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before


def name_local_rank(facts: ProcessFacts) -> None:
    """Names the position on this machine to DeepSpeed, whose engine looks for it as long as it runs.

    torchrun names it so; a process alone and other launchers do not.
    """
    os.environ.setdefault("LOCAL_RANK", str(facts.local_rank))


def device_told_to_libraries() -> contextlib.AbstractContextManager[None]:
    """Tells libraries that import DeepSpeed where it is installed, as transformers does to save a model, of the CPU.

    It would look for a device, and warn of a run that it has no part in.
    """
    on_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    return accelerator_for_deepspeed("cpu") if on_cpu else contextlib.nullcontext()


def launcher_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns where torchrun looks for what this process leaves behind; None under another launcher."""
    file = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE", "")
    return Path(file).parent if file and Path(file).parent.is_dir() else None


@dataclass(frozen=True)
class DistributedEnvironment:
    """The processes of a run, as facts. Building one starts nothing, and equal settings are equal objects.

    Args:
        backend: "auto" (nccl on CUDA, xccl on Intel GPUs, else gloo), or one of torch.distributed.
        init_method: how processes find one another; "env://" reads MASTER_ADDR and MASTER_PORT.
        timeout_seconds: how long a process waits for its peers while it trains.
        start_timeout_seconds: how long it waits for them to come.

    Raises:
        DistributedError: FG702 for settings that no process group accepts.

    Example:
        >>> DistributedEnvironment(backend="gloo") == DistributedEnvironment(backend="gloo")
        True
    """

    backend: str = "auto"
    init_method: str = "env://"
    timeout_seconds: float = 1800
    start_timeout_seconds: float = 300

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise DistributedError(
                f"no backend {self.backend!r}", code="FG702", hint=nearest(str(self.backend), BACKENDS)
            )
        for name in ("timeout_seconds", "start_timeout_seconds"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise DistributedError(f"{name} is {value!r}", code="FG702", hint="give a number above zero")
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

    def facts_on(self, device: torch.device) -> ProcessFacts:
        """Returns the position of this process for libraries that take the one on its machine for the accelerator's.

        These differ where each process sees one accelerator alone, as schedulers of clusters arrange it.

        Example:
            >>> DistributedEnvironment().facts_on(torch.device("cuda", 0)).local_rank
            0
        """
        return self.facts if device.index is None else dataclasses.replace(self.facts, local_rank=device.index)

    def start(self, *, use_cpu: bool = False) -> torch.device:
        """Joins the other processes and returns where this one computes. Several environments are one group.

        Raises:
            DistributedError: FG705 for a backend that this torch lacks, FG706 where the others do not come.
        """
        device = torch.device("cpu") if use_cpu else self.device
        if device.type == "cpu" and self.backend in ("nccl", "xccl") and self.rank == 0:
            _log.warning("backend %r needs an accelerator, and this run is on the CPU: gloo is used", self.backend)
        if device.type == "cuda":
            for name, value in _FLIGHT_RECORDER.items():
                os.environ.setdefault(name, value)
        group = self if device.type != "cpu" else self.on_cpu()
        start(
            GroupSettings(
                facts=self.facts,
                rank=self.rank,
                world_size=self.world_size,
                backend=group.resolved_backend,
                init_method=self.init_method,
                start_timeout_seconds=self.start_timeout_seconds,
                timeout_seconds=self.timeout_seconds,
            ),
            device,
        )
        return device

    def on_cpu(self) -> DistributedEnvironment:
        """Returns the same environment with the backend that tensors of the CPU need."""
        return dataclasses.replace(self, backend="gloo") if self.backend in ("auto", "nccl", "xccl") else self

    def shutdown(self) -> None:
        """Leaves the other processes."""
        shutdown()

    @property
    def resolved_backend(self) -> str:
        """The backend that "auto" stands for on this device."""
        if self.backend != "auto":
            return self.backend
        return {"cuda": "nccl", "xpu": "xccl"}.get(self.device.type, "gloo")


_OF_ACCELERATE = "ACCELERATE_"


def accelerate_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns what `accelerate launch` and its config file hand down, by names without "ACCELERATE_"."""
    environ = os.environ if environ is None else environ
    return {
        name.removeprefix(_OF_ACCELERATE): value for name, value in environ.items() if name.startswith(_OF_ACCELERATE)
    }


@contextlib.contextmanager
def libraries_see(facts: ProcessFacts) -> Iterator[None]:
    """Lets libraries that read the environment find these facts there, and nothing that Accelerate's launcher left."""
    position = {
        "RANK": facts.rank,
        "LOCAL_RANK": facts.local_rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_WORLD_SIZE": facts.local_world_size,
    }
    shown = {name: str(value) for name, value in position.items()} if facts.world_size > 1 else {}
    hidden = {*position, *(name for name in os.environ if name.startswith(_OF_ACCELERATE))}
    kept = {name: os.environ.pop(name) for name in hidden if name in os.environ}
    os.environ.update(shown)
    try:
        yield
    finally:
        for name in position:
            os.environ.pop(name, None)
        os.environ.update(kept)
