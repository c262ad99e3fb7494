"""The plan that is computed while a run starts, see `forgather.launch.plan_check`.

Takes the command line of the run; gives the command line that plans the same config, and the check that executes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from forgather.cli.invocation import Invocation
from forgather.cli.output import print_note
from forgather.launch.auto_values import AutoValue
from forgather.launch.plan_check import PATIENCE_SECONDS, PlanCheck, begin_plan_check
from forgather.launch.planning import device_of
from forgather.planner.hardware import hardware_names

Configure = Callable[[argparse.ArgumentParser], None]


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
    if options.hardware is None and getattr(getattr(main, "args", None), "use_cpu", False):
        return []
    world, local = (member.facts.world_size, member.facts.local_world_size) if member is not None else (1, 1)
    device = device_of(options.hardware, gpus=local)
    if device is None:
        return []
    known = options.hardware or (device.hardware.name if device.hardware.name in hardware_names() else None)
    sizes = {"gpus": local, "nodes": world // local}
    words = plan_words(invocation.arguments, configure, **sizes, device_type=device.type, hardware=known)
    check = begin_plan_check(words, device, run_dir, print_note)
    check.wait(PATIENCE_SECONDS if options.hardware is None else None)
    return [check]


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
        ['-t', 'a.yaml', 'plan', '--lr', '3', '--json', '--gpus', '2', '--nodes', '1', '--device-type', 'cuda']
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
    return [*words, "plan", *declared, *changes, "--json", *sizes, *named]
