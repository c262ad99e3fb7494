"""The distributed environment: rank, world size, device and process group settings of the current process.

This module reads the environment variables that launchers set (`forgather/launcher_env.py` lists their names). It
provides `ProcessFacts`, `DistributedEnvironment`, and context managers that set environment variables for libraries. No
other module under forgather/ml reads environment variables. Reading the variables does not start a process group.
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
from forgather.ml.distributed.group import GroupSettings, shutdown, start, start_fake_group

_log = logging.getLogger(__name__)

# NCCL's flight recorder: with these, each process writes its last collectives to a file after a timeout.
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
# gloo connects every pair of processes at the start, or with this variable those that exchange something.
_GLOO_CONNECTS_LATE = {"TORCH_GLOO_LAZY_INIT": "1"}
FULL_MESH_LIMIT = 32
"""The largest number of processes whose gloo group connects every pair at the start."""
BACKENDS = ("auto", "gloo", "mpi", "nccl", "xccl")


def process_facts(environ: Mapping[str, str] | None = None) -> ProcessFacts:
    """Returns the position of this process: rank, local rank and world size. Without a launcher this is rank 0 of 1.

    Args:
        environ: the environment variables; `os.environ` by default.

    Raises:
        DistributedError: FG701 if a variable is not a number, or if the numbers contradict each other.
    """
    return launcher_env.process_facts(os.environ if environ is None else environ)


def launcher_name() -> str:
    """Returns the name of the launcher that started this process, for use in a message."""
    return launcher_env.started_by(os.environ)


def resolve_process_count(asked: int | str) -> int:
    """Returns the number of processes that the value of torchrun's `--nproc-per-node` means on this machine.

    A number is returned unchanged. A word means the number of accelerators. On a machine without accelerators, "gpu"
    and "xpu" mean 1, and every other word means the number of CPU cores.

    Args:
        asked: a number, or a word that torchrun accepts, such as "gpu" or "auto".
    """
    if isinstance(asked, int):
        return asked
    # "gpu" counts as one process without a GPU, so that the same config runs on the CPU.
    devices = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return devices or (1 if asked in ("gpu", "xpu") else os.cpu_count() or 1)


@contextlib.contextmanager
def fake_world(facts: ProcessFacts) -> Iterator[None]:
    """Context manager that makes this process one rank of a fake process group, for a dry run.

    Args:
        facts: the simulated position: rank, local rank and world size.
    """
    # Libraries require these variables; the fake group never connects to the address.
    with exported_facts(facts), _variables({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}):
        start_fake_group(facts.rank, facts.world_size)
        try:
            yield
        finally:
            shutdown()


@contextlib.contextmanager
def _variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Context manager that sets environment variables and restores them afterwards; the value None removes one."""
    kept = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        # The caller's values come back, and variables that did not exist are removed again.
        _set_variables(kept)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def accelerator_for_deepspeed(device_type: str) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that sets DeepSpeed's accelerator.

    DeepSpeed chooses its accelerator once, at import, and does not choose the CPU by itself on a machine with GPUs.

    Args:
        device_type: the value of DS_ACCELERATOR, for example "cpu" or "cuda".
    """
    return _variables({"DS_ACCELERATOR": device_type})


def export_local_rank(facts: ProcessFacts) -> None:
    """Sets LOCAL_RANK, unless it is set, for DeepSpeed's engine, which reads the variable during the whole run.

    torchrun sets the variable already. It is missing without a launcher and under some other launchers.
    """
    os.environ.setdefault("LOCAL_RANK", str(facts.local_rank))


def device_for_deepspeed_imports() -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that sets DeepSpeed's accelerator to "cpu" on a machine without an accelerator.

    The Trainer of transformers imports DeepSpeed, if it is installed, when it saves a model. Without the variable,
    DeepSpeed would search for an accelerator and print a warning, even in a run that does not use DeepSpeed.
    """
    on_cpu = torch.accelerator.current_accelerator(check_available=True) is None
    return accelerator_for_deepspeed("cpu") if on_cpu else contextlib.nullcontext()


def launcher_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns the folder in which torchrun looks for the error record of this process.

    Args:
        environ: the environment variables; `os.environ` by default.

    Returns:
        The folder, or None if the process was not started by torchrun.
    """
    # torchrun gives each process a folder of its own for its error file.
    file = (os.environ if environ is None else environ).get("TORCHELASTIC_ERROR_FILE", "")
    return Path(file).parent if file and Path(file).parent.is_dir() else None


@dataclass(frozen=True)
class DistributedEnvironment:
    """The distributed settings of a run. Two objects with the same settings are equal.

    The constructor does not create a process group; `start` does.

    Args:
        backend: the backend of torch.distributed, or "auto" for nccl on CUDA, xccl on Intel GPUs and gloo otherwise.
        init_method: the URL by which processes find each other; "env://" reads MASTER_ADDR and MASTER_PORT.
        timeout_seconds: the maximum wait for one collective during training, in seconds.
        start_timeout_seconds: the maximum wait for the other processes to connect, in seconds.

    Raises:
        DistributedError: FG702 if a setting has a value that no process group accepts.

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
            # `True` is an int in Python, and "timeout_seconds: yes" is a likely mistake in YAML.
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
        """The position of this process, which is read from the environment once."""
        return process_facts()

    @property
    def rank(self) -> int:
        """The rank of this process among all processes."""
        return self.facts.rank

    @property
    def local_rank(self) -> int:
        """The rank of this process among the processes on the same machine."""
        return self.facts.local_rank

    @property
    def world_size(self) -> int:
        """The number of processes of the run."""
        return self.facts.world_size

    @property
    def local_world_size(self) -> int:
        """The number of processes on this machine."""
        return self.facts.local_world_size

    @cached_property
    def device(self) -> torch.device:
        """The device of this process: the accelerator whose index is the local rank, or the CPU if there is none."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            return torch.device("cpu")
        # Modulo, because a scheduler may show each process only its own accelerator, which then has index 0.
        index = self.local_rank % max(torch.accelerator.device_count(), 1)
        return torch.device(accelerator.type, index)

    def facts_on(self, device: torch.device) -> ProcessFacts:
        """Returns the position of this process, in which the local rank is replaced by the device index.

        This is for libraries that assume that local rank and device index are equal. The two differ on clusters whose
        scheduler makes only one accelerator visible to each process.

        Example:
            >>> DistributedEnvironment().facts_on(torch.device("cuda", 0)).local_rank
            0
        """
        return self.facts if device.index is None else dataclasses.replace(self.facts, local_rank=device.index)

    def start(self, *, use_cpu: bool = False) -> torch.device:
        """Initializes the default process group and returns the device of this process.

        A second call leaves the existing process group as it is.

        Args:
            use_cpu: True to compute on the CPU even if there is an accelerator.

        Raises:
            DistributedError: FG701 if a process group of another size exists, FG705 if this build of torch does not
                have the backend, FG706 if the other processes do not connect in time.
        """
        device = torch.device("cpu") if use_cpu else self.device
        # A warning and no error: a config for GPUs can be tried out on a machine without any.
        if device.type == "cpu" and self.backend in ("nccl", "xccl") and self.rank == 0:
            _log.warning("backend %r needs an accelerator, and this run is on the CPU: gloo is used", self.backend)
        # `setdefault`, so that values that the user has exported win. They are read when the group is created.
        for name, value in (_FLIGHT_RECORDER if device.type == "cuda" else {}).items():
            os.environ.setdefault(name, value)
        group = self if device.type != "cpu" else self.on_cpu()
        if self.world_size > FULL_MESH_LIMIT:
            for name, value in _GLOO_CONNECTS_LATE.items():
                os.environ.setdefault(name, value)
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
        """Returns a copy of these settings with a backend that can communicate CPU tensors."""
        # NCCL and XCCL cannot communicate CPU tensors.
        return dataclasses.replace(self, backend="gloo") if self.backend in ("auto", "nccl", "xccl") else self

    def shutdown(self) -> None:
        """Destroys the default process group, if there is one."""
        shutdown()

    @property
    def resolved_backend(self) -> str:
        """The backend that is used, in which "auto" is replaced by the backend for the device of this process."""
        if self.backend != "auto":
            return self.backend
        return {"cuda": "nccl", "xpu": "xccl"}.get(self.device.type, "gloo")


_OF_ACCELERATE = "ACCELERATE_"


def accelerate_variables(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the settings that `accelerate launch` passes in the environment, without the prefix "ACCELERATE_".

    Args:
        environ: the environment variables; `os.environ` by default.
    """
    environ = os.environ if environ is None else environ
    return {
        name.removeprefix(_OF_ACCELERATE): value for name, value in environ.items() if name.startswith(_OF_ACCELERATE)
    }


def exported_facts(facts: ProcessFacts) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE.

    With one process, the context manager removes these variables instead. It also removes all variables with the prefix
    "ACCELERATE_".

    Args:
        facts: the position that libraries read from the environment inside the context.
    """
    position = {
        "RANK": facts.rank,
        "LOCAL_RANK": facts.local_rank,
        "WORLD_SIZE": facts.world_size,
        "LOCAL_WORLD_SIZE": facts.local_world_size,
    }
    # Accelerate's variables switch on features (ACCELERATE_USE_FSDP) that the arguments of the run did not ask for.
    values: dict[str, str | None] = {name: None for name in os.environ if name.startswith(_OF_ACCELERATE)}
    # With one process the variables are absent, since libraries take their presence for a distributed run.
    return _variables(values | {name: str(value) if facts.world_size > 1 else None for name, value in position.items()})
