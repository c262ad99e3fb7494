"""Writes the table of measured guarantees into docs/guarantees.md, and prints it.

    python scripts/write_guarantees.py [build/figures.json]

Reads the figures that `pytest tests/reliability --full` and `scripts/bench/checkpoint_save.py --figures` wrote.
`make test-reliability` runs all three.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reports import write  # noqa: E402

PAGE = ROOT / "docs" / "guarantees.md"
# Maps the id of each guarantee to its promise and the extent of its test.
GUARANTEES = {
    "R1": (
        "A checkpoint is complete or invisible.",
        "a kill at every file operation of synchronous, asynchronous, best-and-retention and export saves; with two "
        "ranks, of pipeline, FSDP2 and DDP saves on each rank",
    ),
    "R2": (
        "It survives a loss of power as well as a killed process.",
        "at least 1,000 states in which a disk may be left, rebuilt from the operations; a run resumes from each",
    ),
    "R3": (
        "After `kill -9` at any moment, the resumed run ends with the same bits.",
        "200 kills at random moments, and 10 kills of the real command",
    ),
    "R4": (
        "Resume is exact.",
        "144 combinations of save position, strategy, accumulation and kind of data; every tensor, optimizer, "
        "schedule, random state and loss is compared; with a negative control",
    ),
    "R5": (
        "Each sample is seen once per epoch, across resumes.",
        "interrupts around the ends of epochs; 0, 1 and 3 workers",
    ),
    "R6": (
        "Corruption is detected and reported; a resumed run falls back to an earlier checkpoint and says so.",
        "500 flipped bits, 500 cut files, 500 zeroed blocks; missing, extra and swapped files",
    ),
    "R7": ("An incomplete training state is an error.", "each part of a checkpoint removed in turn"),
    "R8": (
        "A failed save is reported within one step, and leaves the last good checkpoint untouched.",
        "no space, an I/O error or no permission at every file operation; `/dev/full`, a file size limit, a small disk",
    ),
    "R9": (
        "Retention never removes the only good checkpoint, the best one, or one that is being written.",
        "500 random sequences of saves, failures and removals",
    ),
    "R10": ("Disk space is checked before the first step.", "predicted and written bytes of three models"),
    "R11": (
        "A signal on any rank in any phase leads to one checkpoint and exit status 143.",
        "eight phases, ranks 0 and 1",
    ),
    "R12": ("One failing rank ends the job, and the first cause is reported.", "24 cases, ranks 0 and 1"),
    "R13": (
        "A hang is detected, explained and ended.",
        "a collective that one rank skips, with the stacks of all ranks",
    ),
    "R14": (
        "Steps that are not finite, or spike, are treated by the selected policy.",
        "stop, skip and rewind; bad on one rank only",
    ),
    "R15": ("The number of ranks does not change the global batches.", "1 to 16 ranks, 0 to 4 workers"),
    "R16": ("The same config run twice gives the same losses.", "two runs, compared byte by byte"),
    "R17": ("A run survives many failures in a row.", "55 mixed faults in one run, five of them on the real command"),
    "R18": (
        "An incomplete last line is repaired; memory stays flat.",
        "a cut at every byte of the last record; 10,000 steps",
    ),
    "C1": (
        "A number in a checkpoint is used only if the run could have written it.",
        "each number of the state replaced by four that no run writes",
    ),
    "S6": ("Loading a checkpoint never unpickles.", "payloads in every place where a file can hide one"),
    "S11": (
        "Any input gives a result or a located error.",
        "checkpoints whose contents were changed and whose digests fit the change",
    ),
    "layouts": (
        "A run saved under one layout of processes can be resumed under any other.",
        "all 256 pairs of one process, DDP, FSDP2 of 2 and 4, hybrid shards, tensor parallel (alone and with FSDP2), "
        "context parallel (alone, on a ring, with FSDP2), pipeline (alone, with replicas, with FSDP2), ZeRO 1 to 3: "
        "weights and optimizer state after three steps",
    ),
    "load": (
        "To load a checkpoint, a rank needs memory for its own part only.",
        "1 GiB of weights and moments, four ranks of FSDP2",
    ),
    "stall": (
        "An asynchronous save blocks training for less time than `torch.save`.",
        "1.4 GiB, median of five in one run",
    ),
    "digests": ("Digests cost little.", "the same save with and without digests"),
}
HEAD = "| id | promise | test | measured | command |\n|---|---|---|---|---|"


def table(figures):
    """Returns the table, with the figures of all tests of a guarantee in one row."""
    return "\n".join([HEAD, *(_row(name, figures[name]) for name in GUARANTEES if name in figures)])


def _row(name, noted):
    promise, reach = GUARANTEES[name]
    files = sorted({test.partition("::")[0] for test in noted})
    measured = "; ".join(text for _, text in sorted(noted.items()))
    is_bench = all(file.startswith("scripts/") for file in files)
    command = f"python {' '.join(files)}" if is_bench else f"pytest {' '.join(files)} --full"
    return f"| {name} | {promise} | {reach} | {measured} | `{command}` |"


def main(file=ROOT / "build" / "figures.json"):
    """Writes the table for a file of figures."""
    figures = json.loads(Path(file).read_text(encoding="utf-8"))
    if unknown := sorted(set(figures) - set(GUARANTEES)):
        sys.exit(f"{file}: no guarantee is called {', '.join(unknown)}")
    write(PAGE, table(figures))
    if missing := [name for name in GUARANTEES if name not in figures]:
        print(f"nothing was measured for {', '.join(missing)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
