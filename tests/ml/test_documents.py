"""Documents of a packed row do not see one another: whatever the model, the attention, the loss and the settings."""

import copy
import functools
import logging

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.documents import Documents, why_mixed
from forgather.ml.losses import loss_rule
from forgather.ml.model_inputs import DOCUMENTS, ModelInputs
from tests.ml.packed_rows import LENGTH, VOCAB, leak, symbols, two_documents, weights

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": LENGTH,
    **{"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
}
# `use_cache` is on, as it is by default: a training must not depend on what a configuration says.
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(**GPT2)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, hidden_dropout=0.0, attention_dropout=0.0)),
}


def make(name="llama", attention="sdpa"):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    config._attn_implementation = attention
    return kind(config)


def train_once(rows, folder, make_model=make, collator=None, loss_fn=None, kind=Trainer, **settings):
    """Returns the weights before and after one update with plain SGD."""
    args = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=len(rows),
        max_steps=1,
        optim="sgd",
        learning_rate=1.0,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_steps=10,
        **settings,
    )
    trainer = kind(make_model(), args, train_dataset=rows, data_collator=collator, loss_fn=loss_fn)
    before = weights(trainer)
    trainer.train()
    return {"before": before, "after": weights(trainer)}


def own_loss(logits, labels, reduction="mean"):
    # Of a label that is ignored, gather takes the probability of some other token.
    picked = F.log_softmax(logits, dim=-1).gather(1, labels[:, None])
    return -picked.sum() if reduction == "sum" else -picked.mean()


class Wrapper(nn.Module):
    """A model that computes its own loss of a model of transformers, and hands no `use_cache` on."""

    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, input_ids, position_ids, labels):
        logits = self.inner(input_ids=input_ids, position_ids=position_ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class Forwarding(Wrapper):
    """The same, with further inputs by name alone, which it does not hand on."""

    def forward(self, input_ids, labels, **others):
        return super().forward(input_ids, others["position_ids"], labels)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_a_document_does_not_see_the_one_before_it(name, attention, tmp_path):
    assert leak(lambda rows: train_once(rows, tmp_path, functools.partial(make, name, attention))) <= 1e-6


RECOMPUTED = {"gradient_checkpointing": True}
COMPILED = {"torch_compile": True, "torch_compile_backend": "eager"}
WAYS = {
    "own loss": {"loss_fn": own_loss},
    "loss of torch": {"loss_fn": nn.CrossEntropyLoss()},
    "loss of the model": {"make_model": Wrapper},
    "further inputs by name": {"make_model": Forwarding},
    "recomputed": RECOMPUTED,
    "recomputed, own loss": {**RECOMPUTED, "loss_fn": own_loss},
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_computes_the_loss(way, tmp_path):
    assert leak(lambda rows: train_once(rows, tmp_path, **WAYS[way])) <= 1e-6


class OverridingTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, logits) if return_outputs else loss


def test_an_overridden_compute_loss(tmp_path):
    for collator in (None, with_mask):
        way = {"collator": collator, "kind": OverridingTrainer}
        assert leak(lambda rows, way=way: train_once(rows, tmp_path, **way)) <= 1e-6


@pytest.mark.parametrize("attention", ["eager", pytest.param("sdpa", marks=pytest.mark.matrix)])
def test_a_compiled_model_keeps_them_apart(attention, tmp_path):
    way = {"make_model": functools.partial(make, "llama", attention), "loss_fn": own_loss}
    assert leak(lambda rows: train_once(rows, tmp_path, **way, **COMPILED)) <= 1e-6


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_lora_gets_the_positions(tmp_path):
    def lora():
        torch.manual_seed(0)
        wrapped = get_peft_model(
            make(),
            LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"),
        )
        return wrapped

    assert leak(lambda rows: train_once(rows, tmp_path, lora)) <= 1e-6


def test_without_boundaries_they_see_one_another(tmp_path):
    assert leak(lambda rows: train_once(rows, tmp_path), document_boundaries=False) > 1e-4


def test_with_a_cache_they_see_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr("forgather.ml.model_inputs.NoCache.__init__", lambda self, model: None)
    monkeypatch.setattr("forgather.ml.model_inputs.NoCache.keywords", {}, raising=False)
    monkeypatch.setattr("forgather.ml.model_inputs.NoCache._configs", [], raising=False)
    assert leak(lambda rows: train_once(rows, tmp_path)) > 1e-4


def evaluated(seed, **given):
    trainer = Trainer(
        make(),
        TrainingArguments(output_dir="unused", use_cpu=True, save_strategy="no"),
        eval_dataset=two_documents(seed),
        **given,
    )
    return trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("loss_fn", [None, own_loss])
def test_an_evaluation_keeps_them_apart(loss_fn):
    assert evaluated(1, loss_fn=loss_fn) == pytest.approx(evaluated(2, loss_fn=loss_fn), abs=1e-6)


def with_mask(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}


def test_a_mask_next_to_positions_does_not_join_documents(tmp_path):
    """Beside a mask, transformers does not look at positions."""
    model = make()
    with torch.no_grad():
        batches = [with_mask(two_documents(seed)) for seed in (1, 2)]
        joined = [model(**batch, use_cache=False).logits[:, -1] for batch in batches]
        assert 1e-3 < (joined[0] - joined[1]).abs().max()
    assert leak(lambda rows: train_once(rows, tmp_path, collator=with_mask)) <= 1e-6


def padded(ids, positions, mask):
    labels = [token if seen and position else -100 for token, position, seen in zip(ids, positions, mask, strict=True)]
    columns = {"input_ids": ids, "position_ids": positions, "attention_mask": mask, "labels": labels}
    return {name: torch.tensor([values]) for name, values in columns.items()}


@pytest.mark.parametrize("at", [0, 1])
def test_padding_among_packed_documents_is_a_document_of_its_own(at):
    model, ids = make(), [5, 6, 7, 8, 9, 10]
    rule = loss_rule(model)
    bare = padded(ids, [0, 1, 2, 0, 1, 2], [1] * 6)
    expected = rule.total(model, rule.prepared({name: bare[name] for name in ("input_ids", "position_ids", "labels")}))
    pad, places = [[3, 3], [0, 0]], ([0, 1] if at == 0 else [1, 2])
    tokens = [*pad[0], *ids] if at == 0 else [*ids, *pad[0]]
    positions = [*places, 0, 1, 2, 0, 1, 2] if at == 0 else [0, 1, 2, 0, 1, 2, *places]
    mask = [*pad[1], *[1] * 6] if at == 0 else [*[1] * 6, *pad[1]]
    actual = rule.total(model, rule.prepared(padded(tokens, positions, mask)))
    assert expected.item() == pytest.approx(actual.item(), rel=1e-6)


def test_a_mask_of_rows_with_one_document_stays():
    model = make()
    batch = padded([5, 6, 7, 3], [0, 1, 2, 3], [1, 1, 1, 0])
    assert torch.equal(batch["attention_mask"], loss_rule(model).prepared(batch)["attention_mask"])


def test_a_mask_that_hides_a_part_of_a_document_is_refused():
    batch = padded([5, 6, 7, 8, 9], [0, 1, 0, 1, 2], [0, 1, 1, 1, 1])
    with pytest.raises(TrainingError, match="hides part of a document") as excinfo:
        loss_rule(make()).prepared(batch)
    assert "FG845" == excinfo.value.code


class Own(LlamaForCausalLM):
    """A class whose author may have changed how it makes positions."""


def test_flash_attention_of_an_own_class_keeps_documents_apart_in_batches_of_one_row_alone():
    model = Own(MODELS["llama"][1])
    model.config._attn_implementation = "flash_attention_2"
    rule = loss_rule(model)
    batch = {name: torch.stack([row[name] for row in two_documents(1)]) for name in two_documents(1)[0]}
    with pytest.raises(TrainingError, match="4 rows hold 8 documents") as excinfo:
        rule.prepared(batch)
    assert "FG857" == excinfo.value.code
    assert rule.prepared({name: rows[:1] for name, rows in batch.items()})[DOCUMENTS].are_packed


def test_the_host_knows_where_documents_begin():
    batch = {name: torch.stack([row[name] for row in two_documents(1)]) for name in two_documents(1)[0]}
    documents = loss_rule(make()).prepared(batch)[DOCUMENTS]
    assert ([5, 7] * 4, 7, True) == (documents.lengths.tolist(), documents.longest, documents.are_packed)
    plain = Documents(None, (2, 6))
    assert ([6, 6], 6, False) == (plain.lengths.tolist(), plain.longest, plain.are_packed)
    shared = Documents(torch.tensor([[0, 1, 0]]), (2, 3))
    assert [2, 1, 2, 1] == shared.lengths.tolist()


def test_a_configuration_is_as_it_was_after_a_call(tmp_path):
    model = Wrapper()
    seen = []
    model.inner.model.register_forward_pre_hook(lambda part, _: seen.append(part.config.use_cache))
    train_once(two_documents(1), tmp_path, lambda: model)
    assert ([False], True) == (seen, model.inner.config.use_cache)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell, self.head = nn.Embedding(VOCAB, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, VOCAB)

    def forward(self, input_ids, position_ids, labels):
        logits = self.head(self.cell(self.embed(input_ids))[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


class WithoutPositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, input_ids, labels):
        return self.inner(input_ids=input_ids, labels=labels).loss


def mamba():
    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=16, state_size=4, num_hidden_layers=2))


def opt():
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=LENGTH, dropout=0.0))


MIXING = {
    "mamba": (mamba, "MambaForCausalLM ignores position_ids"),
    "opt": (opt, "OPTForCausalLM ignores position_ids"),
    "recurrent": (Recurrent, "its GRU carries its state from one document to the next"),
    "without positions": (WithoutPositions, "its forward has no parameter position_ids"),
}


@pytest.mark.filterwarnings("ignore:The fast path is not available")
@pytest.mark.parametrize("name", MIXING)
def test_a_model_that_mixes_documents_is_named_once(name, tmp_path, caplog):
    make_model, reason = MIXING[name]
    assert reason in why_mixed(make_model())
    assert leak(lambda rows: train_once(rows, tmp_path, make_model)) > 1e-5
    told = [record for record in caplog.records if "[FG848]" in record.getMessage()]
    assert 2 == len(told)  # one for each of the two trainings
    assert type(make_model()).__name__ in told[0].getMessage() and reason in told[0].getMessage()


def test_rows_longer_than_the_positions_of_a_model_are_reported_once_and_shorter_documents_are_not(tmp_path, caplog):
    def short():
        model = make()
        model.config.max_position_embeddings = LENGTH - 1
        return model

    def told():
        return [record.getMessage() for record in caplog.records if "[FG864]" in record.getMessage()]

    whole = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in two_documents(1)]
    train_once(whole, tmp_path)
    train_once(two_documents(1), tmp_path, short)  # no document of the row is as long as the row
    assert [] == told()
    model = short()
    for _ in range(2):
        train_once(whole, tmp_path, lambda: model)
    assert 1 == len(told())
    assert f"a row has {LENGTH} tokens, and max_position_embeddings of LlamaForCausalLM is {LENGTH - 1}" in told()[0]


class Half(nn.Module):
    """A module that hands rows of half the length to the model inside."""

    def __init__(self):
        super().__init__()
        self.inner = make()

    def forward(self, input_ids, **kwargs):
        return self.inner(input_ids=input_ids[:, : LENGTH // 2], **kwargs)


SHORT = {**SIZES, "max_position_embeddings": LENGTH - 1}
STRETCHED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
LONG_ROWS = {
    "rotary": (lambda: LlamaForCausalLM(LlamaConfig(**SHORT)), True),
    "a table": (lambda: GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_positions": LENGTH - 1})), True),
    "stretched": (lambda: LlamaForCausalLM(LlamaConfig(**SHORT, rope_parameters=STRETCHED)), False),
    "linear biases": (lambda: FalconForCausalLM(FalconConfig(**SHORT, alibi=True)), False),
    "recurrent": (lambda: RwkvForCausalLM(RwkvConfig(vocab_size=VOCAB, hidden_size=16, context_length=4)), False),
    "adapters": (lambda: get_peft_model(LlamaForCausalLM(LlamaConfig(**SHORT)), LoraConfig(r=2)), True),
    "another input inside": (Half, False),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # of peft
@pytest.mark.parametrize("kind", LONG_ROWS)
def test_rows_are_too_long_only_where_the_configuration_says_so_for_certain(kind, caplog):
    make_model, is_told = LONG_ROWS[kind]
    inputs = ModelInputs(make_model())
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[:, LENGTH // 2 :] = 0
    inputs.prepared({"input_ids": ids, "attention_mask": mask})  # what is too long is padding
    assert "FG864" not in caplog.text
    inputs.prepared({"input_ids": ids})
    assert is_told == ("[FG864]" in caplog.text)


def test_rows_that_a_collator_packs_for_a_model_that_mixes_are_reported_too(tmp_path, caplog):
    rows = [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in two_documents(1)]
    train_once(rows, tmp_path, opt, collator=DataCollatorWithFlattening())
    assert 1 == len([record for record in caplog.records if "[FG848]" in record.getMessage()])


def test_a_collator_that_overwrites_positions_is_refused_for_packed_rows(tmp_path):
    with pytest.raises(TrainingError, match="DataCollatorWithFlattening") as excinfo:
        train_once(two_documents(1), tmp_path, collator=DataCollatorWithFlattening())
    assert "FG858" == excinfo.value.code


def test_rows_of_one_document_are_flattened(tmp_path):
    rows = [{name: row[name] for name in ("input_ids", "labels")} for row in two_documents(1)]
    flat = train_once(rows, tmp_path, collator=DataCollatorWithFlattening())
    stacked = train_once(rows, tmp_path)
    assert max(float((a - b).abs().max()) for a, b in zip(flat["after"], stacked["after"], strict=True)) < 1e-5


LABELS = DataCollatorForLanguageModeling(symbols(), mlm=False)


def test_a_collator_that_overwrites_labels_is_refused(tmp_path):
    with pytest.raises(TrainingError, match="overwrites them with the inputs") as excinfo:
        train_once(two_documents(1), tmp_path, collator=LABELS)
    assert "FG846" == excinfo.value.code
    rows = [{"input_ids": row["input_ids"]} for row in two_documents(1)]
    made = train_once(rows, tmp_path, collator=LABELS)
    assert not torch.equal(made["before"][0], made["after"][0])


def test_random_masks_are_refused_for_a_model_of_the_next_token(tmp_path):
    tokenizer = copy.deepcopy(symbols())
    tokenizer.mask_token = "<unk>"
    random_masks = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3)
    with pytest.raises(TrainingError, match="masks tokens at random") as excinfo:
        train_once(two_documents(1), tmp_path, collator=random_masks)
    assert "FG846" == excinfo.value.code


def test_rows_of_one_document_cause_no_warning(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    rows = [{**row, "position_ids": torch.arange(LENGTH)} for row in two_documents(1)]
    train_once(rows, tmp_path, opt)
    assert "FG848" not in caplog.text
