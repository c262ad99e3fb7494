"""The plan that is computed while a run starts, see `forgather.launch.plan_check`.

Takes the command line of the run; gives the command line that plans the same config, and the check that executes it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.options import memory_size
from forgather.cli.output import print_note
from forgather.launch.auto_values import AutoValue
from forgather.launch.plan_check import PATIENCE_SECONDS, WAYS_SECONDS, PlanCheck, begin_plan_check, note_largest_row
from forgather.launch.planning import Device, device_of, free_on
from forgather.planner.hardware import hardware_names

Configure = Callable[[argparse.ArgumentParser], None]


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Adds the options about the devices that a run is compared with."""
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="plan first, and say whether the run fits on this device (default: a GPU here, while the run starts)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        type=memory_size,
        help="memory of each device for `auto` values, as 22GB (default: device_memory of meta, or of the device)",
    )
    parser.add_argument(
        "--free",
        metavar="SIZE",
        type=memory_size,
        help="plan first, and say whether the run fits into this memory of each device, as 22GB (default: all of it; "
        "of the GPUs here, what nobody holds)",
    )
    parser.add_argument("--no-plan", action="store_true", help="do not compare the run with its device")


def plan_checks(
    main: object,
    run_dir: str,
    invocation: Invocation,
    configure: Configure,
    member: Any = None,
    *,
    found: Sequence[AutoValue] = (),
) -> list[PlanCheck]:
    """Returns the check of a trainer against its device; empty if the device is unknown or `--no-plan` is given.

    Args:
        main: the object that is about to be run.
        run_dir: the run folder.
        invocation: the command line of the run.
        configure: the function that declares the options of its command.
        member: the current process as a `Peer` of several processes, or None if there is only one process.
        found: the numbers that were found for values `auto`.
    """
    options = invocation.options
    if options.no_plan or not callable(getattr(main, "train", None)):
        return []
    device = _device(main, invocation, member)
    if device is None:
        return []
    words = [*_words(invocation, configure, member, device, found), "--no-check", "--json"]
    check = begin_plan_check(words, device, run_dir, print_note)
    is_asked = options.hardware is not None or options.free is not None
    check.wait(None if is_asked else PATIENCE_SECONDS)
    return [check]


def note_ways_out(
    error: BaseException,
    main: object,
    run_dir: str,
    invocation: Invocation,
    configure: Configure,
    member: Any = None,
    *,
    found: Sequence[AutoValue] = (),
    checks: Sequence[PlanCheck],
) -> None:
    """Adds a note to an out-of-memory error, see `note_largest_row`.

    Args:
        error: the error.
        main: the object that was run; None if its construction failed.
        run_dir: the run folder.
        invocation: the command line of the run.
        configure: the function that declares the options of its command.
        member: the current process as a `Peer` of several processes, or None if there is only one process.
        found: the numbers that were found for values `auto`.
        checks: the plan that this process has begun, if it has.
    """
    until = time.monotonic() + WAYS_SECONDS
    for check in checks:
        check.wait_for_ways(WAYS_SECONDS)
    device = _device(main, invocation, member)
    # The main process plans when it has built the run; one that failed to build it waits for nothing.
    is_elsewhere = member is not None and not member.is_main and not invocation.options.no_plan and device is not None
    seconds = until - time.monotonic()
    note_largest_row(
        error,
        run_dir,
        command=_words(invocation, configure, member, device, found),
        patience=seconds if is_elsewhere and main is not None else 0.0,
        seconds=seconds,
        is_first=partial(_is_first, member),
    )


def _is_first(member: Any) -> bool:
    """Returns whether this process is the first one of the run that asks."""
    if member is None or member.store is None:
        return True
    try:
        return bool(member.store.add("ways_out", 1) == 1)
    except RuntimeError:
        # The process that hosts the store has ended, and so has the run.
        return False


def _device(main: object, invocation: Invocation, member: Any) -> Device | None:
    """Returns the device that the run is compared with; None if it is unknown."""
    named, free = invocation.options.hardware, invocation.options.free
    if named is None and getattr(getattr(main, "args", None), "use_cpu", False):
        return free_on(None, free, "cpu")
    return free_on(device_of(named, gpus=member.facts.local_world_size if member is not None else 1), free, None)


def _words(
    invocation: Invocation, configure: Configure, member: Any, device: Device | None, found: Sequence[AutoValue]
) -> list[str]:
    """Returns the words of the command that plans the run on its device."""
    world, local = (member.facts.world_size, member.facts.local_world_size) if member is not None else (1, 1)
    hardware = invocation.options.hardware
    if hardware is None and device is not None and device.hardware.name in hardware_names():
        hardware = device.hardware.name
    kind = "cpu" if device is None else device.type
    sizes = {"gpus": local, "nodes": world // local}
    words = plan_words(invocation.arguments, configure, **sizes, device_type=kind, hardware=hardware)
    return [*words, *(word for value in found for word in ("--set", f"{value.path}={value.text}"))]


def plan_words(
    arguments: Sequence[str],
    configure: Configure,
    *,
    gpus: int,
    nodes: int,
    device_type: str,
    hardware: str | None = None,
) -> list[str]:
    """Returns the words of the `fgcli plan` command for the run that a `fgcli train` command starts.

    Args:
        arguments: the words of the train command, without the program name.
        configure: the function that declares the options of the train command.
        gpus: the number of processes on each machine.
        nodes: the number of machines.
        device_type: the kind of device, which the planning process cannot see.
        hardware: the device of each process, for the time of a step; None if no rates of it are known.

    Example:
        >>> from forgather.cli.commands.train import configure
        >>> words = ["-t", "a.yaml", "train", "--resume", "auto", "--lr", "3"]
        >>> plan_words(words, configure, gpus=2, nodes=1, device_type="cuda")
        ['-t', 'a.yaml', 'plan', '--lr', '3', '--gpus', '2', '--nodes', '1', '--device-type', 'cuda']
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-p", "--project")
    parser.add_argument("-t", "--config")
    parser.add_argument("command")
    configure(parser)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    known, declared = parser.parse_known_args(list(arguments[:end]))
    words = [word for option in (("-p", known.project), ("-t", known.config)) if option[1] for word in option]
    changes = [word for path, text in known.overrides or () for word in ("--set", f"{path}={text}")]
    sizes = ["--gpus", str(gpus), "--nodes", str(nodes), "--device-type", device_type]
    named = ["--hardware", hardware] if hardware else []
    return [*words, "plan", *declared, *changes, *sizes, *named]
