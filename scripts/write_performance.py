"""Writes the table of docs/performance.md, what a step costs, and prints it.

    python scripts/write_performance.py build/performance                 # as `make bench` does
    python scripts/write_performance.py build/performance build/gpu.json  # with those of `gpu.py compare`

Reads the reports that the tests of its rows wrote with `--full --all-cells --junitxml`; `make bench` runs all of it.
It also reads `bench.json` there, the figures of `scripts/bench/run.py`. With `--pieces`, it prints the name of each
piece and the words for pytest. A failed test ends it with an error, and nothing is written. A row without a report is
"not measured in this run"; rows that need a GPU are "not measured".
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.bench.gpu_compare import KIND, LOOPS, ratios  # noqa: E402
from scripts.reports import Figure, Row, figures_table, passed, print_pieces, write  # noqa: E402

PAGE = ROOT / "docs" / "performance.md"
RANKS = "tests/ml/distributed/"
ROWS = (
    Row(
        "Reads of the host in a step between log lines, every strategy",
        "0",
        (f"{RANKS}test_reads.py::test_a_step_reads_and_sends_what_the_table_says",),
        (Figure("step_reads", "{:.0f}"), Figure("fp16_reads", "with fp16 {:.0f}")),
    ),
    Row(
        "Collectives of a step beyond the engine's own",
        "1",
        (f"{RANKS}test_reads.py::test_a_step_reads_and_sends_what_the_table_says",),
        (Figure("step_collectives", "at most {:.0f}"), Figure("fp16_collectives", "FSDP2 with fp16 {:.0f}")),
    ),
    Row(
        "Bytes per parameter that are alive after a forward pass of FSDP2 in bf16, beyond the shard and the head",
        "<= 0.05",
        (
            "tests/ml/strategy/test_end_units.py::test_little_more_than_the_unit_in_use_is_gathered_after_a_forward_pass",
        ),
        (Figure("bytes_per_parameter", "{:.3f}"), Figure("in_the_root", "with both ends in the root {:.2f}")),
    ),
    Row(
        "Peak bytes per logit of the token loss",
        "<= 2",
        ("tests/ml/test_loss_memory.py::test_the_peak_is_at_most_two_bytes_a_logit_where_logits_take_twelve",),
        (Figure("bytes_per_logit", "{:.2f}"), Figure("with_logits", "with logits {:.1f}")),
    ),
    Row(
        "Rows of a stream that are read for each row used, in the first 320 rows of a rank, of 1, 8, 64 and 512",
        "1, and what is read ahead",
        ("tests/ml/test_virtual_streams.py::test_rows_read_per_row_used",),
        (Figure("read_per_used", "{:.2f}"),),
    ),
    Row(
        "The same on a machine whose processes are more than the streams: one of them reads and deals the rows out",
        "1",
        (f"{RANKS}test_row_dispatch.py::test_each_machine_reads_a_row_once_and_the_steps_are_those_of_one_process",),
        (Figure("read_per_used_on_a_host", "{:.2f}"),),
    ),
    Row(
        "Memory of the first weights of 220 million parameters, on each of 4 ranks",
        "<= 1.3x its shard",
        (f"{RANKS}test_first_weights.py::test_a_rank_holds_little_more_than_its_slices_of_220_million_parameters",),
        (Figure("of_its_shard", "{:.2f}x"),),
    ),
    Row(
        "The same before a resume, which makes no first weights",
        "<= 1.3x its shard",
        (f"{RANKS}test_first_weights.py::test_a_rank_holds_its_slices_alone_before_a_resume",),
        (Figure("of_its_shard", "{:.2f}x"),),
    ),
    Row(
        "A shuffle of a billion rows",
        "<= 64 MB, first row in <= 50 ms",
        (f"{RANKS}test_row_order.py::test_a_billion_rows_have_a_first_row_at_once_and_no_list",),
        (Figure("peak_bytes", "{:.1f} MB", 1e-6), Figure("first_seconds", "first row in {:.1f} ms", 1e3)),
    ),
    Row(
        "Sockets of a rank among 1,024, and messages of a sum and a broadcast (simulated; 8 and 64 ranks need fewer)",
        "grow with the logarithm",
        (f"{RANKS}test_host_tree.py::test_sockets_and_messages_grow_with_the_logarithm",),
        (Figure("sockets", "{:.0f} sockets"), Figure("messages", "{:.0f} messages")),
    ),
)
PIECES = {"steps": " ".join(dict.fromkeys(test for row in ROWS for test in row.tests))}
PYTHON = ("Python of a step beyond a plain loop of the same torch calls", "<= 0.15 ms CPU, 0.3 with metrics")
ON_GPU = (
    (
        "124 M, 1B and 8B on one GPU, 2,048 and 8,192 tokens, packed and not: tokens/s beside transformers.Trainer",
        ">= 1.15x",
    ),
    ("the same beside a plain loop with the same kernels", ">= 0.97x"),
    ("the same: MFU at 1B", ">= 50 %"),
    ("the same: peak of memory beside transformers.Trainer", "<= 0.7x"),
)


def _with_error(row):
    """Returns the value of a row, with its standard error."""
    return f"{row['value']:.2f} ± {row['error']:.2f}"


def python_row(file):
    """Returns the row of the Python of a step for the figures of the benchmarks."""
    what, reach = PYTHON
    rows = json.loads(file.read_text("utf-8")) if file.is_file() else []
    own = {(row["strategy"], row["metrics"]): row for row in rows if "strategy" in row}
    if not own:
        return f"| {what} | {reach} | not measured | | |"
    texts = [
        f"{strategy} {_with_error(row)}, {_with_error(own[strategy, True])} with metrics (by hand {row['by_hand']:.1f})"
        for (strategy, has_metrics), row in own.items()
        if not has_metrics
    ]
    load = max(row["load"] for row in own.values())
    texts.append(f"{load:g} processes a core ran")
    return f"| {what} | {reach} | {'; '.join(texts)} | {len(own)} | `scripts/bench/python_per_step.py` |"


def gpu_rows(file):
    """Yields the rows that need a GPU, for the figures of `scripts/bench/gpu.py compare`."""
    figures = json.loads(file.read_text("utf-8")) if file and file.is_file() else {}
    # Tiny models on the CPU only prove the script.
    kinds = [kind for kind in figures if kind.startswith(KIND) and "CPU" not in kind]
    found = figures[kinds[-1]] if kinds else {}
    at_1b = [one.get("mfu") for name, one in found.items() if name.startswith("1B") and name.endswith(LOOPS[0])]
    of_each = (
        ratios(found, "transformers", "tokens_per_second"),
        ratios(found, "plain", "tokens_per_second"),
        [mfu for mfu in at_1b if mfu is not None],
        ratios(found, "transformers", "peak_bytes"),
    )
    for (what, reach), values in zip(ON_GPU, of_each, strict=True):
        if not values:
            yield f"| {what} | {reach} | not measured | | |"
            continue
        unit = "{:.0%}" if "MFU" in what else "{:.2f}x"
        texts = " to ".join(dict.fromkeys(unit.format(value) for value in (min(values), max(values))))
        device = kinds[-1].removeprefix(KIND)
        yield f"| {what} | {reach} | {texts} on one {device} | {len(values)} | `scripts/bench/gpu.py compare` |"


def table(cases, bench=Path(), gpu=None):
    """Returns the table for the test cases of all reports, and files with figures of benchmarks and of a GPU."""
    return "\n".join([figures_table(ROWS, cases), python_row(bench), *gpu_rows(gpu)])


def main(folder=ROOT / "build" / "performance", gpu=ROOT / "build" / "gpu.json"):
    """Writes the table for a folder of reports, and the figures of a GPU if there are some."""
    write(PAGE, table(passed(folder), Path(folder) / "bench.json", Path(gpu)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--pieces"]:
        print_pieces(PIECES)
    else:
        main(*sys.argv[1:])
