"""`fgcli select`: hardware and a strategy for a model, from its name."""

from __future__ import annotations

import argparse
import warnings

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output
from forgather.cli.output import write_json, write_text
from forgather.cli.selection_output import selection_lines
from forgather.planner.selection import HardwareSelector

DESCRIPTION = """Select hardware, a strategy and a batch for a well-known model, before there is a config: all ways to
train it are computed by published formulas, and the fastest one that fits is printed. Nothing is downloaded or
built. For a config, 'fgcli plan' traces the model itself and is closer. The exit status is 1 if the training fits on
none of the hardware, and after an error."""
EXAMPLES = """examples:
  fgcli select --model-family text_generation --model-name llama-7b --batch-size 16 --distributed --gpu-count 8
  fgcli select --model-family text_generation --model-name opt-6.7b --distributed --gpu-count 4 --max-memory-gb 16
  fgcli select --model-family embedding --model-name bert-base-uncased --json
  fgcli benchmark --list-models      the names of all models"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument(
        "--model-family", required=True, metavar="FAMILY", help="such as text_generation, embedding, vision"
    )
    parser.add_argument("--model-name", required=True, metavar="NAME", help="name of the model on the Hugging Face Hub")
    parser.add_argument("--mode", choices=("training",), default="training", help="what the hardware is for")
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="rows of an update on each GPU (default: 1)"
    )
    parser.add_argument("--distributed", action="store_true", help="use all of --gpu-count; without it, one GPU")
    parser.add_argument("--gpu-count", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument(
        "--max-memory-gb", type=float, metavar="GB", help="memory of each GPU (default: of the hardware)"
    )
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a row (default: at most 2,048)")
    parser.add_argument(
        "--hardware", nargs="+", metavar="NAME", help="kinds or devices to choose from (default: cuda rocm cpu)"
    )
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: selects, prints the selection, and returns the exit status."""
    options = invocation.options
    with warnings.catch_warnings():
        # The text says how to pass the type on.
        warnings.simplefilter("ignore", UserWarning)
        found = HardwareSelector().select_hardware_for_task(
            options.model_family,
            options.model_name,
            options.mode,
            options.batch_size,
            options.distributed,
            options.gpu_count,
            max_memory_gb=options.max_memory_gb,
            available_hardware=options.hardware,
            sequence_length=options.sequence_length,
        )
    if options.json:
        write_json(found, options.output)
    else:
        write_text("\n".join(selection_lines(found)), options.output)
    return 0
