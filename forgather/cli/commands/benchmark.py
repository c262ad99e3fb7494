"""`fgcli benchmark`: writes which cells of hardware and strategy a model is measured in, as a JSON file."""

from __future__ import annotations

import argparse

from forgather.cli.invocation import Invocation
from forgather.cli.options import add_json, add_output
from forgather.cli.output import print_note, write_json, write_text
from forgather.cli.selection_output import benchmark_lines
from forgather.errors import ProjectError
from forgather.planner.benchmark import benchmark
from forgather.planner.model_shapes import model_shape, shape_names

DESCRIPTION = """Write a benchmark of a well-known model: one cell for each hardware, number of GPUs and strategy, each
with the settings that fit and the memory that is planned. Without --output, the cells are printed as a table."""
EXAMPLES = """examples:
  fgcli benchmark --list-models
  fgcli benchmark --model bert-base-uncased --distributed --max-gpus 4 --output bert_benchmark.json
  fgcli benchmark --model t5-small --hardware cuda rocm --distributed --max-gpus 8"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("--list-models", action="store_true", help="list the models that can be named")
    parser.add_argument("--model", metavar="NAME", help="the model to measure")
    parser.add_argument(
        "--hardware", nargs="+", default=["cuda"], metavar="NAME", help="kinds or devices (default: cuda)"
    )
    parser.add_argument("--distributed", action="store_true", help="measure several GPUs, too")
    parser.add_argument("--max-gpus", type=int, default=8, metavar="N", help="most GPUs of a cell (default: 8)")
    parser.add_argument(
        "--batch-size", type=int, default=8, metavar="N", help="rows of an update on each GPU (default: 8)"
    )
    parser.add_argument(
        "--max-memory-gb", type=float, metavar="GB", help="memory of each GPU (default: of the hardware)"
    )
    parser.add_argument("--sequence-length", type=int, metavar="N", help="tokens of a row (default: at most 2,048)")
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: lists models, or writes a benchmark, and returns the exit status."""
    options = invocation.options
    if options.list_models:
        shapes = [model_shape(name) for name in shape_names()]
        if options.json:
            write_json({shape.name: {"family": shape.family, "parameters": shape.parameters} for shape in shapes})
        else:
            write_text("\n".join(f"{shape.name:<40}{shape.parameters:>17,}  {shape.family}" for shape in shapes))
        return 0
    if options.model is None:
        raise ProjectError("the benchmark needs a model", code="FG998", hint="--model NAME; --list-models lists them")
    found = benchmark(
        options.model,
        hardware=options.hardware,
        distributed=options.distributed,
        max_gpus=options.max_gpus,
        batch_size=options.batch_size,
        max_memory_gb=options.max_memory_gb,
        sequence_length=options.sequence_length,
    )
    if options.json or options.output:
        write_json(found, options.output)
    else:
        write_text("\n".join(benchmark_lines(found["cells"])))
    if options.output:
        print_note(f"{len(found['cells'])} cells")
    return 0
