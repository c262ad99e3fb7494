"""Writes the table of docs/coming-from/index.md, what the words of other tools and scripts reach, and prints it.

    python scripts/write_word_reach.py build/words

Reads the reports that the tests of words wrote with `--full --junitxml`, one for each piece; `make test-words` runs all
of it. With `--pieces`, it prints the name of each piece and the words for pytest. A failed test ends it with an error,
and nothing is written. A row without a report is "not measured in this run".
"""

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reports import passed, print_pieces, properties, write  # noqa: E402

PAGE = ROOT / "docs" / "coming-from" / "index.md"
WORDS, SEEDS, LIGHTNING, ML = "tests/words/", "tests/seeds/", "tests/lightning/", "tests/ml/"
PIECES = {
    "words": f"{WORDS}test_word_pages.py {WORDS}test_word_values.py {WORDS}test_word_meanings.py tests/test_aliases.py "
    f"tests/test_translation.py {LIGHTNING}test_words.py {ML}test_accelerate_words.py {ML}test_deepspeed_config.py",
    "rows": f"{WORDS}test_rows.py",
    "scripts": f"{SEEDS}test_scripts.py {SEEDS}test_script_snippets.py {SEEDS}test_hardware_selection.py "
    f"{SEEDS}test_lightning_scripts.py",
    "call": f"{WORDS}test_one_call.py {WORDS}test_script_checkpoints.py {WORDS}test_script_trainer.py",
    "lightning": f"{LIGHTNING}test_against_lightning.py {LIGHTNING}test_callbacks.py {LIGHTNING}test_config.py "
    f"{LIGHTNING}test_refusals.py {LIGHTNING}test_resuming.py {LIGHTNING}test_several_processes.py "
    f"{LIGHTNING}test_strategies.py {LIGHTNING}test_failures.py {LIGHTNING}test_loaders.py "
    f"{LIGHTNING}test_ranks_that_differ.py {LIGHTNING}test_module_settings.py",
    "ported": f"{ML}distributed/test_tool_scripts.py",
    "transformers": f"{ML}numerics/test_transformers_resume.py {ML}numerics/test_transformers_words.py "
    f"{ML}numerics/test_rate_change.py {ML}distributed/test_transformers_resume.py",
    "settings": f"{ML}test_parameter_settings.py {ML}test_unknown_keywords.py {ML}test_read_retries.py "
    f"{ML}test_hub_upload.py {ML}test_weight_average.py {ML}test_tokens_seen.py "
    f"{ML}distributed/test_settings_of_a_step.py",
    "bad_input": f"{WORDS}test_bad_arguments.py {LIGHTNING}test_bad_values.py {LIGHTNING}test_damaged_checkpoints.py",
}
"""What runs in one go: a few minutes on an idle machine of two cores."""
HEAD = "| what | reach | measured | cases | tests |\n|---|---|---|---|---|"


class Row(NamedTuple):
    """A row of the table.

    Args:
        what: what is measured.
        reach: what is to be reached.
        tests: the beginnings of the names of its tests, as file::function.
        figure: the name of a number that the tests record, of which the largest is shown; "" for none.
        text: the text around the number.
    """

    what: str
    reach: str
    tests: tuple[str, ...]
    figure: str = ""
    text: str = "{}"


ROWS = (
    Row(
        "90 rows that guides on distributed training ask for, and 11 mistakes in them: each runs, or is answered at "
        "its line",
        "101 of 101",
        (
            f"{WORDS}test_rows.py::test_a_config",
            f"{WORDS}test_rows.py::test_a_script",
            f"{WORDS}test_rows.py::test_a_test",
        ),
        "rows",
        "{:.0f} of 101",
    ),
    Row(
        "Scripts of five guides, as they are printed, on stand-in hardware",
        "all run, or are answered at their line",
        (
            f"{SEEDS}test_scripts.py::",
            f"{SEEDS}test_script_snippets.py::",
            f"{SEEDS}test_hardware_selection.py::",
            f"{SEEDS}test_lightning_scripts.py::",
        ),
    ),
    Row(
        "Public words of transformers, Accelerate, DeepSpeed and Lightning: each means, translates, or is refused with "
        "what to write",
        "100 %",
        (f"{WORDS}test_word_pages.py::test_every_word", f"{WORDS}test_word_pages.py::test_explain"),
        "words",
        "{:.0f} words, all answered",
    ),
    Row(
        "Values of these words: each changes the arguments, is noted in a line, or is refused",
        "none is dropped",
        (f"{WORDS}test_word_values.py::", f"{LIGHTNING}test_words.py::"),
    ),
    Row(
        "One call and the config that its `to_config()` prints: losses, weights and checkpoints",
        "same bits, 12 of 12",
        (f"{WORDS}test_one_call.py::test_a_call_and_its_config",),
    ),
    Row(
        "Losses of modules against Lightning's own on one process",
        "<= 1e-6",
        (f"{LIGHTNING}test_against_lightning.py::",),
    ),
    Row(
        "An Accelerate script's loop and a DeepSpeed script's config, with their own words, against the tool on one "
        "process",
        "<= 1e-6",
        (f"{ML}distributed/test_tool_scripts.py::",),
    ),
    Row(
        "A run that continues a checkpoint of transformers' Trainer",
        "losses of an uninterrupted run",
        (f"{ML}numerics/test_transformers_resume.py::", f"{ML}distributed/test_transformers_resume.py::"),
    ),
)


def table(cases):
    """Returns the table for the test cases of all reports."""
    return "\n".join([HEAD, *(_line(row, cases) for row in ROWS)])


def _line(row, cases):
    own = [case for case in cases if _name(case).startswith(row.tests)]
    if any(not any(_name(case).startswith(test) for case in own) for test in row.tests):
        return f"| {row.what} | {row.reach} | not measured in this run | | |"
    skipped = sum(case.find("skipped") is not None for case in own)
    count = f"{len(own) - skipped}" + (f" ({skipped} skipped)" if skipped else "")
    files = ", ".join(f"`{test.partition('::')[0].removeprefix('tests/')}`" for test in _once(row.tests))
    found = [float(known[row.figure]) for known in map(properties, own) if row.figure in known]
    measured = row.text.format(max(found)) if found else "all passed"
    return f"| {row.what} | {row.reach} | {measured} | {count} | {files} |"


def _once(tests):
    return {test.partition("::")[0]: test for test in tests}.values()


def _name(case):
    return f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}"


def main(folder=ROOT / "build" / "words"):
    """Writes the table for a folder of reports."""
    write(PAGE, table(passed(folder)))


if __name__ == "__main__":
    if sys.argv[1:] == ["--pieces"]:
        print_pieces(PIECES)
    else:
        main(*sys.argv[1:])
