"""Writes the table of docs/performance.md, what a step costs, and prints it.

    python scripts/write_performance.py build/performance

Reads the reports that the tests of its rows wrote with `--full --all-cells --junitxml`; `make bench` runs all of it.
With `--pieces`, it prints the name of each piece and the words for pytest. A failed test ends it with an error, and
nothing is written. A row without a report is "not measured in this run"; rows that need a GPU are "not measured".
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

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
        "Memory of the first weights of 220 million parameters, on each of 4 ranks",
        "<= 1.3x its shard",
        (f"{RANKS}test_first_weights.py::test_a_rank_holds_little_more_than_its_slices_of_220_million_parameters",),
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
NOT_MEASURED = (
    ("Python of a step beyond a plain loop of the same torch calls", "<= 0.15 ms CPU, 0.3 with metrics"),
    (
        "124 M, 1B and 8B on one GPU, 2,048 and 8,192 tokens, packed and not: tokens/s beside transformers.Trainer",
        ">= 1.15x",
    ),
    ("the same beside a plain loop with the same kernels", ">= 0.97x"),
    ("the same: MFU at 1B", ">= 50 %"),
    ("the same: peak of memory beside transformers.Trainer", "<= 0.7x"),
)


def table(cases):
    """Returns the table for the test cases of all reports."""
    return "\n".join(
        [figures_table(ROWS, cases), *(f"| {what} | {reach} | not measured | | |" for what, reach in NOT_MEASURED)]
    )


def main(folder=ROOT / "build" / "performance"):
    """Writes the table for a folder of reports."""
    write(PAGE, table(passed(folder)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--pieces"]:
        print_pieces(PIECES)
    else:
        main(*sys.argv[1:])
