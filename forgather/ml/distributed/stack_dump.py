"""Stack dumps for hangs: the stack, step and last collective of every rank, and the rank that the others wait for.

The functions take the state of each rank as plain data, and return a full report or a one-line summary. The rank that
the others wait for is the one that has started fewer collectives than the others.
"""

from __future__ import annotations

import json
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch._C._distributed_c10d as c10d

from forgather.ml.distributed.phase import current_phase

# Frames of the wait itself; the frame before them is the call that a reader is looking for.
_INSIDE = ("torch/distributed/", "torch/utils/_contextlib", "threading.py")


@dataclass(frozen=True)
class Collective:
    """The last collective that a process started.

    Args:
        name: the name of the operation, for example "all_reduce".
        number: the sequence number of the collective in its process group, counted from 1.
        shapes: the shapes of the input tensors.
        group: the name of the process group.
    """

    name: str
    number: int
    shapes: list[list[int]]
    group: str

    def __str__(self) -> str:
        return f"{self.name} number {self.number} of shape {self.shapes} over {self.group}"


def last_collective() -> Collective | None:
    """Returns the last collective that this process started, as recorded by torch's flight recorder.

    Returns None if no collective was recorded, or if this build of torch has no flight recorder.
    """
    # A private function that some builds of torch do not have; a hang report without it is still useful.
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        entries = json.loads(dump() or "{}").get("entries") or []
    except (RuntimeError, ValueError):
        return None
    if not entries:
        return None
    # The recorder has the oldest entry first.
    last = entries[-1]
    name = str(last.get("profiling_name", "")).rpartition(":")[2]
    group = (last.get("process_group") or ["", ""])[-1]
    return Collective(name, int(last.get("collective_seq_id", 0)), last.get("input_sizes") or [], group)


def main_thread_stack() -> list[str]:
    """Returns the stack of the main thread as lines "FILE:LINE in FUNCTION", outermost frame first."""
    # From the watchdog thread: the main thread is blocked in the collective that hangs.
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    return [f"{one.filename}:{one.lineno} in {one.name}" for one in traceback.extract_stack(frame)] if frame else []


def local_state() -> dict[str, Any]:
    """Returns the step, phase, last collective and stack of this process as JSON-compatible data."""
    collective = last_collective()
    where = current_phase()
    return {
        "step": where.step,
        "phase": where.phase,
        "collective": None if collective is None else collective.__dict__,
        "stack": main_thread_stack(),
    }


def format_report(states: Mapping[int, Mapping[str, Any] | None]) -> list[str]:
    """Returns the lines of a report on all ranks.

    Args:
        states: the `local_state` of each rank, or None for a rank that did not answer.
    """
    lines = []
    for rank, state in sorted(states.items()):
        if state is None:
            lines += [f"rank {rank}: did not answer", ""]
            continue
        step = "" if state["step"] is None else f"step {state['step']}, "
        lines.append(f"rank {rank}: {step}{state['phase'] or 'in no known phase'}")
        collective = state["collective"]
        lines.append(f"  last collective: {Collective(**collective) if collective else 'none'}")
        lines += [f"    {frame}" for frame in state["stack"]]
        lines.append("")
    return lines


def summarize_hang(states: Mapping[int, Mapping[str, Any] | None]) -> str:
    """Returns a one-line summary of a hang.

    Args:
        states: the `local_state` of each rank, or None for a rank that did not answer.
    """
    missing = missing_ranks(states)
    different = mismatched_collectives(states)
    # All ranks have started as many collectives, but not the same ones: the program differs between ranks.
    if not missing and different:
        each = ", ".join(f"rank {rank} in {name}" for rank, name in sorted(different.items())[:4])
        return f"the ranks wait in different collectives, because one of them started one more or one less: {each}"
    if not missing:
        return "all ranks wait in the same collective: check the network"
    rank = missing[0]
    state = states[rank]
    others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    if state is None:
        return f"the others wait for rank {rank}{others}, which did not answer"
    step = "" if state["step"] is None else f"step {state['step']}, "
    doing = f"{step}{state['phase']}".rstrip(", ")
    return f"the others wait for rank {rank}{others}: {doing or 'running'}, at {innermost_own_frame(state)}"


def missing_ranks(states: Mapping[int, Mapping[str, Any] | None]) -> list[int]:
    """Returns the ranks that the others wait for: those that did not answer or have started fewer collectives."""
    silent = [rank for rank, state in states.items() if state is None]
    counts = {rank: _count(state) for rank, state in states.items() if state is not None}
    most = max(counts.values(), default=0)
    return sorted([*silent, *(rank for rank, count in counts.items() if count < most)])


def mismatched_collectives(states: Mapping[int, Mapping[str, Any] | None]) -> dict[int, str]:
    """Returns the last collective of each rank if the ranks wait in different collectives, else an empty dict.

    The result is also empty if a rank waits in a send or receive, because these two belong to one exchange.
    """
    last = {rank: state["collective"] for rank, state in states.items() if state and state["collective"]}
    # Between pipeline stages one rank sends while its neighbor receives.
    if any(one["name"].startswith(("send", "recv", "coalesced")) for one in last.values()):
        return {}
    found = {rank: f"{one['name']} of shape {one['shapes']}" for rank, one in last.items()}
    return found if len(set(found.values())) > 1 else {}


def _count(state: Mapping[str, Any]) -> int:
    return int(state["collective"]["number"]) if state["collective"] else 0


def innermost_own_frame(state: Mapping[str, Any]) -> str:
    """Returns the innermost frame of a stack that is not part of torch's own wait, or "" if there is none."""
    frames = [frame for frame in state["stack"] if not any(part in frame for part in _INSIDE)]
    return str(frames[-1]) if frames else ""
