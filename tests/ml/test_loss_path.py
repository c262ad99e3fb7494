"""The loss of a model without logits: equal to the one with them where it is taken, and not taken where it differs."""

import copy
import logging
import sys

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.activation_checkpointing import checkpoint_activations
from forgather.ml.adapters import as_adapter
from forgather.ml.loss_path import SMALLEST_VOCABULARY, PathSettings
from forgather.ml.loss_terms import UNCHANGED, LogitMap
from forgather.ml.losses import loss_rule
from tests.ml.fixtures import VOCAB, rows, tiny_llama

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CHUNKED = PathSettings(True, 5)


def granite():
    return GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0))


def gemma():
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=30.0))


def cohere():
    return CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25))


def mixtral():
    config = MixtralConfig(**SIZES, num_local_experts=2, output_router_logits=True, router_aux_loss_coef=0.1)
    config._experts_implementation = "eager"  # the grouped product has no float64
    return MixtralForCausalLM(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=4, n_positions=16))


MODELS = {
    tiny_llama: UNCHANGED,
    gpt2: UNCHANGED,
    mixtral: UNCHANGED,
    granite: LogitMap(factor=1 / 8.0),
    cohere: LogitMap(factor=0.25),
    gemma: LogitMap(cap=30.0),
}


def made(make):
    torch.manual_seed(0)
    model = make()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    # Logits as large as those of a trained model, so that a cap bends them.
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(50.0)
    return model


def batch():
    found = rows()
    return {name: torch.stack([row[name] for row in found]) for name in ("input_ids", "labels")}


def examined(model, settings=CHUNKED, **terms):
    """Returns the rule of a model after its examination, which has seen the batch."""
    rule = loss_rule(model, path=settings, **terms)
    model.eval()
    with torch.no_grad():
        rule.path.examine(model, batch(), lambda inputs: rule.output(model, inputs))
    model.train()
    return rule


def loss_and_gradients(rule, model):
    model.zero_grad()
    total = rule.total(model, batch())
    (total / 7).backward()
    return total.detach(), {
        name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None
    }


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    "terms",
    [
        pytest.param({}, marks=pytest.mark.matrix, id="plain"),
        pytest.param({"label_smoothing": 0.1, "z_loss": 1e-3}, id="terms"),
    ],
)
def test_loss_and_gradients_equal_those_of_logits(make, terms):
    model = made(make).double()
    rule = examined(model, **terms)
    assert rule.path.logit_map == MODELS[make]
    expected, of_logits = loss_and_gradients(loss_rule(model, **terms), model)
    actual, without = loss_and_gradients(rule, model)
    assert rule.path.takes(batch()["labels"])
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(without, of_logits, rtol=1e-9, atol=1e-12)


def test_no_logits_are_made():
    model, shapes = made(tiny_llama), []
    rule = examined(model)
    model.register_forward_hook(lambda module, inputs, output: shapes.append(tuple(output.logits.shape)))
    rule.total(model, batch())
    assert [(8, 12, 1)] == shapes


def test_a_cap_that_changes_no_bit_of_small_logits_is_found():
    # A power of two, so that not even the quotient is rounded.
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=32.0))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e-4)
        inputs = batch()["input_ids"]
        capped = model.eval()(inputs).logits
        model.config.final_logit_softcapping = None
        assert torch.equal(capped, model(inputs).logits)
    model.config.final_logit_softcapping = 32.0
    assert examined(model).path.logit_map == LogitMap(cap=32.0)


class TwistedForCausalLM(LlamaForCausalLM):
    """Changes logits in a way that no number of its configuration says."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.0001
        return output


class SidewaysForCausalLM(LlamaForCausalLM):
    """Computes a further loss from logits."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output["aux_loss"] = output.logits.square().mean()
        return output


def of_class(kind):
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES))


def hooked():
    model = made(tiny_llama)
    model.lm_head.register_forward_hook(lambda module, inputs, output: output)
    return model


def compiled():
    model = made(tiny_llama)
    model.compile(backend="eager")
    return model


def patched():
    model = made(tiny_llama)
    inner = model.lm_head.forward
    model.lm_head.forward = lambda hidden: inner(hidden) * 2
    return model


def with_lora_on_the_head():
    return as_adapter({"r": 2, "target_modules": ["lm_head"]}).apply(made(tiny_llama), seed=0)


def compiled_by_the_user():
    return torch.compile(made(tiny_llama), backend="eager")


def recomputed_as_a_whole():
    model = made(tiny_llama)
    checkpoint_activations([model], "full")
    return model


REFUSED = {
    "compiled by the user": (compiled_by_the_user, "compiled as a whole"),
    "recomputed": (recomputed_as_a_whole, "wrapped as a whole"),
    "a factor of its own": (lambda: of_class(TwistedForCausalLM), "more than a factor"),
    "a loss of its own": (lambda: of_class(SidewaysForCausalLM), "more than logits"),
    "a hook": (hooked, "reads outputs"),
    "compiled": (compiled, "compiled as a whole"),
    "replaced": (patched, "replaced the forward"),
    "an adapter": (with_lora_on_the_head, "not a plain nn.Linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_logits_are_computed_where_they_are_needed(name, caplog, request):
    make, why = REFUSED[name]
    # What is compiled need not run compiled here.
    torch.compiler.set_stance("force_eager")
    request.addfinalizer(lambda: torch.compiler.set_stance("default"))
    with pytest.raises(TrainingError, match=f"{why}.*linear_cross_entropy: auto") as failure:
        examined(make())
    assert failure.value.code == "FG716"
    rule = loss_rule(model := make(), path=PathSettings("auto", 5))
    rule.path.is_undecided = True
    model.eval()
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="forgather"):
        rule.path.examine(model, batch(), lambda inputs: rule.output(model, inputs))
    assert any("computed from logits: " in record.message and why in record.message for record in caplog.records)
    assert not rule.path.takes(batch()["labels"])
    torch.testing.assert_close(rule.total(model, batch()), loss_rule(model).total(model, batch()), rtol=0.0, atol=0.0)


def test_small_vocabularies_are_not_examined_and_small_batches_keep_their_bits():
    assert not loss_rule(tiny_llama(), path=PathSettings("auto")).path.is_undecided
    large = tiny_llama(vocab_size=SMALLEST_VOCABULARY)
    path = examined(large, PathSettings("auto", 96)).path
    assert not path.takes(torch.zeros(8, 12))
    assert path.takes(torch.zeros(8, 13))
    with torch.no_grad():
        assert not path.takes(torch.zeros(8, 13))


def test_a_trained_copy_of_the_head_beside_an_adapter_is_the_head():
    def adapted():
        settings = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}
        return as_adapter(settings).apply(made(tiny_llama).double(), seed=0)

    model = adapted()
    expected = loss_and_gradients(loss_rule(model), model)
    assert any("modules_to_save" in name for name in expected[1])
    torch.testing.assert_close(loss_and_gradients(examined(model), model), expected, rtol=1e-9, atol=1e-12)


def test_modules_that_the_user_put_into_evaluation_mode_stay_there(tmp_path):
    trainer = Trainer(model=tiny_llama(), args=arguments(tmp_path, linear_cross_entropy=True), train_dataset=rows())
    trainer.model.train()
    trainer.model.model.norm.eval()
    trainer.train()
    assert trainer.strategy.rule.path.takes(torch.zeros(1, 1))
    assert not trainer.model.model.norm.training
    assert trainer.model.model.layers.training


def test_a_copy_and_the_class_of_a_model_are_unchanged():
    model = made(tiny_llama)
    rule = examined(model)
    rule.total(model, batch())
    assert "forward" not in vars(model.lm_head)
    copied = copy.deepcopy(model)
    assert copied(batch()["input_ids"]).logits.shape[-1] == VOCAB


def test_tied_weights_get_the_sum_of_both_gradients_once():
    def tied():
        return tiny_llama(tie_word_embeddings=True).double()

    model = tied()
    expected = loss_and_gradients(loss_rule(model), model)
    torch.testing.assert_close(loss_and_gradients(examined(model), model), expected, rtol=1e-10, atol=1e-12)


def test_a_callable_that_returns_outputs_is_taken_at_its_logits():
    model = made(tiny_llama)
    rule = examined(model)
    output = model(batch()["input_ids"])
    expected = loss_rule(model).total(lambda **_: output, batch())
    assert torch.equal(expected, rule.total(lambda **_: output, batch()))


def arguments(folder, **settings):
    common = {"use_cpu": True, "max_steps": 2, "save_strategy": "no", "logging_steps": 1, "report_to": "none"}
    return TrainingArguments(output_dir=folder, **{**common, **settings})


def trained(folder, **settings):
    trainer = Trainer(model=tiny_llama().double(), args=arguments(folder, **settings), train_dataset=rows())
    trainer.train()
    return trainer


def test_a_run_gives_the_same_losses_and_weights(tmp_path):
    plain = trained(tmp_path / "a")
    chunked = trained(tmp_path / "b", linear_cross_entropy=True, linear_cross_entropy_chunk_size=5)
    assert chunked.strategy.rule.path.takes(torch.zeros(1, 1))
    for one, other in zip(plain.state.log_history, chunked.state.log_history, strict=True):
        assert one.get("loss", 0) == pytest.approx(other.get("loss", 0), rel=1e-12)
    torch.testing.assert_close(plain.model.state_dict(), chunked.model.state_dict(), rtol=0.0, atol=1e-10)


def test_the_default_gives_the_bits_of_the_logits_for_small_models(tmp_path):
    default, logits = trained(tmp_path / "a"), trained(tmp_path / "b", linear_cross_entropy=False)
    for name, value in default.model.state_dict().items():
        assert torch.equal(value, logits.model.state_dict()[name])


def test_a_z_loss_is_added_in_training_and_not_in_evaluation(tmp_path):
    with_term = trained(tmp_path / "a", z_loss_coefficient=0.1)
    without = trained(tmp_path / "b")
    first = [run.state.log_history[0]["loss"] for run in (with_term, without)]
    model = tiny_llama().double()
    valid = torch.cat([row["labels"][1:] != -100 for row in rows()])
    logits = torch.cat([model(row["input_ids"][None]).logits[0, :-1] for row in rows()])
    expected = 0.1 * (torch.logsumexp(logits, -1)[valid] ** 2).mean().item()
    assert first[0] - first[1] == pytest.approx(expected, rel=1e-9)
    rules = [run.strategy.rule for run in (with_term, without)]
    with torch.no_grad():
        assert torch.equal(*(rule.total(model, batch()) for rule in rules))


LARGE = {"linear_cross_entropy_chunk_size": 32, "per_device_train_batch_size": 4}


def large(folder, **settings):
    """A trainer of a vocabulary for which "auto" computes no logits, in float32, whose digits show the path."""
    args = arguments(folder, **{**LARGE, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, **settings})
    return Trainer(model=tiny_llama(vocab_size=SMALLEST_VOCABULARY), args=args, train_dataset=rows(16))


def bits(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_a_resumed_run_keeps_the_path_and_the_bits(tmp_path):
    ends = {}
    for name, kernel in (("chunks", "auto"), ("logits", False)):
        whole = large(tmp_path / name, linear_cross_entropy=kernel)
        whole.train()
        ends[name] = bits(whole)
        assert {"path": name} == whole.strategy.rule.path.state_dict()
        resumed = large(tmp_path / name)
        resumed.train(resume_from_checkpoint=str(tmp_path / name / "checkpoint-2"))
        assert {"path": name} == resumed.strategy.rule.path.state_dict()
        for key, value in bits(resumed).items():
            assert torch.equal(value, ends[name][key])
    assert any(not torch.equal(value, ends["logits"][key]) for key, value in ends["chunks"].items())


def test_a_checkpoint_of_an_earlier_release_keeps_logits(caplog):
    path = loss_rule(tiny_llama(vocab_size=SMALLEST_VOCABULARY), path=PathSettings("auto")).path
    with caplog.at_level(logging.INFO, logger="forgather"):
        path.load_state_dict(None)
    assert not path.is_undecided
    assert "as in the run that wrote the checkpoint" in caplog.text
    required = loss_rule(tiny_llama(), path=PathSettings(True)).path
    required.load_state_dict(None)
    assert required.is_undecided
    with pytest.raises(ValueError, match="no path"):
        path.load_state_dict({"path": "sideways"})


def test_an_evaluation_makes_logits_only_for_metrics(tmp_path):
    shapes, means = [], []

    def noted(module, inputs, output):
        shapes.append(output.logits.shape[-1])

    for settings in ({"linear_cross_entropy": True}, {}):
        trainer = Trainer(
            model=tiny_llama().double(), args=arguments(tmp_path, **settings), train_dataset=rows(), eval_dataset=rows()
        )
        trainer.train()
        handle = trainer.model.register_forward_hook(noted)
        means.append(trainer.evaluate()["eval_loss"])
        handle.remove()
    assert [1, VOCAB] == sorted(set(shapes))
    assert means[0] == pytest.approx(means[1], rel=1e-12)
    trainer = Trainer(
        model=tiny_llama(),
        args=arguments(tmp_path, linear_cross_entropy=True),
        train_dataset=rows(),
        eval_dataset=rows(),
        compute_metrics=lambda rows: {"width": rows.predictions.shape[-1]},
    )
    trainer.train()
    assert VOCAB == trainer.evaluate()["eval_width"]


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.parametrize(
    ("settings", "more", "code", "says"),
    [
        ({"linear_cross_entropy": True}, {"loss_fn": nn.CrossEntropyLoss()}, "FG716", "the token loss .* is not used"),
        ({"z_loss_coefficient": 0.1}, {"loss_fn": nn.CrossEntropyLoss()}, "FG807", "the token loss .* is not used"),
        ({"linear_cross_entropy": "torch", "z_loss_coefficient": 0.1}, {}, "FG718", "no chunks for z_loss_coefficient"),
        (
            {"linear_cross_entropy": "torch", "label_smoothing_factor": 0.1},
            {},
            "FG718",
            "label_smoothing_factor is 0.1",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(tmp_path, settings, more, code, says):
    with pytest.raises(TrainingError, match=says) as failure:
        Trainer(model=tiny_llama(), args=arguments(tmp_path, **settings), train_dataset=rows(), **more)
    assert failure.value.code == code


def test_a_trainer_with_a_loss_of_its_own_computes_logits(tmp_path):
    with pytest.raises(TrainingError, match="in a method of its own") as failure:
        OwnLoss(model=tiny_llama(), args=arguments(tmp_path, linear_cross_entropy=True), train_dataset=rows())
    assert failure.value.code == "FG716"


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(TrainingError, match="liger-kernel cannot be imported") as failure:
        loss_rule(tiny_llama(), path=PathSettings("liger"))
    assert failure.value.code == "FG717"


def test_an_unknown_kernel_is_named(tmp_path):
    with pytest.raises(TrainingError, match="linear_cross_entropy"):
        arguments(tmp_path, linear_cross_entropy="triton")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_a_model_that_adds_positions_is_refused():
    adapter = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(tiny_llama(), adapter)
    rule = loss_rule(model, path=PathSettings(kernel=True, chunk_size=4))
    ids = torch.arange(20).reshape(2, 10)
    batch = rule.prepared({"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)})
    rule.path.examine(model, batch, lambda row: rule.output(model, row))
    with pytest.raises(TrainingError, match="26 positions, and the batch has 20 targets") as raised:
        rule.total(model, batch)
    assert "FG712" == raised.value.code
