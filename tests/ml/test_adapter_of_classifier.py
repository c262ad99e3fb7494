"""An adapter of a sequence classifier: its new head is trained and saved, or the adapter is refused."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, ViTConfig

from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapter_names import AdapterError
from forgather.ml.adapters import lora
from forgather.ml.classifiers import classifier_from_config, classifier_from_pretrained
from forgather.ml.data import PaddingCollator
from forgather.ml.trainer.saved_evaluation import evaluate_saved
from tests.matrix import thinned
from tests.ml.fixtures import tiny_llama

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:.*fan_in_fan_out")
SIZES = {"vocab_size": 64, "pad_token_id": 0}


def bert():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SIZES, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def gpt2():
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**SIZES, **sizes, bos_token_id=None, eos_token_id=None))


CASES = {
    "llama": (lambda: tiny_llama(pad_token_id=0), {"r": 2}),
    "llama, by names": (lambda: tiny_llama(pad_token_id=0), {"r": 2, "target_modules": ["q_proj"]}),
    "llama, and a layer": (lambda: tiny_llama(pad_token_id=0), {"r": 2, "modules_to_save": ["norm"]}),
    "gpt2": (gpt2, {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "bert": (bert, {"r": 2, "target_modules": ["query"], "modules_to_save": ["pooler"]}),
}


def rows(count=8):
    generator = torch.Generator().manual_seed(3)
    return [
        {"input_ids": torch.randint(1, 64, (6,), generator=generator), "labels": torch.tensor(number % 3)}
        for number in range(count)
    ]


def classifier(folder, seed=7):
    return classifier_from_pretrained(folder, labels=["a", "b", "c"], seed=seed, dtype=torch.float64)


def trainer_of(folder, base, adapter, **settings):
    given = {"per_device_train_batch_size": 4, "max_steps": 3, "learning_rate": 5e-2, "lr_scheduler_type": "constant"}
    given |= {"train_sampling_strategy": "sequential", "weight_decay": 0.0, "max_grad_norm": 0.0, "use_cpu": True}
    args = TrainingArguments(str(folder), **{**given, "save_strategy": "steps", "save_steps": 3, **settings})
    data = {"train_dataset": rows(), "eval_dataset": rows(5)}
    return Trainer(lambda: classifier(base), args, adapter=adapter, **data)


def plain_loop(base, adapter):
    model = classifier(base)
    torch.manual_seed(42)
    model = get_peft_model(
        model, LoraConfig(**{"target_modules": "all-linear", "task_type": "SEQ_CLS", **copy.deepcopy(adapter)})
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=5e-2, weight_decay=0.0)
    for step in range(3):
        part = rows()[step % 2 * 4 :][:4]
        logits = model(input_ids=torch.stack([row["input_ids"] for row in part])).logits
        F.cross_entropy(logits, torch.stack([row["labels"] for row in part])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.stack([row["input_ids"] for row in rows(5)])).logits


@pytest.mark.parametrize("case", thinned([*CASES], lambda case: case == "llama, and a layer"))
def test_the_head_is_trained_and_saved(tmp_path, case):
    make, adapter = CASES[case]
    make().save_pretrained(tmp_path / "base")
    trainer = trainer_of(tmp_path / "out", tmp_path / "base", adapter)
    beginning = logits_of(trainer.model)
    trainer.train()
    expected = logits_of(plain_loop(tmp_path / "base", adapter))
    assert float((logits_of(trainer.model) - expected).abs().max()) <= 1e-10
    assert float((beginning - expected).abs().max()) > 1e-2
    # Plain peft on a base whose new head has other random weights: the head is that of the adapter.
    loaded = PeftModel.from_pretrained(classifier(tmp_path / "base", seed=99), tmp_path / "out")
    assert float((logits_of(loaded) - logits_of(trainer.model)).abs().max()) <= 1e-10
    own = trainer.evaluate()["eval_loss"]
    for folder, is_checkpoint in ((tmp_path / "out/checkpoint-3", True), (tmp_path / "out", False)):
        again = trainer_of(tmp_path / "again", tmp_path / "base", adapter)
        assert evaluate_saved(again, str(folder), is_checkpoint=is_checkpoint)["metrics"]["eval_loss"] == own


def test_new_weights_that_would_stay_random_are_refused(tmp_path):
    bert().save_pretrained(tmp_path / "base")
    with pytest.raises(AdapterError, match=r"'bert.pooler.dense' is not in the files of the base model") as refused:
        trainer_of(tmp_path / "out", tmp_path / "base", {"r": 2, "target_modules": ["query"]})
    assert refused.value.code == "FG951"
    assert refused.value.hint == "add modules_to_save: [classifier, score, bert.pooler.dense]"


@pytest.mark.parametrize("task", ["token_classification", "image_classification"])
def test_the_head_of_words_and_images_is_trained_as_a_whole_beside_all_linear_layers(task, settings, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(**sizes, image_size=4, patch_size=2, num_channels=1)
    rows = [{"pixel_values": torch.full((1, 4, 4), number / 8), "labels": number % 2} for number in range(8)]
    if task == "token_classification":
        config = BertConfig(**SIZES, **sizes)
        rows = [{"input_ids": [number, 2, 3], "labels": [number % 2, -100, 1]} for number in range(8)]
    made = [lambda: classifier_from_config(config, task=task, labels=["a", "b"]) for _ in range(2)]
    args = settings(max_steps=2, learning_rate=0.1, save_strategy="no")

    trainer = Trainer(made[0], args, train_dataset=rows, data_collator=PaddingCollator(), adapter=lora(r=2))
    trainer.train()

    base, model = made[1]().state_dict(), trainer.model
    head = {name: value for name, value in model.named_parameters() if "classifier" in name and value.requires_grad}
    assert ["bias", "weight"] == sorted(name.rpartition(".")[2] for name in head)
    assert all(not torch.equal(value, base[f"classifier.{name.rpartition('.')[2]}"]) for name, value in head.items())
    layers = [name for name, value in model.named_parameters() if value.requires_grad and "lora_A" in name]
    assert 6 == len(layers) and not any("classifier" in name for name in layers)
