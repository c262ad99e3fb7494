"""The rows of a step: the missing number is solved, and contradictory numbers are told with those that fit."""

import itertools

import pytest

from forgather.batch_triangle import GLOBAL, ROWS, STEPS, batch_facts
from forgather.rule_conditions import SOMETHING, UNKNOWN


def facts(processes=1, **given):
    settings = {"trainer": "accel", **given, "given": tuple(given), "world_size": processes}
    return {**given, **batch_facts(settings)}


def test_whatever_two_are_given_the_third_is_solved():
    for rows, steps, processes in itertools.product((1, 3, 8), (1, 2, 5), (1, 2, 6)):
        total = rows * steps * processes
        for left_out in ((ROWS,), (STEPS,), (), (GLOBAL,)):
            given = {ROWS: rows, STEPS: steps, GLOBAL: total}
            given |= dict.fromkeys(left_out)
            found = facts(processes, **given)
            assert (rows, steps, None) == (found[ROWS], found[STEPS], found["batch_fault"])
            without = facts(processes, **{name: number for name, number in given.items() if number is not None})
            assert (found[ROWS], found[STEPS]) == (without[ROWS], without[STEPS])


@pytest.mark.parametrize(
    ("given", "solved"),
    [
        ({}, (8, 1)),
        ({GLOBAL: 64}, (8, 4)),
        ({GLOBAL: 64, "data_parallel_size": 4}, (8, 2)),
        ({GLOBAL: 64, "tensor_parallel_size": 2}, (8, 8)),
        ({GLOBAL: 64, "schedule_class": "Schedule1F1B", "split_spec": "auto"}, (8, 8)),
        ({GLOBAL: 64, "schedule_class": "Schedule1F1B", "pipeline_parallel_size": 1}, (8, 4)),
        ({"deepspeed": {"train_batch_size": 64}}, (8, 4)),
        ({"deepspeed": {"train_batch_size": 64}, STEPS: 2}, (16, 2)),
        ({"deepspeed": {"train_batch_size": 64}, GLOBAL: 32}, (8, 2)),
        ({"deepspeed": {"train_batch_size": 3}}, (8, 1)),
        ({"deepspeed": {"train_batch_size": "auto"}}, (8, 1)),
        ({"deepspeed": UNKNOWN}, (8, 1)),
        ({"accumulate_grad_batches": {0: 2, 3: 6}}, (8, 6)),
        ({"accumulate_grad_batches": {0: 2, 3: 6}, STEPS: 1}, (8, 6)),
        ({ROWS: UNKNOWN}, (UNKNOWN, 1)),
        ({ROWS: UNKNOWN, GLOBAL: 64}, (UNKNOWN, UNKNOWN)),
        ({GLOBAL: "64"}, (UNKNOWN, UNKNOWN)),
        ({"accumulate_grad_batches": SOMETHING}, (8, UNKNOWN)),
    ],
)
def test_two_processes_solve(given, solved):
    found = facts(2, **given)
    assert solved == (found[ROWS], found[STEPS])
    assert found["batch_fault"] is None


@pytest.mark.parametrize(
    ("processes", "given", "fault", "advice"),
    [
        (2, {GLOBAL: 64, ROWS: 8, STEPS: 2},
         f"{GLOBAL} is 64, and 8 rows ({ROWS}) x 2 micro-batches ({STEPS}) x 2 data-parallel processes = 32",
         f"write {GLOBAL}: 32, or {ROWS}: 16, or {STEPS}: 4; or leave out {ROWS} or {STEPS}, which then follows"),
        (3, {GLOBAL: 64, ROWS: 8, STEPS: 2},
         f"{GLOBAL} is 64, and 8 rows ({ROWS}) x 2 micro-batches ({STEPS}) x 3 data-parallel processes = 48",
         f"write {GLOBAL}: 48"),
        (2, {GLOBAL: 30, ROWS: 8},
         f"{GLOBAL} is 30, which is not a multiple of 8 rows ({ROWS}) x 2 data-parallel processes = 16",
         f"write {GLOBAL}: 16 or 32, or {ROWS}: 5 or 15"),
        (1, {GLOBAL: 4, ROWS: 8},
         f"{GLOBAL} is 4, which is not a multiple of 8 rows ({ROWS}) = 8", f"write {GLOBAL}: 8, or {ROWS}: 4"),
        (4, {GLOBAL: 30, STEPS: 3},
         f"{GLOBAL} is 30, which is not a multiple of 3 micro-batches ({STEPS}) x 4 data-parallel processes = 12",
         f"write {GLOBAL}: 24 or 36"),
        (None, {GLOBAL: 64, ROWS: 8, STEPS: 3},
         f"{GLOBAL} is 64, which is not a multiple of 8 rows ({ROWS}) x 3 micro-batches ({STEPS}) = 24",
         f"write {GLOBAL}: 48 or 72, or {STEPS}: 2 or 4; with several processes, a multiple of this product and their "
         "number"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_fit_are_told_with_the_nearest_that_do(processes, given, fault, advice):
    found = facts(processes, **given)
    assert (fault, advice) == (found["batch_fault"], found["batch_advice"])


def test_the_advice_fits():
    for total, rows, steps in itertools.product((7, 30, 64), (1, 4, 8), (None, 1, 3)):
        given = {GLOBAL: total, ROWS: rows, STEPS: steps}
        found = facts(2, **given)
        words = str(found["batch_advice"] or "").removeprefix("write ").partition(";")[0]
        for choice in filter(None, words.split(", or ")):
            name, _, numbers = choice.partition(": ")
            for number in numbers.split(" or "):
                assert facts(2, **{**given, name: int(number)})["batch_fault"] is None


def test_an_unknown_number_of_processes_leaves_the_accumulation_open():
    assert UNKNOWN is facts(None, **{GLOBAL: 64, ROWS: 8})[STEPS]
    assert UNKNOWN is facts(3, **{GLOBAL: 64, ROWS: 8, "tensor_parallel_size": 2})[STEPS]
