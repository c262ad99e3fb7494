"""Rows of another task are refused where rows and model meet, also where the check before a run cannot know them."""

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast, T5Config, TrainingArguments
from transformers.data.data_collator import DataCollatorForLanguageModeling

from forgather.errors import TrainingError
from forgather.ml import Trainer
from forgather.ml.adapters import lora
from forgather.ml.classifiers import classifier_from_config
from forgather.ml.data import PaddingCollator
from forgather.ml.label_kind import LabelCheck, LabelKind
from forgather.ml.models import seq2seq_from_config
from forgather.ml.trainer.hf import HFTrainer
from tests.ml.fixtures import VOCAB, rows, tiny_llama

BERT = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": VOCAB}
T5 = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB, "pad_token_id": 0}
LENGTH = 12


def bert(task):
    return classifier_from_config(BertConfig(**BERT), task=task, labels=["a", "b", "c"])


def t5():
    config = T5Config(**T5)
    config.decoder_start_token_id = 0
    return seq2seq_from_config(config)


def of_task(kind, number=8):
    """Rows of a kind: token ids, and labels that only this kind has."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(number):
        ids = torch.randint(3, VOCAB, (LENGTH,), generator=generator)
        tags = torch.randint(0, 3, (LENGTH,), generator=generator)
        answer = ids.clone()
        answer[:4] = -100
        labels = {
            "causal": answer,
            "tags": tags,
            "class": tags[0],
            "text": torch.randint(3, VOCAB, (LENGTH,), generator=generator),
            "longer text": torch.randint(3, VOCAB, (LENGTH + 2,), generator=generator),
            "shifted": torch.cat([ids[1:], torch.tensor([-100])]),
            "copy": ids.clone(),
        }[kind]
        made.append({"input_ids": ids, "labels": labels})
    return made


def own(made, settings, tmp_path, **given):
    args = {"max_steps": 1, "per_device_train_batch_size": 4, **given.pop("args", {})}
    return Trainer(made, settings(**args), **given)


def theirs(made, settings, tmp_path, **given):
    plain = {"use_cpu": True, "save_strategy": "no", "report_to": "none", "max_steps": 1, "disable_tqdm": True}
    return HFTrainer(made, TrainingArguments(str(tmp_path), **plain, **given.pop("args", {})), **given)


REFUSED = [
    (tiny_llama, "tags", "are not the tokens of their row", "LlamaForCausalLM learns the next token"),
    (tiny_llama, "text", "are not the tokens of their row", "LlamaForCausalLM learns the next token"),
    (tiny_llama, "class", "are one number for each row", "LlamaForCausalLM"),
    (tiny_llama, "longer text", "are 14 numbers for a row of 12 tokens", "LlamaForCausalLM"),
    (tiny_llama, "shifted", "are shifted by one position already", "LlamaForCausalLM"),
    (lambda: bert("token_classification"), "causal", "are the tokens of their own row", "learns a class of each token"),
    (lambda: bert("classification"), "tags", "are a number for each token", "learns one class of each row"),
    (lambda: BertForMaskedLM(BertConfig(**BERT)), "copy", "are the tokens of their own row", "that the input hides"),
    (t5, "causal", "are the tokens of their own row", "learns the tokens of another text"),
]
ACCEPTED = [
    (tiny_llama, "causal"),
    (lambda: bert("token_classification"), "tags"),
    (lambda: bert("classification"), "class"),
    (t5, "text"),
    (t5, "longer text"),
    (t5, "copy"),
]


@pytest.mark.parametrize(
    ("trainer", "model", "kind", "found", "learns"),
    [*((own, *case) for case in REFUSED), (theirs, *REFUSED[0]), (theirs, *REFUSED[-1])],
)
def test_rows_of_another_task_are_refused(model, kind, found, learns, trainer, settings, tmp_path):
    made = trainer(model(), settings, tmp_path, train_dataset=of_task(kind))

    with pytest.raises(TrainingError) as refused:
        made.train()

    assert ("FG960", "train_dataset") == (refused.value.code, refused.value.argument)
    assert found in refused.value.message and learns in refused.value.message
    assert 0 == made.state.global_step


@pytest.mark.parametrize(
    ("trainer", "model", "kind"),
    [*((own, *case) for case in ACCEPTED), (theirs, *ACCEPTED[0]), (theirs, *ACCEPTED[-1])],
)
def test_rows_of_the_task_are_trained(model, kind, trainer, settings, tmp_path):
    made = trainer(model(), settings, tmp_path, train_dataset=of_task(kind))

    made.train()

    assert 1 == made.state.global_step


@pytest.mark.parametrize("trainer", [own, theirs])
def test_evaluation_rows_of_another_task_are_refused_by_their_own_name(trainer, settings, tmp_path):
    made = trainer(tiny_llama(), settings, tmp_path, train_dataset=rows(), eval_dataset=of_task("tags"))

    with pytest.raises(TrainingError) as refused:
        made.evaluate()

    assert ("FG960", "eval_dataset") == (refused.value.code, refused.value.argument)


@pytest.mark.parametrize("trainer", [own, theirs])
def test_a_loss_of_the_user_may_take_any_labels_and_a_cross_entropy_may_not(trainer, settings, tmp_path):
    def distance(logits, labels, num_items_in_batch=None):
        return (logits.mean(-1) - labels).square().sum() / num_items_in_batch

    trainer(tiny_llama(), settings, tmp_path, train_dataset=of_task("tags"), loss_fn=distance).train()
    with pytest.raises(TrainingError, match="FG960"):
        entropy = nn.CrossEntropyLoss()
        trainer(tiny_llama(), settings, tmp_path, train_dataset=of_task("tags"), loss_fn=entropy).train()


def test_a_collator_that_masks_tokens_makes_rows_of_a_masked_language_model(settings, tmp_path):
    words = WordLevel({"<pad>": 0, "<mask>": 1, **{f"w{number}": number for number in range(2, VOCAB)}}, "<pad>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", mask_token="<mask>")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.5)
    ids = [{"input_ids": row["input_ids"]} for row in of_task("copy")]
    model = BertForMaskedLM(BertConfig(**BERT))
    made = own(model, settings, tmp_path, train_dataset=ids, data_collator=collator)

    made.train()

    assert 1 == made.state.global_step


def test_an_adapter_does_not_hide_the_task(settings, tmp_path):
    made = own(tiny_llama(), settings, tmp_path, train_dataset=of_task("tags"), adapter=lora(r=2))

    with pytest.raises(TrainingError, match=r"FG960.*not the tokens of their row"):
        made.train()


def test_several_short_batches_are_judged_together(settings, tmp_path):
    """One batch of a few labels may agree by chance; the verdict waits for enough of them."""
    few = [{"input_ids": row["input_ids"][:3], "labels": row["input_ids"][:3]} for row in of_task("copy", 16)]
    args = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 6}
    model = bert("token_classification")
    made = own(model, settings, tmp_path, train_dataset=few, data_collator=PaddingCollator(), args=args)

    with pytest.raises(TrainingError, match="FG960"):
        made.train()


def test_a_few_labels_say_nothing_about_the_task():
    check = LabelCheck(LabelKind.NEXT_TOKEN, "LlamaForCausalLM", "train_dataset")
    rows = {"input_ids": torch.arange(24).view(2, 12), "labels": torch.full((2, 12), -100)}
    rows["labels"][0, 3] = 7
    check.add(rows, -100)

    rows["labels"][1] = 7
    with pytest.raises(TrainingError, match="FG960"):
        check.add(rows, -100)
