"""The reference of DPO and KTO: computed once before the first step, kept by a digest, refused where it is unknown."""

import logging
import math

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import PreferenceCollator
from forgather.ml.distillation import DistillationLoss
from forgather.ml.losses import loss_rule
from forgather.ml.preference_losses import DPOLoss, KTOLoss, ORPOLoss, RewardLoss
from forgather.ml.strategy.model_strategy import ModelStrategy
from forgather.ml.trainer.hf import HFTrainer
from tests.ml import preference_cases as cases
from tests.ml.fixtures import Regression
from tests.ml.test_preference_losses import FEEDBACK, plain_logps, train


def trainer_of(folder, loss=None, rows=cases.PAIRS, model=None, **settings):
    plain = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    args = TrainingArguments(str(folder), use_cpu=True, **{**plain, **settings})
    return Trainer(
        model or cases.language_model(1),
        args,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=PreferenceCollator(),
        loss_fn=loss or DPOLoss(),
    )


@pytest.fixture
def predictions(monkeypatch):
    """The number of forward passes without a loss: only the reference needs them."""
    calls, predict = [], ModelStrategy.predict
    monkeypatch.setattr(ModelStrategy, "predict", lambda self, batch: calls.append(1) or predict(self, batch))
    return calls


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_reference_is_computed_once(tmp_path, predictions):
    rows = Dataset.from_list(cases.PAIRS)
    trainer_of(tmp_path, rows=rows).train()
    assert len(predictions) == 1
    trainer_of(tmp_path, rows=rows).train()
    assert len(predictions) == 1
    trainer_of(tmp_path, rows=rows, model=cases.language_model(2)).train()
    assert len(predictions) == 2
    trainer_of(tmp_path, rows=rows.select(range(3)), per_device_train_batch_size=3).train()
    assert len(predictions) == 3


def test_a_damaged_file_of_the_cache_is_computed_again(tmp_path, predictions):
    trainer_of(tmp_path).train()
    file = next((tmp_path / "cache").rglob("logps.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    trainer_of(tmp_path).train()
    assert len(predictions) == 2


def test_another_model_is_the_reference(tmp_path):
    other = cases.language_model(2)
    other.save_pretrained(tmp_path / "other")
    trainer = trainer_of(tmp_path / "run", DPOLoss(beta=0.3, reference=tmp_path / "other"))
    rewards = torch.as_tensor(trainer.predict(cases.PAIRS).predictions)
    own = cases.language_model(1)
    with torch.no_grad():
        expected = [
            [
                0.3 * float(plain_logps(own, row["prompt_ids"], row[n]) - plain_logps(other, row["prompt_ids"], row[n]))
                for n in ("chosen_ids", "rejected_ids")
            ]
            for row in cases.PAIRS
        ]
    torch.testing.assert_close(rewards, torch.tensor(expected, dtype=rewards.dtype), rtol=0, atol=1e-5)
    # With a model of its own, the reference of further rows is known at any time.
    trainer.train()
    assert "eval_loss" in trainer.evaluate(cases.PAIRS[:2])


def test_rows_that_come_after_the_training_have_no_reference(tmp_path):
    trainer = trainer_of(tmp_path)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(math.log(2), abs=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.69
    with pytest.raises(TrainingError, match="the model was trained before the data set was given") as error:
        trainer.evaluate(cases.PAIRS[:2])
    assert error.value.code == "FG915"


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(cases.PAIRS)


class Counting(list):
    """Rows that change from reading to reading, and draw no random numbers."""

    reads = 0

    def __getitem__(self, row):
        Counting.reads += 1
        return {**super().__getitem__(row), "prompt_ids": [3 + Counting.reads % 20]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [(Stream(), "is a stream"), (Counting(cases.PAIRS), "the column 'prompt_ids' changes from reading to reading")],
)
def test_rows_without_fixed_numbers_are_refused(tmp_path, rows, message):
    with pytest.raises(TrainingError, match=message) as error:
        trainer_of(tmp_path, rows=rows).train()
    assert error.value.code == "FG915"


def test_rows_with_a_reference_of_their_own_are_used_as_they_are(tmp_path, predictions):
    rows = [{**row, "reference_logps": torch.tensor([-1.0, -2.0])} for row in cases.PAIRS]
    trainer_of(tmp_path, rows=rows).train()
    assert not predictions


def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(tmp_path):
    settings = {"loss": KTOLoss(), "rows": FEEDBACK, "max_steps": 4, "per_device_train_batch_size": 2}
    found = [train(tmp_path, per_device_eval_batch_size=size, **settings)[0].evaluate() for size in (1, 4, 6)]
    for name in ("eval_loss", "eval_rewards/chosen", "eval_rewards/rejected", "eval_rewards/margins"):
        assert [one[name] for one in found] == pytest.approx([found[0][name]] * 3, abs=1e-6)


def test_dropout_is_reported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        loss_rule(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)), DPOLoss())
    assert "set them to 0 in the configuration of the model" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        # `summary_first_dropout` is that of a head which this model lacks.
        none = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
        loss_rule(GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1, **none)), DPOLoss())
    assert "" == caplog.text


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DPOLoss(beta=0), "beta is 0 .expected a number above 0"),
        (lambda: DPOLoss(loss_type="sigmoyd"), "loss_type is 'sigmoyd', which is not a loss of DPO"),
        (lambda: DPOLoss(label_smoothing=0.5), "label_smoothing is 0.5"),
        (lambda: DPOLoss(loss_type="ipo", label_smoothing=0.1), "has no effect on 'ipo'"),
        (lambda: KTOLoss(loss_type="sigmoid"), "is not a loss of KTO"),
        (lambda: ORPOLoss(beta=math.inf), "beta is inf"),
        (lambda: RewardLoss(center_weight=-1), "center_weight is -1"),
        (lambda: DistillationLoss(teacher="x", weight=1.5), "weight is 1.5 .expected a number above 0 to 1"),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(TrainingError, match=message) as error:
        make()
    assert error.value.code == "FG917"


@pytest.mark.parametrize(
    ("loss", "model", "message"),
    [
        (DPOLoss(), cases.reward_model(), "DPOLoss needs a causal language model"),
        (KTOLoss(), Regression(), "KTOLoss needs a causal language model"),
        (RewardLoss(), cases.language_model(), "LlamaForCausalLM is a language model"),
        (RewardLoss(), cases.filled(type(cases.reward_model()), 1, num_labels=3), "is a model with 3 outputs"),
        (RewardLoss(), cases.filled(type(cases.reward_model()), 1, num_labels=1, pad_token_id=None), "no pad_token_id"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(loss, model, message):
    with pytest.raises(TrainingError, match=message) as error:
        loss_rule(model, loss)
    assert error.value.code == "FG916"


def test_a_teacher_must_exist_and_have_the_vocabulary(tmp_path):
    cases.language_model(2, vocab_size=40).save_pretrained(tmp_path)
    for teacher, code in ((tmp_path, "FG918"), (tmp_path / "none", "FG840")):
        with pytest.raises(TrainingError) as error:
            loss_rule(cases.language_model(), DistillationLoss(teacher=teacher))
        assert error.value.code == code
    with pytest.raises(TrainingError, match="has 40 tokens, and the model has 32"):
        trainer_of(tmp_path / "run", DPOLoss(reference=tmp_path)).train()


@pytest.mark.parametrize(
    ("loss", "model", "rows", "message"),
    [
        (KTOLoss(), cases.language_model(), cases.PAIRS, "the batch has pairs of answers, and the loss needs single"),
        (DPOLoss(), cases.language_model(), cases.FEEDBACK, "has single answers that were judged, and the loss needs"),
        (ORPOLoss(), cases.language_model(), cases.FEEDBACK, "the loss needs pairs of answers"),
        (RewardLoss(), cases.reward_model(), cases.FEEDBACK, "the loss needs pairs of answers"),
    ],
)
def test_pairs_are_not_judged_answers(loss, model, rows, message):
    """Both have two answers a row; the labels of pairs, read as judgments, would call every answer bad."""
    with pytest.raises(TrainingError, match=message) as error:
        loss_rule(model, loss).prepared(PreferenceCollator()(rows))
    assert error.value.code == "FG914"


def test_other_rows_and_trainers_are_refused(tmp_path):
    rule = loss_rule(cases.language_model(), DPOLoss())
    with pytest.raises(TrainingError, match="the loss needs rows of two answers") as error:
        rule.prepared({"input_ids": torch.zeros(2, 3, dtype=torch.long)})
    assert error.value.code == "FG914"
    with pytest.raises(TrainingError, match="the batch has no 'reference_logps'") as error:
        rule.total(cases.language_model(), PreferenceCollator()(cases.PAIRS))
    assert error.value.code == "FG914"
    with pytest.raises(TrainingError, match="DPOLoss needs a trainer of Forgather") as error:
        HFTrainer(
            cases.language_model(), transformers.TrainingArguments(str(tmp_path), use_cpu=True), loss_fn=DPOLoss()
        )
    assert error.value.code == "FG916"
