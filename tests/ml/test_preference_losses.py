"""Losses of preferences: equal to TRL's and to a plain implementation, and the same for every way to batch rows."""

import json
import math
from pathlib import Path

import pytest
import torch

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import PreferenceCollator
from forgather.ml.distillation import DistillationLoss
from forgather.ml.feedback_rule import DIVERGENCE
from forgather.ml.losses import loss_rule
from forgather.ml.preference_losses import DPOLoss, KTOLoss, ORPOLoss, RewardLoss, log_one_minus_exp
from forgather.ml.types import PaddingBatch
from tests.ml import preference_cases as cases
from tests.ml.fixtures import Recorder, StopAt, assert_same_weights, weights

RECORDED = json.loads((Path(__file__).parent / "recorded/preference_losses.json").read_text())["figures"]
TOLERANCE = 1e-5


def plain_logps(model, prompt, answer):
    """Returns the log-probability of an answer, token by token; of one sequence without padding."""
    ids = torch.tensor([[*prompt, *answer]])
    logps = model(input_ids=ids).logits[0].log_softmax(-1)
    return sum(logps[place - 1, ids[0, place]] for place in range(len(prompt), ids.shape[1]))


def with_reference(rows, reference, names=("chosen_ids", "rejected_ids")):
    with torch.no_grad():
        return [
            {
                **row,
                "reference_logps": torch.stack(
                    [plain_logps(reference, row["prompt_ids"], row[name]) for name in names]
                ),
            }
            for row in rows
        ]


def own_figures(loss, model, batches):
    """Returns (loss, probes of the gradients) of each batch."""
    rule, found = loss_rule(model, loss), []
    for rows in batches:
        model.zero_grad()
        batch = rule.prepared(PreferenceCollator()(rows))
        value = rule.total(model, batch) / rule.count(batch)
        value.backward()
        found.append({"loss": value.item(), "probes": cases.probes(model)})
    return found


def assert_equal_figures(expected, own):
    for one, other in zip(expected, own, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], abs=TOLERANCE)
        assert other["probes"] == pytest.approx(one["probes"], abs=TOLERANCE * 10, rel=TOLERANCE)


DPO_CASES = {
    **{f"dpo_{name}": (settings, [cases.PAIRS]) for name, settings in cases.DPO.items()},
    "dpo_smoothed": ({"beta": 0.3, "label_smoothing": 0.2}, [[row] for row in cases.PAIRS]),
    "dpo_sft": ({"beta": 0.3, "sft_weight": 0.5}, [cases.EVEN_PAIRS]),
}


@pytest.mark.parametrize("name", DPO_CASES)
def test_dpo_is_that_of_trl(name):
    settings, batches = DPO_CASES[name]
    scored = [with_reference(rows, cases.language_model(2)) for rows in batches]
    assert_equal_figures(RECORDED[name], own_figures(DPOLoss(**settings), cases.language_model(1), scored))


def test_orpo_is_that_of_trl():
    batches = [[row] for row in cases.PAIRS] + [cases.EVEN_PAIRS]
    assert_equal_figures(RECORDED["orpo"], own_figures(ORPOLoss(beta=0.3), cases.language_model(1), batches))


def test_orpo_is_its_formula():
    model, losses = cases.language_model(1), []
    for row in cases.PAIRS:
        means = [plain_logps(model, row["prompt_ids"], row[n]) / len(row[n]) for n in ("chosen_ids", "rejected_ids")]
        odds = [torch.exp(mean) / (1 - torch.exp(mean)) for mean in means]
        losses.append(-means[0] - 0.3 * torch.log(torch.sigmoid(torch.log(odds[0] / odds[1]))))
    plain = sum(losses) / len(losses)
    plain.backward()
    expected = [{"loss": plain.item(), "probes": cases.probes(model)}]
    assert_equal_figures(expected, own_figures(ORPOLoss(beta=0.3, includes_prompt=False), model, [cases.PAIRS]))


@pytest.mark.parametrize("name", cases.REWARD)
def test_the_loss_of_a_reward_model_is_that_of_trl(name):
    rows = [{**row, **({"margin": 0.1 * place} if name == "margin" else {})} for place, row in enumerate(cases.PAIRS)]
    own = own_figures(RewardLoss(**cases.REWARD[name]), cases.reward_model(1), [rows])
    assert_equal_figures(RECORDED[f"reward_{name}"], own)


def feedback_with_reference(rows):
    return with_reference(rows, cases.language_model(2), ("completion_ids", "kl_ids"))


@pytest.mark.parametrize("name", cases.KTO)
def test_kto_is_that_of_trl(name):
    loss, model = KTOLoss(**cases.KTO[name]), cases.language_model(1)
    rows, batches = feedback_with_reference(cases.FEEDBACK), []
    rule = loss_rule(model, loss)
    batch = rule.prepared(PreferenceCollator()(rows))
    if rule.estimates_divergence:
        with torch.no_grad():
            total, count = rule.divergence_sums(lambda part: rule.output(model, part), batch)
        batch[DIVERGENCE] = (total / count).clamp(min=0)
        assert batch[DIVERGENCE] > 0
    value = rule.total(model, batch) / rule.count(batch)
    value.backward()
    batches.append({"loss": value.item(), "probes": cases.probes(model)})
    assert_equal_figures(RECORDED[f"kto_{name}"], batches)


@pytest.mark.parametrize("temperature", cases.TEMPERATURES)
def test_distillation_is_that_of_trl(temperature, tmp_path):
    cases.language_model(2).save_pretrained(tmp_path)
    model = cases.language_model(1)
    rule = loss_rule(model, DistillationLoss(teacher=tmp_path, temperature=temperature))
    batch = {"input_ids": torch.tensor(cases.TOKENS), "labels": torch.tensor(cases.TOKEN_LABELS)}
    # TRL leaves out the square of the temperature.
    value = rule.total(model, rule.prepared(batch)) / rule.count(batch) / temperature**2
    value.backward()
    own = [{"loss": value.item(), "probes": cases.probes(model)}]
    assert_equal_figures(RECORDED[f"distillation_{temperature}"], own)


def test_distillation_mixes_both_losses(tmp_path):
    cases.language_model(2).save_pretrained(tmp_path)
    model, batch = cases.language_model(1), {"input_ids": torch.tensor(cases.TOKENS)}
    batch["labels"] = torch.tensor(cases.TOKEN_LABELS)
    rules = [
        loss_rule(model, loss)
        for loss in (None, DistillationLoss(teacher=tmp_path), DistillationLoss(teacher=tmp_path, weight=0.25))
    ]
    tokens, teacher, mixed = (rule.total(model, rule.prepared(batch)).item() for rule in rules)
    assert mixed == pytest.approx(0.75 * tokens + 0.25 * teacher, rel=1e-6)


def test_distillation_adds_the_auxiliary_loss_of_experts(tmp_path):
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    config = MixtralConfig(**sizes, **heads, output_router_logits=True, router_aux_loss_coef=0.5)
    model = MixtralForCausalLM(config).train()
    model.save_pretrained(tmp_path)
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4]]), "labels": torch.tensor([[-100, 2, 3, 4]])}
    expected = 3 * 0.5 * model(**batch).aux_loss.item()
    rule = loss_rule(model, DistillationLoss(teacher=tmp_path))
    # The model is its own teacher, so nothing else is left.
    assert rule.total(model, rule.prepared(batch)).item() == pytest.approx(expected, abs=1e-5)
    with torch.no_grad():
        assert rule.total(model, rule.prepared(batch)).item() == pytest.approx(0, abs=1e-5)


def test_a_certain_answer_has_a_finite_odds_ratio():
    values = torch.tensor([0.0, -1e-30, -0.5, -30.0], requires_grad=True)
    found = log_one_minus_exp(values)
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert torch.isfinite(values.grad).all()
    double = torch.tensor([-0.5, -30.0], dtype=torch.float64)
    assert found[2:].tolist() == pytest.approx(torch.log(1 - torch.exp(double)).tolist(), rel=1e-6)


def test_a_reward_model_with_another_padding_token_is_refused(tmp_path):
    model = cases.reward_model(1)
    model.config.pad_token_id = 3
    batch = PreferenceCollator()(cases.PAIRS)
    with pytest.raises(TrainingError, match="is padded with token 0, and pad_token_id of the model is 3") as refused:
        loss_rule(model, RewardLoss()).prepared(batch)
    assert refused.value.code == "FG916"


def test_figures_of_trl_tell_losses_apart():
    """The negative control: other settings give other figures."""
    scored = [with_reference(cases.PAIRS, cases.language_model(2))]
    own = own_figures(DPOLoss(beta=0.31), cases.language_model(1), scored)
    assert own[0]["loss"] != pytest.approx(RECORDED["dpo_sigmoid"][0]["loss"], abs=100 * TOLERANCE)


def plain_dpo(kind, model, rows, beta=0.3, smoothing=0.2):
    losses = []
    for row in rows:
        logps = [plain_logps(model, row["prompt_ids"], row[name]) for name in ("chosen_ids", "rejected_ids")]
        ratios = [one - other for one, other in zip(logps, row["reference_logps"], strict=True)]
        margin = beta * (ratios[0] - ratios[1])
        good, bad = -torch.log(torch.sigmoid(margin)), -torch.log(torch.sigmoid(-margin))
        lengths = [len(row["chosen_ids"]), len(row["rejected_ids"])]
        losses.append(
            {
                "sigmoid": (1 - smoothing) * good + smoothing * bad,
                "robust": ((1 - smoothing) * good - smoothing * bad) / (1 - 2 * smoothing),
                "hinge": max(1 - margin, torch.zeros(())),
                "ipo": (ratios[0] / lengths[0] - ratios[1] / lengths[1] - 1 / (2 * beta)) ** 2,
                "sft": good - 0.7 * logps[0] / lengths[0],
            }[kind]
        )
    return sum(losses) / len(losses)


@pytest.mark.parametrize("kind", ["sigmoid", "robust", "hinge", "ipo", "sft"])
def test_dpo_is_its_formula(kind):
    model, rows = cases.language_model(1), with_reference(cases.PAIRS, cases.language_model(2))
    plain = plain_dpo(kind, model, rows)
    plain.backward()
    expected = [{"loss": plain.item(), "probes": cases.probes(model)}]
    smoothing = 0.2 if kind in ("sigmoid", "robust") else 0.0
    settings = {"loss_type": "sigmoid", "sft_weight": 0.7} if kind == "sft" else {"loss_type": kind}
    assert_equal_figures(expected, own_figures(DPOLoss(beta=0.3, label_smoothing=smoothing, **settings), model, [rows]))


def test_rows_that_fill_up_a_batch_have_no_loss():
    model = cases.language_model(1)
    rule = loss_rule(model, DPOLoss())
    rows = with_reference(cases.PAIRS, cases.language_model(2))
    whole, batch = (PreferenceCollator()(part) for part in (rows[:3], rows))
    batch["labels"][3] = -100
    assert (rule.count(whole), rule.count(batch), rule.count(PaddingBatch(whole))) == (3, 3, 0)
    assert torch.allclose(rule.total(model, whole), rule.total(model, batch), atol=1e-6)
    assert rule.total(model, PaddingBatch(whole)).item() == 0.0


def train(folder, make=cases.language_model, loss=None, rows=cases.PAIRS, callbacks=(), resume=None, **settings):
    recorder = Recorder()
    plain = {"per_device_train_batch_size": 4, "max_steps": 2, "learning_rate": 1e-2, "logging_steps": 1}
    args = TrainingArguments(str(folder), use_cpu=True, **{"save_strategy": "no", **plain, **settings})
    trainer = Trainer(
        make(1),
        args,
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=PreferenceCollator(),
        loss_fn=loss or DPOLoss(),
        callbacks=[recorder, *callbacks],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer, [line for line in recorder.lines if "loss" in line or "eval_loss" in line]


FEEDBACK = [*cases.FEEDBACK, {**cases.FEEDBACK[0], "label": 0, "prompt_ids": [19, 20]}]
"""Six rows: two micro-batches of three are one of six."""
JOBS = {
    "dpo": (cases.language_model, DPOLoss, cases.PAIRS, 4),
    "orpo": (cases.language_model, ORPOLoss, cases.PAIRS, 4),
    "kto": (cases.language_model, lambda: KTOLoss(undesirable_weight=1.3), FEEDBACK, 6),
    "reward": (cases.reward_model, RewardLoss, cases.PAIRS, 4),
}


def test_the_first_loss_is_that_of_equal_models(tmp_path):
    _, lines = train(tmp_path)
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert lines[1]["loss"] < lines[0]["loss"]


@pytest.mark.parametrize("job", JOBS)
def test_accumulated_micro_batches_are_one_batch(tmp_path, job):
    make, loss, rows, count = JOBS[job]

    def double(seed):
        return make(seed).double()

    given = {"loss": loss(), "rows": rows, "learning_rate": 5e-2, "max_steps": 3}
    whole, lines = train(tmp_path / "whole", double, per_device_train_batch_size=count, **given)
    settings = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": count}
    parts, others = train(tmp_path / "parts", double, **settings, **given)
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in others], abs=1e-12)
    assert lines[0]["loss"] != pytest.approx(lines[2]["loss"], abs=1e-4)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(value, parts.model.state_dict()[name], rtol=0, atol=1e-10)


def test_evaluations_report_rewards(tmp_path):
    trainer, _ = train(tmp_path, max_steps=3)
    found = trainer.evaluate()
    rows = with_reference(cases.PAIRS, cases.language_model(1))
    chosen = [plain_logps(trainer.model, row["prompt_ids"], row["chosen_ids"]).item() for row in rows]
    rejected = [plain_logps(trainer.model, row["prompt_ids"], row["rejected_ids"]).item() for row in rows]
    good = [0.1 * (a - float(row["reference_logps"][0])) for a, row in zip(chosen, rows, strict=True)]
    bad = [0.1 * (a - float(row["reference_logps"][1])) for a, row in zip(rejected, rows, strict=True)]
    assert found["eval_rewards/chosen"] == pytest.approx(sum(good) / 4, abs=1e-5)
    assert found["eval_rewards/rejected"] == pytest.approx(sum(bad) / 4, abs=1e-5)
    assert found["eval_rewards/margins"] == pytest.approx((sum(good) - sum(bad)) / 4, abs=1e-5)
    assert found["eval_rewards/accuracies"] == sum(a > b for a, b in zip(good, bad, strict=True)) / 4


def test_a_resumed_run_is_bit_equal(tmp_path):
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "save_strategy": "steps", "save_steps": 2}
    whole, lines = train(tmp_path / "whole", **settings)
    train(tmp_path / "cut", callbacks=[StopAt(2)], **settings)
    resumed, rest = train(tmp_path / "cut", resume="auto", **settings)
    assert_same_weights(weights(whole.model), weights(resumed.model))
    assert [line["loss"] for line in lines[2:]] == [line["loss"] for line in rest]
