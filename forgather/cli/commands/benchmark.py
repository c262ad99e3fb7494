"""`fgcli benchmark`: writes which cells of hardware and strategy a model is measured in, and measures them."""

from __future__ import annotations

import argparse

from forgather.cli.invocation import Invocation
from forgather.cli.options import a_time, add_json, add_output
from forgather.cli.output import print_note, write_json, write_text
from forgather.cli.selection_output import benchmark_lines, result_csv, result_lines
from forgather.errors import ProjectError
from forgather.launch.benchmark_run import run_cells
from forgather.planner.benchmark import benchmark
from forgather.planner.benchmark_results import Row, Status, measured_rows, read_benchmark, results_file, write_rows
from forgather.planner.model_shapes import model_shape, shape_names

EXECUTES = True
DESCRIPTION = """Write a benchmark of a well-known model: one cell for each hardware, number of GPUs and strategy, each
with the settings that fit and the memory that is planned. Without --output, the cells are printed as a table.
'fgcli benchmark run FILE' measures the cells of such a file on this machine, with random weights and random rows, each
cell in processes of its own: the time of a step, tokens per second, and the peak of the tensors, next to the planned
figures. A cell that does not fit or that fails is a row with its reason. What was measured is kept next to the file, in
FILE.results.json: after Ctrl-C, the same command goes on with the cells that are left."""
EXAMPLES = """examples:
  fgcli benchmark --list-models
  fgcli benchmark --model bert-base-uncased --distributed --max-gpus 4 --output bert_benchmark.json
  fgcli benchmark --model t5-small --hardware cuda rocm --distributed --max-gpus 8
  fgcli benchmark run bert_benchmark.json
  fgcli benchmark run bert_benchmark.json --use-cpu --csv -o bert.csv"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the command-line arguments of this command to its parser."""
    parser.add_argument("words", nargs="*", metavar="run FILE", help="measure the cells of a file")
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
    parser.add_argument(
        "--use-cpu", action="store_true", help="with run: measure on the CPU, whatever hardware a cell is planned for"
    )
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="with run: steps to measure (default: 5)")
    parser.add_argument(
        "--timeout",
        type=a_time,
        default=600,
        metavar="S",
        help="with run: seconds for one cell (default: 600)",
    )
    parser.add_argument("--csv", action="store_true", help="with run: print the table as CSV")
    add_json(parser)
    add_output(parser)


def run(invocation: Invocation) -> int:
    """Runs the command: lists models, writes a benchmark, or measures one, and returns the exit status."""
    options = invocation.options
    if options.words:
        return _measure(options)
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


def _measure(options: argparse.Namespace) -> int:
    """Measures the cells of a file, prints their table, and returns 0 if at least one cell was measured."""
    if options.words[0] != "run" or len(options.words) != 2:
        raise ProjectError(
            f"'fgcli benchmark {' '.join(options.words)}' has no meaning", code="FG998", hint="fgcli benchmark run FILE"
        )
    for name, value in (("--steps", options.steps), ("--timeout", options.timeout)):
        if not value > 0:
            raise ProjectError(f"{name} is {value:g}", code="FG998", hint="give a number above 0")
    file = options.words[1]
    asked = read_benchmark(file)
    kept = results_file(file)
    before = measured_rows(kept)
    cells = asked["cells"]
    rows: list[Row] = []
    try:
        for row in run_cells(
            cells,
            before,
            use_cpu=options.use_cpu,
            steps=options.steps,
            timeout=options.timeout,
            announce=lambda name: print_note(f"{len(rows) + 1} of {len(cells)}: {name}"),
        ):
            rows.append(row)
            # Rows of cells that are yet to come stay in the file, and so do those that were measured in another way.
            others = [one for one in before if all((one.cell, one.use_cpu) != (row.cell, row.use_cpu) for row in rows)]
            write_rows(kept, asked["model"], [*rows, *others])
    finally:
        if options.json:
            write_json({"model": asked["model"], "rows": [row.as_data() for row in rows]}, options.output)
        elif options.csv:
            write_text(result_csv(rows), options.output)
        elif rows:
            write_text("\n".join(result_lines(rows)), options.output)
        if len(rows) < len(cells):
            print_note(f"{len(rows)} of {len(cells)} cells; the same command goes on with the others")
    return 0 if any(row.status is Status.MEASURED for row in rows) else 1
