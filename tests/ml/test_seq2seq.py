"""Sources and targets: what the encoder and the decoder get, what a loss counts, and what is refused with its row."""

import json

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import BartConfig, LlamaConfig, T5Config

from forgather.errors import ForgatherError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.classifiers import classifier_from_config
from forgather.ml.data import PaddingCollator, row_texts, seq2seq_rows, tokenize_seq2seq
from forgather.ml.data.tokenizer import train_bpe
from forgather.ml.losses import loss_rule
from forgather.ml.models import ModelSourceError, from_config, seq2seq_from_config, seq2seq_from_pretrained
from forgather.ml.task import task_of

ROWS = [{"source": "one two", "target": "2 1"}, {"source": "three", "target": "a longer target"}]
SIZES = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}


@pytest.fixture
def write(tmp_path):
    def make(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(file)

    return make


@pytest.fixture
def tokenizer(write, tmp_path):
    return train_bpe(row_texts(seq2seq_rows(write(*ROWS))), 262, cache_dir=tmp_path)


def test_labels_are_the_target_and_the_token_at_which_generation_stops(write, tokenizer, tmp_path, caplog):
    rows = seq2seq_rows(write(*ROWS))

    made = tokenize_seq2seq(rows, tokenizer, source_prefix="say: ", cache_dir=tmp_path)
    cut = tokenize_seq2seq(rows, tokenizer, max_source_length=4, max_target_length=5, cache_dir=tmp_path)

    assert ["say: one two", "say: three"] == [tokenizer.decode(ids) for ids in made["input_ids"]]
    assert ["2 1", "a longer target"] == [tokenizer.decode(ids[:-1]) for ids in made["labels"]]
    assert {tokenizer.eos_token_id} == {ids[-1] for them in (made, cut) for ids in them["labels"]}
    assert [4, 5] == [max(map(len, cut[name])) for name in ("input_ids", "labels")]
    assert "2 rows; 2 sources cut to 4 tokens, 1 target to 5" in caplog.text


def test_a_language_after_the_end_of_a_target_is_kept(write, tokenizer, tmp_path):
    """As the tokenizer of mBART writes it: its decoder begins with the last label."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<lang>"]})
    lang, eos = tokenizer.convert_tokens_to_ids("<lang>"), tokenizer.eos_token_id
    ends = [(tokenizer.eos_token, eos), ("<lang>", lang)]
    single = f"$A {tokenizer.eos_token} <lang>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ends)

    made = tokenize_seq2seq(seq2seq_rows(write(*ROWS)), tokenizer, max_target_length=5, cache_dir=tmp_path)

    assert [[eos, lang]] * 2 == [ids[-2:] for ids in made["labels"]] and 5 == max(map(len, made["labels"]))
    assert ["2 1"] == [tokenizer.decode(ids[:-2]) for ids in made["labels"][:1]]


def test_a_target_that_ends_with_the_end_token_changes_no_other_row(write, tokenizer, tmp_path):
    end = tokenizer.eos_token
    rows = seq2seq_rows(write({"source": "a", "target": f"2{end}"}, *ROWS))

    made = tokenize_seq2seq(rows, tokenizer, max_target_length=5, cache_dir=tmp_path)

    assert [f"2{end}", f"2 1{end}"] == [tokenizer.decode(ids) for ids in made["labels"][:2]]
    assert [tokenizer.eos_token_id] * 3 == [ids[-1] for ids in made["labels"]] and 5 == max(map(len, made["labels"]))


@pytest.mark.parametrize("config", [T5Config(**SIZES), BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0)], ids=["T5", "BART"])  # fmt: skip
def test_the_loss_is_a_mean_over_target_tokens_and_texts_can_be_generated(config, write, tokenizer, tmp_path, caplog):
    made = tokenize_seq2seq(seq2seq_rows(write(*ROWS)), tokenizer, cache_dir=tmp_path)
    model = seq2seq_from_config(config, tokenizer=tokenizer)
    rule = loss_rule(model)
    batch = PaddingCollator(tokenizer)(list(made))
    targets = sum(len(ids) for ids in made["labels"])

    total = rule.total(model, batch).item()

    assert targets == rule.count(batch) and (batch["labels"] == -100).any()
    # An oracle: each row alone, its decoder inputs made by hand.
    alone = 0.0
    for row in made:
        labels = torch.tensor([row["labels"]])
        inputs = torch.cat([torch.tensor([[tokenizer.pad_token_id]]), labels[:, :-1]], dim=1)
        logits = model(input_ids=torch.tensor([row["input_ids"]]), decoder_input_ids=inputs).logits
        alone += nn.functional.cross_entropy(logits[0], labels[0], reduction="sum").item()
    assert total == pytest.approx(alone, rel=1e-5)
    assert "has no field" not in caplog.text
    task = task_of(model, rule)
    assert task.counts_tokens and task.has_perplexity
    stops = {"eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": tokenizer.pad_token_id}
    assert stops == {name: getattr(model.generation_config, name) for name in stops}
    assert tokenizer.pad_token_id == model.generate(input_ids=batch["input_ids"], max_new_tokens=2)[0, 0]


def test_a_saved_model_is_loaded_again_and_a_model_of_another_kind_is_refused(tokenizer, tmp_path):
    model = seq2seq_from_config(T5Config(**SIZES), tokenizer=tokenizer)
    model.save_pretrained(tmp_path / "t5")
    again = seq2seq_from_pretrained(tmp_path / "t5", tokenizer=tokenizer)
    assert again.training and all(
        torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True)
    )
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    from_config(LlamaConfig(**sizes, vocab_size=8)).save_pretrained(tmp_path / "llama")
    with pytest.raises(ModelSourceError, match="it is not an encoder-decoder language model") as refused:
        seq2seq_from_pretrained(tmp_path / "llama")
    assert "as in T5Config" in refused.value.hint  # nothing is wrong with the files
    with pytest.raises(ForgatherError, match="LlamaConfig is not the configuration of an encoder-decoder"):
        seq2seq_from_config(LlamaConfig(**sizes))


def test_a_loss_of_logits_and_labels_is_refused(write, tokenizer, tmp_path):
    made = tokenize_seq2seq(seq2seq_rows(write(*ROWS)), tokenizer, cache_dir=tmp_path)
    model = seq2seq_from_config(T5Config(**SIZES), tokenizer=tokenizer)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path / "out"), use_cpu=True, max_steps=1, per_device_train_batch_size=2, save_strategy="no"
        ),
        train_dataset=made,
        data_collator=PaddingCollator(tokenizer),
        loss_fn=nn.CrossEntropyLoss(),
    )
    with pytest.raises(ForgatherError, match="FG961"):
        trainer.train()


def test_a_classifier_with_a_decoder_takes_a_loss_of_logits_and_labels():
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    sizes |= {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "max_position_embeddings": 16}
    model = classifier_from_config(BartConfig(**sizes, vocab_size=20), labels=["a", "b"]).eval()
    batch = {"input_ids": torch.tensor([[0, 5, 2], [0, 6, 2]]), "labels": torch.tensor([0, 1])}
    rule = loss_rule(model, nn.CrossEntropyLoss())
    assert torch.allclose(model(**batch).loss, rule.total(model, batch) / rule.count(batch))


@pytest.mark.parametrize(
    ("row", "code", "told"),
    [
        ({"source": "a", "target": ""}, "FG877", "jsonl:2: .*its target is empty"),
        ({"source": 3, "target": "b"}, "FG877", "jsonl:2: .*its source is 3"),
        ({"source": "a"}, "FG831", "jsonl:2: .*no column 'target'"),
    ],
)
def test_a_row_that_cannot_be_used_is_refused_with_its_number(row, code, told, write):
    with pytest.raises(ForgatherError, match=told) as found:
        seq2seq_rows(write(ROWS[0], row))
    assert code == found.value.code


def test_arguments_that_cannot_be_used_are_refused(write, tokenizer):
    rows = seq2seq_rows(write(*ROWS))
    with pytest.raises(ForgatherError, match="max_target_length is 1"):
        tokenize_seq2seq(rows, tokenizer, max_target_length=1)
    tokenizer.pad_token = None
    with pytest.raises(ForgatherError, match="no padding token"):
        tokenize_seq2seq(rows, tokenizer)
