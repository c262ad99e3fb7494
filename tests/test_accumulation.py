"""The counts of a schedule of accumulation against a walk over all micro-batches; values that are no schedule."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgather.accumulation import EPOCHS, STEPS, Accumulation, AccumulationFault, read_accumulation

EPOCHS_WALKED = 9


@st.composite
def schedules(draw):
    starts = [0, *sorted(draw(st.sets(st.integers(1, 25), max_size=3)))]
    return Accumulation(
        tuple((start, draw(st.integers(1, 9))) for start in starts), draw(st.sampled_from([EPOCHS, STEPS]))
    )


def walked(schedule, batches):
    """Returns the number of steps after each epoch, and the micro-batches after each step, counted one by one."""
    step, ends, read = 0, [], [0]
    for epoch in range(EPOCHS_WALKED):
        left = batches
        while left > 0:
            taken = min(left, schedule.at(epoch=epoch, step=step))
            left, step = left - taken, step + 1
            read.append(read[-1] + taken)
        ends.append(step)
    return ends, read


@settings(max_examples=60, deadline=None)
@given(
    schedule=schedules(),
    batches=st.integers(1, 30),
    epochs=st.integers(0, EPOCHS_WALKED - 1),
    share=st.sampled_from([0, 0.125, 0.5, 0.75]),
)
def test_counts_are_those_of_a_walk(schedule, batches, epochs, share):
    ends, read = walked(schedule, batches)
    assert ends == list(itertools.islice(schedule.epoch_ends(batches), EPOCHS_WALKED))
    before = ends[epochs - 1] if epochs else 0
    total = epochs + share
    assert before + math.ceil((total - epochs) * (ends[epochs] - before)) == schedule.num_steps(batches, total)
    for steps in (before + 1, ends[epochs]):
        assert epochs + 1 == schedule.num_epochs(batches, steps)
        assert read[steps] == schedule.num_micro_batches(steps, batches)
    epoch, step = schedule.largest_from
    assert schedule.largest == schedule.at(epoch=epoch, step=step) == max(count for _, count in schedule.entries)


@pytest.mark.parametrize(("epochs", "steps"), [(2.3, 23), (1.1, 11), (0.07, 1), (3.0, 30)])
def test_a_constant_accumulation_counts_steps_of_a_share_of_an_epoch_as_ever(epochs, steps):
    assert steps == Accumulation.constant(2).num_steps(20, epochs)


def test_a_schedule_that_never_ends_is_counted_at_once():
    assert 10**15 == Accumulation(((0, 1), (10**15, 2)), STEPS).num_steps(10, 10**14)


def test_a_stream_counts_its_micro_batches_by_steps():
    assert 3 * 4 + 2 * 2 == read_accumulation({"steps": {0: 4, 3: 2, 9: 1}}).num_micro_batches(5)
    assert 5 * 4 == read_accumulation({0: 4, 3: 2}).num_micro_batches(5)


@pytest.mark.parametrize("value", [{0: 8, 5: 4}, {"steps": {0: 8, 1000: 4}}])
def test_a_schedule_is_shown_as_it_is_written(value):
    assert str(value).replace("'", "") == str(read_accumulation(value))


@pytest.mark.parametrize(
    ("value", "found", "instead"),
    [
        (4, "is 4, a number that does not change", "gradient_accumulation_steps: 4"),
        (True, "is True", "{0: 8, 5: 4}"),
        ([4, 2], "is [4, 2]", "{0: 8, 5: 4}"),
        ({}, "is {}", "{0: 8, 5: 4}"),
        ({5: 4}, "begins with epoch 5", "{0: 1, 5: 4}"),
        ({"steps": {5: 4}}, "begins with step 5", "{steps: {0: 1, 5: 4}}"),
        ({0: 8, 10: 2, 5: 4}, "not in ascending order: 0, 10, 5", "{0: 8, 5: 4, 10: 2}"),
        ({-1: 8}, "the epoch -1", "a whole number from 0"),
        ({"0": 8}, "the epoch '0'", "without quotes"),
        ({0.5: 8}, "the epoch 0.5", "a whole number from 0"),
        ({True: 8}, "the epoch True", "a whole number from 0"),
        ({0: 8, 5: 0}, "0 micro-batches from epoch 5", "a whole number from 1"),
        ({0: 2.0}, "2.0 micro-batches from epoch 0", "a whole number from 1"),
        ({0: "8"}, "'8' micro-batches", "a whole number from 1"),
        ({0: None}, "None micro-batches", "a whole number from 1"),
        ({"step": {0: 8}}, "the key 'step'", "{steps: {0: 8, 5: 4}}"),
        ({"steps": {0: 8}, "epochs": {0: 4}}, "more than one unit", "either epochs"),
        ({0: 8, "steps": {5: 4}}, "more than one unit", "either epochs"),
        ({"steps": 8}, "accumulate_grad_batches.steps is 8", "{steps: {0: 8, 5: 4}}"),
    ],
)  # fmt: skip
def test_what_is_no_schedule_is_told_by_what_was_found_and_what_to_write(value, found, instead):
    with pytest.raises(AccumulationFault) as caught:
        read_accumulation(value)
    assert found in caught.value.message
    assert instead in caught.value.hint
