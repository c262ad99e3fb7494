"""Plans have the masks of the run: of padding, and of rows that hold several documents."""

import functools

import pytest
import torch
from datasets import Dataset
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import default_data_collator

import forgather.ml as ml
from forgather.ml.planner.masked_rows import Masking, is_divided, masked
from forgather.ml.planner.memory import plan_run
from forgather.ml.planner.planned_batches import MOST_READ, planned_batches
from forgather.ml.planner.real_integers import RealIntegers
from forgather.ml.planner.window_shape import WindowShape
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import tiny_llama
from tests.ml.planner.cells import measured_peak
from tests.ml.planner.test_planned_batches import trainer

LENGTH = 128


def alike(*lengths):
    return [{"input_ids": [5] * length, "labels": [5] * length} for length in lengths]


def packed(*starts):
    """Rows of one document, or of two where a start is given."""
    return [
        {
            "input_ids": [5] * LENGTH,
            "labels": [5] * LENGTH,
            "position_ids": [*range(start or LENGTH), *range(LENGTH - (start or LENGTH))],
        }
        for start in starts
    ]


PADDED = alike(*[LENGTH] * 3, 40) * 4
DIVIDED = packed(0, 0, 50, 0) * 4


def packed_trainer(tmp_path, rows, hook=None):
    args = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "no", "use_cpu": True}
    return ml.Trainer(
        model_init=model,
        args=ml.TrainingArguments(tmp_path, **args),
        train_dataset=Dataset.from_list(rows),
        data_collator=default_data_collator,
    )


# Heads that share keys: with a mask, their keys are copied for each head.
model = functools.partial(tiny_llama, vocab_size=64, num_key_value_heads=1)
RUNS = {
    "padded": (functools.partial(trainer, model=model), PADDED, alike(*[LENGTH] * 16)),
    "divided": (packed_trainer, DIVIDED, packed(*[0] * 16)),
}


@pytest.mark.parametrize("kind", thinned(RUNS, lambda kind: kind == "padded"))
def test_memory_is_that_of_masked_rows(kind, tmp_path):
    make, rows, whole = RUNS[kind]
    (real,) = run_ranks(1, measured_peak, functools.partial(make, tmp_path, rows))

    def planned(rows):
        plan, _ = plan_run(lambda hook: make(tmp_path, rows, hook), world_size=1, local_world_size=1)
        return plan["ranks"][0]["phases"][0]["num_bytes"]

    assert -0.02 <= planned(rows) / real - 1 <= 0.03
    # Rows that are all alike need less: a plan of copies of one row would be too low.
    assert planned(whole) / real - 1 < -0.05


@pytest.mark.parametrize("number", [1, 2, 8])
def test_each_number_of_rows_has_the_masks_that_it_can_have(number, tmp_path):
    def batch(make, rows):
        (found,) = planned_batches(make(tmp_path, rows)).window(WindowShape(rows=number)).batches
        return found

    padded, divided = batch(RUNS["padded"][0], PADDED), batch(packed_trainer, DIVIDED)
    assert bool(padded["attention_mask"].all()) is (number == 1)
    assert (divided["position_ids"].diff() != 1).any()
    for found in (padded, divided):
        assert (number, LENGTH) == found["input_ids"].shape
    assert batch(RUNS["padded"][0], alike(*[LENGTH] * 16))["attention_mask"].all()
    assert (batch(packed_trainer, packed(*[0] * 16))["position_ids"].diff() == 1).all()


def test_an_evaluation_has_the_masks_of_its_own_rows(tmp_path):
    sets = {"padded": PADDED, "alike": alike(*[LENGTH] * 8)}
    made = trainer(tmp_path, PADDED, eval_dataset=sets, eval_strategy="epoch", per_device_eval_batch_size=4)
    assert [False, True] == [bool(batch["attention_mask"].all()) for batch in planned_batches(made).evaluation]


def test_documents_are_looked_for_in_the_first_rows():
    late = [*packed(*[0] * MOST_READ), *packed(7)]
    assert [False, True] == [is_divided(rows) for rows in (late, late[1:])]
    assert not is_divided([]) and not is_divided(PADDED) and not is_divided(["text"])


def test_a_batch_without_masks_is_left_as_it_is():
    everything = Masking(is_padded=True, is_divided=True)
    for batch in ({"pixel_values": torch.ones(4, 3)}, torch.ones(4, 3), {"attention_mask": torch.ones(1, 3).long()}):
        assert masked(batch, everything) is batch


def test_rows_are_read_without_drawing_random_numbers_of_the_run():
    class Drawing(list):
        def __getitem__(self, number):
            torch.rand(1)
            return super().__getitem__(number)

    torch.manual_seed(1)
    assert is_divided(Drawing(packed(0, 7)))
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn


def test_long_masks_are_fake_and_what_a_model_asks_of_long_rows_is_known():
    with FakeTensorMode(allow_non_fake_inputs=True), RealIntegers():
        positions = torch.arange(2**12)
        mask = positions[:, None] >= positions[None, :]
        rows = torch.ones(2**11 + 1, 2**11, dtype=torch.int64)
        assert isinstance(mask, FakeTensor) and not isinstance(positions[:4, None] >= positions[None, :4], FakeTensor)
        assert bool(rows.bool().all())
