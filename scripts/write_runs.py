"""Writes the table of docs/runs.md, what lists, comparisons, control, sweeps and monitors reach, and prints it.

    python scripts/write_runs.py build/runs

Reads the reports that the tests of runs wrote with `--full --junitxml`, one for each piece; `make test-runs` runs all
of it. With `--pieces`, it prints the name of each piece and the words for pytest. A failed test ends it with an error,
and nothing is written. A row without a report is "not measured in this run".
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reports import Figure, Row, figures_table, passed, print_pieces, write  # noqa: E402

PAGE = ROOT / "docs" / "runs.md"
RUNS, OF_TRAINING = "tests/runs/", "tests/ml/runs/"
PIECES = {
    "list": f"{RUNS}test_listing_cost.py {RUNS}test_run_status.py {RUNS}test_heartbeat_of_runs.py "
    f"{RUNS}test_run_table.py {RUNS}test_config_values.py {RUNS}test_trial_attempts.py",
    "comparison": f"tests/page/test_comparison.py {RUNS}test_comparison.py {RUNS}test_comparison_page.py "
    f"{RUNS}test_compare_command.py {RUNS}test_curves.py {RUNS}test_metric_choice.py {RUNS}test_imports.py",
    "live": f"{RUNS}test_growing_file.py {RUNS}test_watch.py {RUNS}test_watch_server.py tests/page/test_watch_page.py "
    f"{OF_TRAINING}test_live_report.py {OF_TRAINING}test_progress.py",
    "control": f"{OF_TRAINING}test_control.py {OF_TRAINING}test_rate_scale.py {RUNS}test_control_command.py "
    f"{RUNS}test_control_listener.py {RUNS}test_control_socket.py",
    "sweeps": f"{RUNS}test_sweep.py {RUNS}test_sweep_journal.py {RUNS}test_sweep_ends.py {RUNS}test_sweep_places.py "
    f"{RUNS}test_sweep_search.py {RUNS}test_sweep_space.py {RUNS}test_sweep_stopping.py",
    "savings": f"{OF_TRAINING}test_sweep_savings.py",
    "monitors": f"{OF_TRAINING}test_anomalies.py {OF_TRAINING}test_monitor_cost.py {OF_TRAINING}test_monitor_parts.py "
    "tests/ml/distributed/test_monitors.py",
    "launch": f"{RUNS}test_launch_files.py {RUNS}test_ray_driver.py {OF_TRAINING}test_launch_parsers.py",
    "doctor": f"{RUNS}test_doctor_checks.py {RUNS}test_doctor_command.py {OF_TRAINING}test_doctor_meeting.py",
}
"""What runs in one go: a few minutes on an idle machine of two cores."""

ROWS = (
    Row(
        "`fgcli runs` over 1,000 runs of 200 lines, filtered and sorted, as a whole command",
        "<= 0.4 CPU s, no torch; the second time <= 0.2",
        (f"{RUNS}test_listing_cost.py::test_a_filtered", f"{RUNS}test_listing_cost.py::test_a_list_imports"),
        (Figure("first_cpu_seconds", "{:.2f} CPU s"), Figure("again_cpu_seconds", "the second time {:.2f}")),
    ),
    Row(
        "Comparison of 50 runs x 10 metrics x 10,000 steps as one page",
        "<= 5 MB, <= 3 s to write, usable in <= 2 s, 0 requests",
        ("tests/page/test_comparison.py::test_a_comparison_of_many",),
        (
            Figure("bytes", "{:.1f} MB", 1e-6),
            Figure("first_cpu_seconds", "the first time {:.1f} CPU s in all processes"),
            Figure("again_cpu_seconds", "the second time {:.1f} CPU s"),
            Figure("ready_seconds", "usable after {:.1f} s"),
        ),
    ),
    Row(
        "An appended metric is visible in the terminal and in a browser",
        "<= 2 s",
        (f"{RUNS}test_watch.py::test_an_appended", "tests/page/test_watch_page.py::test_a_run_grows"),
        (
            Figure("seconds_to_visible", "terminal {:.1f} s"),
            Figure("seconds_to_visible_in_browser", "browser {:.1f} s"),
        ),
    ),
    Row(
        "A day of a run that logs ten metrics each second, read every five seconds",
        "flat memory, only new bytes read",
        (f"{RUNS}test_growing_file.py::test_a_simulated_day",),
        (
            Figure("memory_growth_kib", "memory grew by {:.0f} KiB after its first quarter"),
            Figure("bytes_read_per_byte", "{:.2f} bytes read for each byte written"),
            Figure("reader_cpu_seconds", "{:.1f} CPU s in all"),
        ),
    ),
    Row(
        "Status after 100 kills of five kinds, zombies included; and of runs of `fgcli train` that end in nine ways",
        "100 right within 30 s",
        (
            f"{RUNS}test_run_status.py::test_the_status_is_right",
            f"{RUNS}test_heartbeat_of_runs.py::test_the_status_says",
        ),
        (Figure("kills_right", "{:.0f} right"), Figure("slowest_seconds", "slowest {:.3f} s")),
    ),
    Row(
        "Pause, save, stop and resume at random steps under 15 layouts of 1, 2 and 4 ranks, two draws each: losses and "
        "final weights have the bits of an undisturbed run",
        "30 of 30",
        (f"{OF_TRAINING}test_control.py::test_pause_save_stop_and_resume",),
    ),
    Row(
        "`kill -9` of the sweep and of its trials: every trial ends once, and the best one is that of an undisturbed "
        "sweep",
        "20 and 20: none lost, none repeated, same best",
        (f"{RUNS}test_sweep.py::test_kills",),
        (Figure("kills_of_sweep", "{:.0f} kills of the sweep"), Figure("kills_of_trials", "{:.0f} of trials")),
    ),
    Row(
        "ASHA on trials of the demo with 13 learning rates, 10 seeds",
        ">= 60 % of the steps saved, same best trial in 9 of 10 seeds",
        (f"{OF_TRAINING}test_sweep_savings.py::test_asha",),
        (
            Figure("share_saved", "{:.0f} % saved", 100),
            Figure("seeds_with_the_same_best", "same best in {:.0f}"),
            Figure("seeds", "of {:.0f} seeds (not reached)"),
            Figure("largest_difference_of_the_best", "elsewhere its loss is larger by at most {:.3f}"),
        ),
    ),
    Row(
        "20 planted anomalies: steps until each kind is found",
        "<= 5; plateau within 200, divergence within 100",
        (f"{OF_TRAINING}test_anomalies.py::test_a_planted",),
        (Figure("steps_after_it_was_planted", "{:.0f}"),),
        is_by_kind=True,
    ),
    Row(
        "Quiet runs without an alarm: 20 simulated ones of 1,500 steps, and 20 of a model",
        "all",
        (f"{OF_TRAINING}test_anomalies.py::test_a_quiet_run",),
    ),
    Row(
        "Part of the CPU time of steps of a model of 0.4 million weights that records and anomalies take, and that the "
        "other monitors take which log every ten steps; part of the time that the heartbeat takes",
        "<= 1 %",
        (f"{OF_TRAINING}test_monitor_cost.py::test_",),
        (
            Figure("share_of_step", "records and anomalies {:.2f} %", 100),
            Figure("share_of_steps", "monitors {:.2f} %", 100),
            Figure("share_of_time", "heartbeat {:.3f} %", 100),
        ),
    ),
    Row(
        "Losses and weights with all monitors, bit for bit those without, under five strategies",
        "all",
        ("tests/ml/distributed/test_monitors.py::test_losses_and_weights",),
    ),
    Row(
        "Printed launch files: local configs x {1, 4 machines} x 7 programs",
        "all valid",
        (
            f"{RUNS}test_launch_files.py::test_the_files_of_a_config",
            f"{OF_TRAINING}test_launch_parsers.py::test_torchrun",
        ),
        (
            Figure("valid_files", "{:.0f} valid", of_all=sum),
            Figure("refused_files", "{:.0f} of configs that cannot run so", of_all=sum),
        ),
    ),
    Row(
        "Hostile requests to `watch --serve` and to `control` while a run trains",
        "30: all refused, losses unchanged",
        (
            f"{OF_TRAINING}test_live_report.py::test_a_run_that_is_attacked",
            f"{OF_TRAINING}test_control.py::test_hostile_requests",
            f"{RUNS}test_watch_server.py::test_a_hostile_request",
            f"{RUNS}test_control_listener.py::test_a_hostile_request",
        ),
        (Figure("hostile_requests", "{:.0f} refused, losses unchanged", of_all=sum),),
    ),
)


def table(cases):
    """Returns the table for the test cases of all reports."""
    return figures_table(ROWS, cases)


def main(folder=ROOT / "build" / "runs"):
    """Writes the table for a folder of reports."""
    write(PAGE, table(passed(folder)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--pieces"]:
        print_pieces(PIECES)
    else:
        main(*sys.argv[1:])
