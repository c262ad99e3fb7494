"""Several processes from a notebook, through Accelerate's `notebook_launcher`.

The launcher forks the process of the notebook, so that functions of its cells need not be in a file. It refuses if
this process has already set up what a fork would break; this is reported before anything is started, with the way that
works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from forgather.distributed.arguments import COUNT, FUNCTION, Rule, refuse_wrong
from forgather.errors import DistributedError

_INSTEAD = "write the cells into a file, and start it with: torchrun --nproc-per-node {count} script.py"

# A mistyped number must not fork until the machine stops.
_PROCESSES: Rule = {"type": "whole", "minimum": 1, "maximum": 1024}


def launch_in_notebook(
    function: Callable[..., Any], args: Sequence[Any] = (), *, num_processes: int, port: int = 29500
) -> None:
    """Calls a function in several processes, and returns when all of them have ended.

    The function makes the model and trains it; each process calls it with the same arguments. It is what Lightning
    calls `ddp_notebook`; `ddp_spawn` is a start of the same kind.

    Args:
        function: the function, which may be defined in a cell.
        args: the arguments of the function.
        num_processes: the number of processes.
        port: the port on this machine at which the processes meet.

    Raises:
        DistributedError: FG704 if this process has set up what a fork would break; restart the kernel then.
    """
    refuse_wrong(locals(), {"function": FUNCTION, "args": {"type": "list"}, "num_processes": _PROCESSES, "port": COUNT})
    if (reason := refusal()) is not None:
        raise DistributedError(
            f"{reason}: processes cannot be forked from it",
            code="FG704",
            hint="restart the kernel, and do this inside of the function; or " + _INSTEAD.format(count=num_processes),
        )
    launcher = import_module("accelerate").notebook_launcher
    launcher(function, tuple(args), num_processes=num_processes, use_port=str(port))


def refusal() -> str | None:
    """Returns why processes cannot be forked from this process, or None if they can.

    Nothing is imported for the answer: what is not imported has set up nothing.
    """
    if "bitsandbytes" in sys.modules:
        return "bitsandbytes is imported in this process, which may have initialized CUDA"
    state = sys.modules.get("accelerate.state")
    if state is not None and (state.AcceleratorState._shared_state or state.PartialState._shared_state):
        return "this process has an Accelerator, or has trained already"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is initialized in this process"
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return "this process is in a process group"
    return None
