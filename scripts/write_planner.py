"""Writes the tables of docs/planner.md, how far plans are from measurements, and prints them.

    python scripts/write_planner.py build/planner

Reads the reports that the tests of the planner wrote with `--full --junitxml`, one for each piece; `make test-planner`
runs all of it. With `--pieces`, it prints the name of each piece and the words for pytest. A failed test ends it with
an error, and nothing is written. A cell that is known to be outside of its reach is in the table, with the reason, and
one that no report has is "not measured in this run".
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reports import function, parameters, passed, print_pieces, properties, write  # noqa: E402
from tests.ml.planner.cells import FULL, GROUPS, QUICK  # noqa: E402
from tests.ml.planner.model_cells import CELLS, is_held_out  # noqa: E402

PAGE = ROOT / "docs" / "planner.md"
RECORD = ROOT / "tests" / "ml" / "recorded" / "memory_estimates.json"
PLANNER = "tests/ml/planner/"
PEAKS = "test_the_traced_peak_is_the_measured_one"
OTHERS = ("accelerate", "DeepSpeed", "published formulas")
NEAREST, THIRD = 0.95, 1 / 3
PIECES = {
    **{group.lower(): f"{PLANNER}test_rank_trace.py -k {group}-" for group in GROUPS},
    "depth": f"{PLANNER}test_rank_trace.py -k deep_model",
    "large": f"{PLANNER}test_large_plans.py",
    "flops": "tests/ml/test_counted_flops.py",
    **{f"rows{part}": f"{PLANNER}test_row_limit.py -k part{part}-" for part in (1, 2, 3)},
    "engine": f"{PLANNER}test_engine_traces.py {PLANNER}test_layout_traces.py {PLANNER}test_planned_batches.py "
    f"{PLANNER}test_masked_rows.py {PLANNER}test_optimizer_path.py "
    f"{PLANNER}test_convolutions.py {PLANNER}test_gpu_attention.py {PLANNER}test_budget_plans.py",
    "gpus": f"{PLANNER}test_gpu_figures.py {PLANNER}test_gpu_operators.py {PLANNER}test_older_torch.py",
    "auto": f"{PLANNER}test_auto_rows.py",
    "batches": f"{PLANNER}test_batch_plans.py",
    "drawn": f"{PLANNER}test_pipeline_plans.py",
    "phases": f"{PLANNER}test_phase_traces.py {PLANNER}test_formulas_traced.py {PLANNER}test_untraceable.py "
    f"{PLANNER}test_remembered_fakes.py {PLANNER}test_peaks.py {PLANNER}test_average.py",
    "lengths": f"{PLANNER}test_sequence_plans.py tests/ml/test_plan_grid.py",
    "tasks": f"{PLANNER}test_task_traces.py {PLANNER}test_transformers_steps.py",
    "times": f"{PLANNER}test_step_times.py {PLANNER}test_calibration.py {PLANNER}test_split_search.py "
    f"{PLANNER}test_library_kernels.py",
    "found": "tests/ml/test_plan_find.py tests/ml/test_plan_command.py tests/ml/test_pipeline_search.py",
}
"""What runs in one go: a few minutes on an idle machine of two cores."""
ROWS = (
    ("Extrapolated from two shallow models, against the whole model traced", "<= 0.1 %", "test_a_deep_model"),
    ("Planning takes, imports not counted", "8B: 8 CPU s; 70B: 15 CPU s, 1 GB", "test_a_large_model"),
    (
        "`--find` ranks an 8B-shaped model on 8 devices and traces the first five in full, imports not counted",
        ">= 100 cells, <= 60 CPU s",
        "test_a_ranking_of_a_large",
    ),
    ("FLOPs of a step, against the closed form, attention included", "<= 0.5 %", "test_the_flops_of_a_family"),
    (
        "Batch finder: the answer is below the limit, and one more row is not",
        "30 of 30, <= 3 traces each",
        "test_the_answer_fits",
    ),
    (
        "Order of the measured steps of 12 configs on two gloo ranks, planned after a calibration: by one run alone, "
        "and by all six",
        "tau >= 0.8",
        "test_the_order_of_steps",
    ),
    (
        "Configs that `--find` writes pass `fgcli check --strict` and train two steps",
        "all",
        "test_each_way_that_is_written",
    ),
)


def cases(folder):
    """Returns the test cases of all pieces, by the names of their functions.

    Raises:
        SystemExit: if a test failed.
    """
    found = defaultdict(list)
    for case in passed(folder):
        found[function(case)].append(case)
    return found


def deviation(pairs):
    """Returns the largest difference of a plan from a measurement, over the ranks of a cell, as a share."""
    return max((plan / real - 1 for real, plan in pairs), key=abs)


def peak_tables(found):
    """Returns the table of cells, that of their classes, and the sentence about other estimates."""
    peaks = {parameters(case): properties(case) for case in found[PEAKS]}
    estimates = json.loads(RECORD.read_text(encoding="utf-8"))
    lines, errors, ranks = [], defaultdict(list), 0
    by_reach = defaultdict(list)
    for cell in (*QUICK, *FULL, *CELLS):
        recorded = peaks.get(f"{cell.group}-{cell}")
        if recorded is None:
            lines.append(f"| {cell} | {cell.world_size} | not measured in this run | | | | | | |")
            continue
        pairs = json.loads(recorded["peaks"])
        real = max(pairs)[0]
        off = deviation(pairs)
        others = estimates["cells"].get(str(cell), {})
        own = abs(max(plan for _, plan in pairs) / real - 1)
        shares = {name: others[name] / real - 1 for name in OTHERS if name in others}
        if others:
            errors["plan"].append(own)
            ranks += own <= min(map(abs, shares.values()))
            for name, share in shares.items():
                errors[name].append(abs(share))
        by_reach[cell.group, cell.below, cell.above].append((cell, off))
        note = f"outside: {cell.missed}" if cell.missed else ""
        held = "held out" if is_held_out(cell) else ""
        shown = " | ".join(f"{100 * shares[name]:+.0f} %" if name in shares else "-" for name in OTHERS)
        lines.append(
            f"| {cell} | {cell.world_size} | {real / 1e6:.3f} | {100 * off:+.2f} % | {shown} | {held} | {note} |"
        )
    head = f"| cell | ranks | measured, MB | plan | {' | '.join(OTHERS)} | | |\n|---|---|---|---|---|---|---|---|---|"
    return "\n".join([head, *lines]), _classes(by_reach), _comparison(errors, ranks, estimates["versions"])


def _classes(by_reach):
    rows = []
    for (group, below, above), cells in by_reach.items():
        for kind in (False, True):
            of_kind = [(cell, off) for cell, off in cells if is_held_out(cell) == kind]
            if not of_kind:
                continue
            inside = [off for cell, off in of_kind if not cell.missed]
            worst = max(inside, key=abs, default=0.0)
            rows.append(
                f"| {group}{', held out' if kind else ''} | -{100 * below:.0f} to +{100 * above:.0f} % | "
                f"{len(inside)} of {len(of_kind)} | {100 * worst:+.2f} % |"
            )
    return "\n".join(["| strategy | reach | cells inside | worst of them |\n|---|---|---|---|", *rows])


def _comparison(errors, nearest, versions):
    medians = {name: statistics.median(values) for name, values in errors.items()}
    own = medians.pop("plan")
    next_best = min(medians, key=medians.get)
    share = nearest / len(errors["plan"])
    if share < NEAREST or own > THIRD * medians[next_best]:
        sys.exit(f"nearest in {share:.0%} of the cells, median {own}, next best {medians}; nothing is written")
    others = ", ".join(f"{name} {100 * value:.0f} %" for name, value in medians.items())
    return (
        f"The plan is nearest to the measurement in {nearest} of {len(errors['plan'])} cells (reach: 95 %). The median "
        f"of its errors is {100 * own:.2f} %; of the others: {others} (reach: a third of the next best). Versions: "
        f"accelerate {versions['accelerate']}, DeepSpeed {versions['deepspeed']}."
    )


def figures(found):
    """Returns the table of all other figures."""
    rows = []
    for what, reach, test in ROWS:
        own = [case for name, cases in found.items() if name.startswith(test) for case in cases]
        parts = []
        for case in own:
            values = [
                f"{value} {name.removeprefix('figure: ')}"
                for name, value in properties(case).items()
                if name.startswith("figure: ")
            ]
            if values:
                label = parameters(case)
                parts.append(f"{label}: {', '.join(values)}" if label else ", ".join(values))
        rows.append(f"| {what} | {reach} | {len(own)} | {'; '.join(parts)} |")
    return "\n".join(["| what | reach | cases | figures |\n|---|---|---|---|", *rows])


def main(folder=ROOT / "build" / "planner"):
    """Writes the tables for a folder of reports."""
    found = cases(folder)
    cells, classes, comparison = peak_tables(found)
    content = "\n\n".join([classes, figures(found), comparison, cells])
    write(PAGE, content)


if __name__ == "__main__":
    if sys.argv[1:] == ["--pieces"]:
        print_pieces(PIECES)
    else:
        main(*sys.argv[1:])
