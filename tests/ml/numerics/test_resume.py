"""A run that stops and goes on ends with the bits of one that did not stop."""

import shutil

import pytest
import torch

from forgather.ml import Trainer
from tests.matrix import thinned
from tests.ml.fixtures import Noisy, Recorder, StopAt, assert_same_weights, largest_difference, tiny_llama, weights

STEPS = 9  # two epochs of four updates, and one more


def make(settings, *callbacks, data=None, **given):
    args = settings(
        **{
            "max_steps": STEPS,
            "save_strategy": "steps",
            "save_steps": 1,
            "logging_strategy": "steps",
            "logging_steps": 2,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            **given,
        }
    )
    model = tiny_llama(attention_dropout=0.1)
    return Trainer(model, args, train_dataset=data or Noisy(), callbacks=callbacks)


def numbers(history):
    return [
        {name: line.get(name) for name in ("step", "loss", "grad_norm", "learning_rate", "epoch")} for line in history
    ]


def everything(trainer):
    optimizer = trainer.optimizer.state_dict()
    tensors = {f"{k}.{n}": v for k, s in optimizer["state"].items() for n, v in s.items()}
    return {**weights(trainer.model), **tensors}


@pytest.mark.parametrize("stop", thinned([1, 2, 4, 5, 7, 8], lambda stop: stop in (1, 4, 7)))
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(settings, tmp_path, stop):
    whole = make(settings)
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    make(settings, StopAt(stop)).train()
    torch.manual_seed(999)
    resumed = make(settings)
    resumed.train(resume_from_checkpoint=True)
    assert STEPS == resumed.state.global_step
    assert_same_weights(everything(whole), everything(resumed))
    assert whole.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    assert numbers(whole.state.log_history[:-1]) == numbers(
        [line for line in resumed.state.log_history if "train_runtime" not in line]
    )


@pytest.mark.parametrize("given", [{"gradient_accumulation_steps": 3}, {"dataloader_num_workers": 1}])
def test_resuming_is_exact_with_accumulation_and_with_workers(settings, given):
    data = Noisy() if "gradient_accumulation_steps" in given else Noisy().base
    whole = make(settings, data=data, **given)
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    make(settings, StopAt(3), data=data, **given).train()
    resumed = make(settings, data=data, **given)
    resumed.train(resume_from_checkpoint="auto")
    assert_same_weights(everything(whole), everything(resumed))


def test_a_run_that_begins_anew_is_told_apart(settings):
    whole = make(settings)
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    partial = make(settings, StopAt(5))
    partial.train()
    assert largest_difference(weights(whole.model), weights(partial.model)) > 0


def test_an_iterable_data_set_goes_on_after_the_rows_it_gave(settings):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from Noisy().base

    whole = make(settings, data=Stream())
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    make(settings, StopAt(6), data=Stream()).train()
    resumed = make(settings, data=Stream())
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(everything(whole), everything(resumed))


def test_each_row_is_met_once_an_epoch_across_a_resume(settings):
    class Seen(torch.utils.data.Dataset):
        def __init__(self):
            self.base, self.order = Noisy().base, []

        def __len__(self):
            return 8

        def __getitem__(self, index):
            self.order.append(index)
            return self.base[index]

    met = []
    for data, *given, resume in ((Seen(), StopAt(5), False), (Seen(), True)):
        make(settings, *given, data=data, max_steps=8).train(resume_from_checkpoint=resume)
        met += data.order[2 * 8 :]  # each row was read twice before, to know the data
    assert [list(range(8))] * 2 == [sorted(met[:8]), sorted(met[8:])]
    assert met[:8] != met[8:]


def test_the_mean_loss_of_a_resumed_run_is_that_of_all_its_steps(settings):
    whole = make(settings, logging_steps=1)
    whole.train()
    losses = [line["loss"] for line in whole.state.log_history if "loss" in line]
    shutil.rmtree(whole.args.output_dir)
    make(settings, StopAt(5), logging_steps=4).train()
    output = make(settings, logging_steps=4).train(resume_from_checkpoint=True)
    assert sum(losses) / len(losses) == pytest.approx(output.training_loss)


def test_a_finished_run_that_is_resumed_takes_no_step_and_says_so(settings, caplog):
    whole = make(settings).train()
    recorder = Recorder()
    resumed = make(settings, recorder)
    before = resumed.train(resume_from_checkpoint=True)
    assert STEPS == before.global_step
    assert whole.training_loss == before.training_loss
    assert {"train_runtime", "train_loss"} == set(before.metrics)
    assert f"checkpoint-{STEPS} is already at max_steps={STEPS}: nothing to train" in caplog.text
    assert "resuming from" not in caplog.text
    assert "on_step_begin" not in {event for event, _ in recorder.events}
    earlier = make(settings, max_steps=STEPS - 1).train(resume_from_checkpoint=True)
    assert STEPS == earlier.global_step
    assert f"checkpoint-{STEPS} is past max_steps={STEPS - 1}: nothing to train" in caplog.text


def test_a_run_made_longer_takes_the_rate_of_its_new_plan_and_says_so(settings, caplog):
    rates = Recorder()
    make(settings, max_steps=4, warmup_steps=0, lr_scheduler_type="linear").train()
    make(settings, rates, max_steps=8, warmup_steps=0, lr_scheduler_type="linear", logging_steps=1).train("auto")
    assert [0.005, 0.00375, 0.0025, 0.00125] == [line["learning_rate"] for line in rates.lines if "loss" in line]
    assert "the checkpoint is of a run of 4 steps, and this run has 8: " in caplog.text
    caplog.clear()
    make(settings, max_steps=9, warmup_steps=0, lr_scheduler_type="linear").train()
    make(settings, max_steps=9, warmup_steps=0, lr_scheduler_type="linear").train("auto")
    assert "is of a run of" not in caplog.text


# By epochs, the change is at the end of the first epoch, step 3; by steps, one at step 2 and one at its end, step 4.
@pytest.mark.parametrize(
    ("schedule", "stop"),
    thinned(
        [({0: 3, 1: 2}, stop) for stop in (2, 3, 4)]
        + [({"steps": {0: 1, 2: 3, 4: 2}}, stop) for stop in (1, 2, 3, 4, 5)],
        lambda schedule, stop: stop == (2 if "steps" in schedule else 3),
    ),
)
def test_a_run_with_scheduled_accumulation_resumes_bit_for_bit(settings, schedule, stop):
    given = {"accumulate_grad_batches": schedule, "data": Noisy(14), "max_steps": 7}
    whole = make(settings, **given)
    whole.train()
    shutil.rmtree(whole.args.output_dir)
    make(settings, StopAt(stop), **given).train()
    torch.manual_seed(999)
    resumed = make(settings, **given)
    resumed.train(resume_from_checkpoint=True)
    assert_same_weights(everything(whole), everything(resumed))
    assert whole.lr_scheduler.state_dict() == resumed.lr_scheduler.state_dict()
    assert whole.state.num_input_tokens_seen == resumed.state.num_input_tokens_seen
    assert numbers(whole.state.log_history[:-1]) == numbers(
        [line for line in resumed.state.log_history if "train_runtime" not in line]
    )


def test_another_schedule_of_accumulation_is_told_on_resume(settings, caplog):
    given = {"data": Noisy(14), "max_steps": 4, "gradient_accumulation_steps": None}
    make(settings, StopAt(2), accumulate_grad_batches={0: 3, 1: 2}, **given).train()
    resumed = make(settings, accumulate_grad_batches={0: 3, 1: 1}, **given)
    caplog.clear()
    resumed.train(resume_from_checkpoint=True)
    assert "accumulate_grad_batches is {0: 3, 1: 1}, and was {0: 3, 1: 2} before" in caplog.text
