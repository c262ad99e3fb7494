"""Adapters: their settings, the model that they are put into, and a training that equals a plain loop with peft."""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapter_base import base_of, describe_base, names_of_base
from forgather.ml.adapter_names import AdapterError
from forgather.ml.adapters import Adapter, as_adapter, lora
from forgather.ml.model_class import num_parameters
from forgather.ml.trainer.hf import HFTrainer
from tests.matrix import thinned
from tests.ml.fixtures import VOCAB, Recorder, Regression, regression_rows, rows, tiny_llama

SEED = 42
KINDS = {
    "LoRA": {"r": 4, "lora_alpha": 8},
    "DoRA": {"r": 4, "lora_alpha": 8, "use_dora": True},
    "rsLoRA": {"r": 4, "lora_alpha": 8, "use_rslora": True},
    "PiSSA": {"r": 4, "lora_alpha": 4, "init_lora_weights": "pissa"},
    "names, biases and a head": {"r": 2, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"r": 2, "trainable_token_indices": [3, 5]},
}
LIMITS = {torch.float32: 1e-6, torch.float64: 1e-10}
QUICK = [("LoRA", torch.float64), ("DoRA", torch.float64), ("PiSSA", torch.float32), ("tokens", torch.float32)]


def gpt2():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    config = GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None)
    return GPT2LMHeadModel(config)


def settings(folder, **changes):
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "optim": "adamw_torch",
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": SEED,
    }
    return TrainingArguments(output_dir=str(folder), **{**given, **changes})


def trained(folder, model, adapter, **changes):
    recorder = Recorder()
    args = settings(folder, **changes)
    trainer = Trainer(model, args, train_dataset=rows(), callbacks=[recorder], adapter=adapter)
    trainer.train()
    lines = [line for line in recorder.lines if "loss" in line]
    return trainer, [line["loss"] for line in lines], [line["grad_norm"] for line in lines]


def plain_loop(model, given):
    """Trains with torch and peft alone, as `settings` says; returns the model, the losses and the gradient norms."""
    from peft import LoraConfig, get_peft_model

    given = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", **given}
    torch.manual_seed(SEED)
    model = get_peft_model(model, LoraConfig(**given)).train()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)
    data, losses, norms = rows(), [], []
    for step in range(3):
        first = step * 4 % 8
        batches = [data[first : first + 2], data[first + 2 : first + 4]]
        count = sum(int((row["labels"][1:] != -100).sum()) for batch in batches for row in batch)
        total = 0.0
        for batch in batches:
            ids, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            loss = F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=-100, reduction="sum") / count
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(float(nn.utils.clip_grad_norm_(weights, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, norms


def distance(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    thinned(
        [(kind, dtype, limit) for kind in KINDS for dtype, limit in LIMITS.items()],
        lambda kind, dtype, limit: (kind, dtype) in QUICK,
    ),
)
def test_a_training_with_an_adapter_equals_a_plain_loop_with_peft(tmp_path, kind, dtype, limit):
    if kind == "PiSSA" and dtype == torch.float64:
        pytest.skip("peft decomposes weights of float32 and less only")
    model, losses, norms = plain_loop(tiny_llama().to(dtype), KINDS[kind])
    trainer, ours, our_norms = trained(tmp_path, tiny_llama().to(dtype), KINDS[kind])
    assert ours == pytest.approx(losses, rel=limit)
    assert our_norms == pytest.approx(norms, rel=limit)
    assert sorted(model.state_dict()) == sorted(trainer.model.state_dict())
    assert distance(model.state_dict(), trainer.model.state_dict()) <= limit
    # The base does not move, and the adapter does.
    assert names_of_base(trainer.model)
    other = lora(**KINDS[kind]).apply(tiny_llama().to(dtype), seed=SEED).state_dict()
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, other[name])}
    assert moved.isdisjoint(names_of_base(trainer.model))
    assert any("lora_B" in name for name in moved)


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
def test_another_seed_gives_another_training(tmp_path):
    model, *_ = plain_loop(tiny_llama(), KINDS["LoRA"])
    trainer, *_ = trained(tmp_path, tiny_llama(), KINDS["LoRA"], seed=43)
    assert distance(model.state_dict(), trainer.model.state_dict()) > 1e-3


@pytest.mark.filterwarnings("ignore:.*fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
def test_the_transposed_layers_of_gpt2_get_an_adapter(tmp_path):
    model, losses, _ = plain_loop(gpt2(), KINDS["LoRA"])
    trainer, ours, _ = trained(tmp_path, gpt2(), KINDS["LoRA"])
    assert ours == pytest.approx(losses, rel=1e-6)
    assert distance(model.state_dict(), trainer.model.state_dict()) <= 1e-6


def test_recomputed_activations_give_the_same_adapter(tmp_path):
    plain, losses, norms = trained(tmp_path / "a", tiny_llama(), KINDS["DoRA"])
    again, ours, our_norms = trained(tmp_path / "b", tiny_llama(), KINDS["DoRA"], gradient_checkpointing=True)
    assert (ours, our_norms) == (pytest.approx(losses, rel=1e-6), pytest.approx(norms, rel=1e-6))
    assert distance(plain.model.state_dict(), again.model.state_dict()) <= 1e-6


def test_re_entrant_recomputation_is_refused(tmp_path):
    args = settings(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(TrainingError, match="use_reentrant is true, and the input embeddings are frozen") as refused:
        Trainer(tiny_llama(), args, train_dataset=rows(), adapter=KINDS["LoRA"])
    assert refused.value.code == "FG907"
    assert refused.value.argument == "args.gradient_checkpointing_kwargs.use_reentrant"


def test_both_spellings_and_both_objects_make_the_same_adapter():
    from peft import LoraConfig

    wanted = lora(r=4, lora_alpha=8, lora_dropout=0.1)
    assert lora(rank=4, alpha=8, dropout=0.1) == wanted
    assert as_adapter({"rank": 4, "alpha": 8, "dropout": 0.1}) == wanted
    assert as_adapter(wanted) is wanted
    assert as_adapter(None) is None
    config = LoraConfig(r=4)
    assert as_adapter(config) == Adapter(settings={}, config=config)


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ({"r": 8, "rank": 16}, "FG812", "'r' is given twice, once as 'rank'"),
        ({"lora_alpha": 8, "alpha": 8}, "FG812", "'lora_alpha' is given twice"),
        ({"r": 0}, "FG813", "r is 0"),
        ({"alpha": 0}, "FG813", "lora_alpha is 0"),
        ({"dropout": 1.0}, "FG813", "lora_dropout is 1.0"),
        ({"lora_dropout": -0.1}, "FG813", "lora_dropout is -0.1"),
        ({"bias": "some"}, "FG813", "bias is 'some'"),
        ({"init_lora_weights": "eva"}, "FG813", "init_lora_weights is 'eva'"),
        ({"rnak": 8}, "FG810", "lora has no setting 'rnak'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(given, code, message):
    with pytest.raises(AdapterError, match=message) as refused:
        lora(**given)
    assert refused.value.code == code
    with pytest.raises(AdapterError) as refused:
        as_adapter(given)
    assert refused.value.argument.startswith("adapter.")


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ({"target_modules": ["q_prj", "v_proj"]}, "FG900", "target_modules: 'q_prj' matches no module of Llama"),
        ({"target_modules": ".*attention_proj"}, "FG900", "matches no module"),
        ({"modules_to_save": ["score"]}, "FG900", "modules_to_save: 'score' matches no module"),
        ({"trainable_token_indices": {"wte": [1]}}, "FG900", "trainable_token_indices: 'wte' matches no module"),
        ({"trainable_token_indices": [1, VOCAB]}, "FG908", "has 64, and 'model.embed_tokens' has 64 rows"),
        ({"target_modules": ["mlp"]}, "FG905", "peft refuses the adapter: Target module LlamaMLP"),
        ({"target_modules": "*.q_proj"}, "FG900", "is not a regular expression"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"wte": 2}}, "FG900", "rank_pattern: 'wte' matches no module"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"(": 2}}, "FG900", "alpha_pattern: '.' is not a regular"),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0, 9]}, "FG900", "layers_to_transform has 9"),
        ({"layers_to_transform": [0]}, "FG905", "peft refuses the adapter: `layers_to_transform` cannot be used"),
        ({"trainable_token_indices": ["a"]}, "FG905", r"has \['a'\], which is not a list of token ids"),
    ],
)
def test_a_setting_that_does_not_fit_the_model_is_refused(tmp_path, given, code, message):
    with pytest.raises(AdapterError, match=message) as refused:
        Trainer(tiny_llama(), settings(tmp_path), train_dataset=rows(), adapter=given)
    assert refused.value.code == code


def test_a_name_that_matches_nothing_is_answered_with_the_names_that_exist():
    with pytest.raises(AdapterError) as refused:
        lora(target_modules=["q_prj"]).apply(tiny_llama(), seed=0)
    assert refused.value.hint == (
        "did you mean 'q_proj'? its layers with weights are called "
        "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head"
    )


def test_a_name_that_is_given_as_text_is_answered_with_the_list():
    with pytest.raises(AdapterError) as refused:
        lora(target_modules="q_proj").apply(tiny_llama(), seed=0)
    assert refused.value.hint.startswith("a text is a regular expression for whole names: write the list [q_proj]; ")


@pytest.mark.parametrize("given", ["lora", 8, nn.Linear(1, 1)])
def test_what_is_no_adapter_is_refused(given):
    with pytest.raises(AdapterError, match="the adapter is a (str|int|Linear)"):
        as_adapter(given)


def test_a_model_is_never_wrapped_twice(tmp_path):
    model = tiny_llama()
    first = Trainer(model, settings(tmp_path), train_dataset=rows(), adapter=KINDS["LoRA"])
    for again in (model, first.model):
        with pytest.raises(AdapterError, match="has an adapter already") as refused:
            Trainer(again, settings(tmp_path), train_dataset=rows(), adapter=KINDS["LoRA"])
        assert refused.value.code == "FG901"


def test_a_plain_module_gets_an_adapter_by_names(tmp_path):
    adapter = {"r": 2, "target_modules": r"layers\.[03]"}
    trainer = Trainer(Regression(), settings(tmp_path), train_dataset=regression_rows(), adapter=adapter)
    trainer.train()
    assert num_parameters(trainer.model, trainable=True) == 2 * (4 + 8) + 2 * (8 + 1)


def test_the_random_state_of_the_caller_stays():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 2))
    torch.manual_seed(5)
    lora(target_modules=["0"]).apply(model, seed=1)
    assert torch.equal(expected, torch.rand(3))


def test_the_number_of_trainable_parameters_is_shown_at_the_start(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        trained(tmp_path, tiny_llama(), {"r": 1, "target_modules": ["q_proj"]})
    assert "trainable  128 of 21,792 parameters (0.59 %)" in caplog.text


def test_the_base_model_is_described_alike_before_and_after_it_is_wrapped():
    before = describe_base(tiny_llama())
    for kind in ("LoRA", "DoRA", "names, biases and a head", "tokens"):
        adapted = lora(**KINDS[kind]).apply(tiny_llama(), seed=1)
        assert base_of(adapted) == before == describe_base(adapted)
    assert before != describe_base(tiny_llama(seed=1))
    assert before != describe_base(tiny_llama().to(torch.float64))


def test_transformers_trainer_trains_the_same_adapter(tmp_path):
    from transformers import TrainingArguments as TheirArguments

    args = TheirArguments(
        output_dir=str(tmp_path), max_steps=1, use_cpu=True, report_to="none", per_device_train_batch_size=4, seed=SEED
    )
    for given in ({"model": tiny_llama()}, {"model": None, "model_init": tiny_llama}):
        trainer = HFTrainer(**given, args=args, train_dataset=rows(), adapter=KINDS["LoRA"])
        expected = lora(**KINDS["LoRA"]).apply(tiny_llama(), seed=SEED)
        assert sorted(expected.state_dict()) == sorted(trainer.model.state_dict())
        assert distance(expected.state_dict(), trainer.model.state_dict()) == 0


class TestAnAdapterThatIsTrainedFurther:
    @pytest.fixture
    def earlier(self, tmp_path):
        base = tmp_path / "base"
        tiny_llama().save_pretrained(base)
        trainer, *_ = trained(tmp_path / "out", load(base), KINDS["LoRA"])
        return base, trainer.save_model(), trainer

    def test_it_starts_from_its_weights(self, tmp_path, earlier):
        base, folder, trainer = earlier
        again = Trainer(load(base), settings(tmp_path / "new"), train_dataset=rows(), adapter={"path": str(folder)})
        assert distance(trainer.model.state_dict(), again.model.state_dict()) == 0
        assert num_parameters(again.model, trainable=True) == num_parameters(trainer.model, trainable=True)

    def test_settings_that_agree_are_accepted_and_others_refused(self, earlier):
        base, folder, _ = earlier
        lora(path=str(folder), r=4, alpha=8).apply(load(base), seed=0)
        with pytest.raises(AdapterError, match=r"r is 8, and the adapter in .* has 4") as refused:
            lora(path=str(folder), r=8).apply(load(base), seed=0)
        assert (refused.value.code, refused.value.argument) == ("FG904", "adapter.r")

    def test_an_adapter_of_another_base_is_refused_with_both(self, tmp_path, earlier):
        base, folder, _ = earlier
        other = tmp_path / "other"
        tiny_llama(seed=9).save_pretrained(other)
        with pytest.raises(AdapterError, match=r"was trained on '.*base' .*, and this run trains '.*other'") as refused:
            lora(path=str(folder)).apply(load(other), seed=0)
        assert refused.value.code == "FG903"
        # Without a digest, the names decide.
        (folder / "base_model.json").unlink()
        with pytest.raises(AdapterError, match="was trained on"):
            lora(path=str(folder)).apply(load(other), seed=0)
        lora(path=str(folder)).apply(load(base), seed=0)

    def test_the_same_base_in_another_folder_is_accepted(self, tmp_path, earlier):
        base, folder, _ = earlier
        lora(path=str(folder)).apply(load(base.rename(tmp_path / "moved")), seed=0)

    @pytest.mark.parametrize("what", ["folder", "config", "weights", "kind", "text"])
    def test_a_folder_that_is_no_adapter_is_refused(self, earlier, what):
        base, folder, _ = earlier
        config = folder / "adapter_config.json"
        if what == "folder":
            folder = folder / "none"
        elif what == "config":
            config.unlink()
        elif what == "weights":
            (folder / "adapter_model.safetensors").unlink()
        elif what == "text":
            config.write_text("[1")
        else:
            config.write_text(json.dumps({"peft_type": "IA3", "target_modules": ["q_proj"]}))
        with pytest.raises(AdapterError, match="cannot be loaded") as refused:
            lora(path=str(folder)).apply(load(base), seed=0)
        assert refused.value.code == "FG902"

    @pytest.mark.parametrize(
        "damage, told",
        [
            ("half", "adapter_model.safetensors is damaged: .*not fully covered"),
            ("empty", "adapter_model.safetensors is damaged: .*too small"),
            ("one", r"lacks weights that adapter_config.json asks for, such as '.*lora_A.*'"),
            ("all", "lacks weights that adapter_config.json asks for"),
            ("nan", r"'.*lora_A.weight' in adapter_model.safetensors has values that are not finite"),
            ("rank", "are not of one adapter: size mismatch for .*lora_A"),
        ],
    )
    def test_damaged_weights_are_refused(self, earlier, damage, told):
        base, folder, _ = earlier
        file = folder / "adapter_model.safetensors"
        weights = load_file(file)
        first = min(weights)
        if damage in ("half", "empty"):
            content = file.read_bytes()
            file.write_bytes(content[: len(content) // 2] if damage == "half" else b"")
        elif damage == "rank":
            config = folder / "adapter_config.json"
            config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 2}))
        else:
            kept = {"one": {first}, "all": set(weights), "nan": set()}[damage]
            changed = {name: value for name, value in weights.items() if name not in kept}
            if damage == "nan":
                changed[first][0, 0] = float("nan")
            save_file(changed, file)
        with pytest.raises(AdapterError, match=told) as refused:
            lora(path=str(folder)).apply(load(base), seed=0)
        assert "FG902" == refused.value.code

    @pytest.mark.parametrize(
        "name, value",
        [
            ("r", "big"),
            ("r", True),
            ("lora_alpha", None),
            ("lora_alpha", float("nan")),
            ("lora_dropout", 2),
            ("base_model_name_or_path", 5),
            ("target_modules", [1, 2]),
            ("modules_to_save", {"a": 1}),
        ],
    )
    def test_a_value_that_peft_would_not_have_written_is_named(self, earlier, name, value):
        base, folder, _ = earlier
        config = folder / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {name: value}))
        with pytest.raises(AdapterError, match=f"{name} is .* in adapter_config.json, where .* is needed") as refused:
            lora(path=str(folder)).apply(load(base), seed=0)
        assert "FG902" == refused.value.code


def load(folder):
    from forgather.ml.models import from_pretrained

    return from_pretrained(folder)
