"""A resumed run's token ids, labels and weights mean what they meant, or it does not go on: each change is named."""

import json
import shutil

import pytest
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import AutoModelForCausalLM, LlamaConfig

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.data.tokenizer import load_tokenizer, train_bpe
from tests.ml.fixtures import StopAt

TEXT = ["the cat sat on the mat, and then the rat sat on the cat"] * 8
OTHER = ["while self.queue: yield self.queue.pop(); return queue"] * 8
IDS = [[(number + place) % 256 for place in range(8)] for number in range(8)]


def bpe(place, text=TEXT, **given):
    tokenizer = train_bpe(Dataset.from_dict({"text": text}), 264, cache_dir=place, **given)
    tokenizer.chat_template = "{{ messages }}"
    return tokenizer


def model(**given):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 264, "id2label": {0: "bad", 1: "good"}, **given}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes))


def data(names=("dog", "cat")):
    kinds = Features(input_ids=List(Value("int32")), labels=List(Value("int32")), label=ClassLabel(names=list(names)))
    return Dataset.from_dict({"input_ids": IDS, "labels": IDS, "label": [0, 1] * 4}, features=kinds).with_format(
        "torch"
    )


def trainer(settings, tokenizer, *callbacks, dataset=None, allow=None, **config):
    args = settings(max_steps=4, save_strategy="steps", save_steps=2, allow_changed=allow, remove_unused_columns=True)
    parts = {"train_dataset": data() if dataset is None else dataset, "processing_class": tokenizer}
    return Trainer(model(**config), args, callbacks=callbacks, **parts)


def changed(tokenizer, **given):
    for name, value in given.items():
        setattr(tokenizer, name, value)
    return tokenizer


def without_one_merge(place):
    """The same tokens by another way: the last merge is never made."""
    folder = place / "cut"
    bpe(place).save_pretrained(folder)
    table = json.loads((folder / "tokenizer.json").read_text())
    table["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(table))
    return load_tokenizer(folder)


CHANGES = {
    "text that it is trained on": (lambda place: {"tokenizer": bpe(place, OTHER)}, "tokenizer", "of 264 tokens"),
    "merges": (lambda place: {"tokenizer": without_one_merge(place)}, "tokenizer", "its merges changed"),
    "end of text": (
        lambda place: {"tokenizer": changed(bpe(place), eos_token="<|pad|>")},
        "tokenizer",
        'eos_token is "<|pad|>", and was "<|endoftext|>"',
    ),
    "chat template": (
        lambda place: {"tokenizer": changed(bpe(place), chat_template="{{ x }}")},
        "tokenizer",
        "chat_te",
    ),
    "padding": (lambda place: {"tokenizer": changed(bpe(place), padding_side="left")}, "tokenizer", "padding_side is"),
    "token ids of the model": (lambda place: {"eos_token_id": 7}, "tokenizer", "eos_token_id is 7, and was 2"),
    "names of the model": (lambda place: {"id2label": {0: "good", 1: "bad"}}, "labels", "id2label is"),
    "classes of the data": (
        lambda place: {"dataset": data(["ant", "cat"])},
        "labels",
        """the classes of the column 'label' are ["ant", "cat"], and were ["dog", "cat"]""",
    ),
    "heads": (
        lambda place: {"num_attention_heads": 4, "num_key_value_heads": 4},
        "model",
        "num_attention_heads is 4, and was 2",
    ),
    "RoPE": (lambda place: {"rope_theta": 500.0}, "model", "rope_parameters is"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The output folder of a run that has stopped, and where its tokenizer is cached."""
    from forgather.ml import TrainingArguments

    place = tmp_path_factory.mktemp("meanings")

    def settings(**given):
        return TrainingArguments(
            place / "out", use_cpu=True, logging_strategy="no", per_device_train_batch_size=2, **given
        )

    trainer(settings, bpe(place), StopAt(2)).train()
    return place


@pytest.fixture
def go_on(written, tmp_path, settings):
    def go_on(**given):
        folder = shutil.copytree(written / "out" / "checkpoint-2", tmp_path / "checkpoint-2")
        given = {"tokenizer": bpe(written), **given}
        later = trainer(settings, **given)
        later.train(resume_from_checkpoint=str(folder))
        return later

    return go_on


@pytest.mark.parametrize("name", CHANGES)
def test_what_numbers_mean_is_refused_by_what_has_changed(go_on, written, name):
    change, what, said = CHANGES[name]
    with pytest.raises(CheckpointError) as refused:
        go_on(**change(written), allow=["data"])
    assert f"[FG613] the {what} changed since the checkpoint: " in str(refused.value)
    assert said in str(refused.value)
    assert str(refused.value).endswith(f"resume with --allow-changed data,{what})")


def test_a_meant_change_is_told_once(go_on, written, caplog):
    assert 4 == go_on(tokenizer=bpe(written, OTHER), allow=["tokenizer"]).state.global_step
    assert 1 == sum("the tokenizer changed since the checkpoint" in line for line in caplog.messages)


def test_what_changes_training_alone_goes_on(go_on, caplog):
    assert 4 == go_on(attention_dropout=0.1, use_cache=False).state.global_step
    assert not any("changed since" in line for line in caplog.messages)


def test_the_tokenizer_in_the_checkpoint_is_the_same_one(go_on, written, caplog):
    assert 4 == go_on(tokenizer=load_tokenizer(written / "out" / "checkpoint-2")).state.global_step
    assert not any("changed since" in line for line in caplog.messages)


def test_a_tokenizer_that_is_left_out_is_told(go_on, caplog):
    assert 4 == go_on(tokenizer=None).state.global_step
    assert any("token ids cannot be compared" in line for line in caplog.messages)
