"""Answers of models with an encoder: those of a plain loop over rows, references that are the labels, and no trace in training."""

import json
from functools import partial

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    BlenderbotConfig,
    BlenderbotSmallConfig,
    EvalPrediction,
    LongT5Config,
    M2M100Config,
    MarianConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    T5Config,
    UMT5Config,
)

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapters import lora
from forgather.ml.data import PaddingCollator, seq2seq_rows, tokenize_seq2seq
from forgather.ml.data.answer_rows import source_rows
from forgather.ml.generation.batch import batch_answers
from forgather.ml.generation.encoder_decoder import answers_alone, refuse_other_beginning
from forgather.ml.generation.generator import CONTEXT, LENGTH, STOP, Generator, Sampling
from forgather.ml.models import seq2seq_from_config, seq2seq_from_pretrained
from forgather.ml.text_metrics import TextMetrics, rouge
from forgather.ml.trained_adapter import TrainedAdapter
from forgather.ml.trainer.adapter_export import export_adapter, export_merged
from tests.matrix import thinned
from tests.ml.chat_cases import byte_pairs
from tests.ml.fixtures import Recorder

POSITIONS, MOST = 24, 8
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
# Few buckets, so that tokens of one source are in several of them, and the far ones share one.
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
BART |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": POSITIONS}
BART |= {"dropout": 0.0, "activation_function": "gelu"}
CONFIGS = {
    "T5": lambda: T5Config(**T5),
    "mT5": lambda: MT5Config(**T5),
    "UMT5": lambda: UMT5Config(**T5),
    "BART": lambda: BartConfig(**BART),
    "mBART": lambda: MBartConfig(**BART),
    "Marian": lambda: MarianConfig(**BART),
    "Pegasus": lambda: PegasusConfig(**BART),
    "M2M-100": lambda: M2M100Config(**BART),
    "Blenderbot": lambda: BlenderbotConfig(**BART),
    "Blenderbot small": lambda: BlenderbotSmallConfig(**BART),
    # Not known to be the same in batches, so its rows are answered one by one.
    "LongT5": lambda: LongT5Config(**T5, local_radius=4),
}
LENGTHS = (3, 9, 1, 21, POSITIONS, 14, 6)


def sources_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def scattered(config, dtype=torch.float64, scale=1.0):
    """Returns a model whose next token depends on the source and on the tokens before it."""
    model = seq2seq_from_config(config, tokenizer=byte_pairs(), dtype=dtype, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model.eval()


def alone(model, source, stops, most=MOST):
    """The oracle: one row, without padding, without a cache, without `generate`."""
    written = [model.config.decoder_start_token_id]
    forced = model.generation_config.forced_bos_token_id
    while len(written) <= most:
        inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([written])}
        with torch.no_grad():
            following = int(model(**inputs, use_cache=False).logits[0, -1].argmax())
        if forced is not None and len(written) == 1:
            following = forced
        if model.generation_config.forced_eos_token_id is not None and len(written) == most:
            following = model.generation_config.forced_eos_token_id
        written.append(following)
        if following in stops:
            break
    return tuple(written[1:])


def by_generate(model, source, most=MOST):
    """The second oracle: transformers' own `generate`, row by row, without padding."""
    made = model.generate(input_ids=torch.tensor([source]), max_new_tokens=most, do_sample=False, num_beams=1)
    return tuple(made[0, 1:].tolist())


@pytest.mark.parametrize("kind", thinned(list(CONFIGS), lambda kind: kind in ("T5", "BART")))
def test_answers_of_a_batch_are_those_of_rows_alone(kind):
    model, tokenizer = scattered(CONFIGS[kind]()), byte_pairs()
    before = [alone(model, source, ()) for source in sources_of()]
    # Tokens that some rows generate late, and others never: some answers stop early, each at a step of its own.
    late = sorted((ids.index(token), token) for ids in before for token in set(ids) if ids.index(token) < MOST - 2)[-3:]
    model.generation_config.eos_token_id = [model.generation_config.eos_token_id, *(token for _, token in late[::2])]
    generator = Generator(model, tokenizer)
    expected = [alone(model, source, generator.stop_ids) for source in sources_of()]

    found = batch_answers(generator, sources_of(), Sampling(max_new_tokens=MOST))

    assert expected == [answer.ids for answer in found]
    assert expected == [by_generate(model, source) for source in sources_of()]
    assert [generator.answer(source, Sampling(max_new_tokens=MOST)) for source in sources_of()] == found
    assert {STOP, LENGTH} == {answer.finish for answer in found}
    assert len({len(answer) for answer in expected}) >= 2 and len({*expected}) >= 3
    # Blenderbot repeats no three tokens of the source, of which padding would be some.
    assert (kind in ("LongT5", "Blenderbot")) == answers_alone(model)
    short = batch_answers(generator, sources_of(), Sampling(max_new_tokens=MOST), max_length=4)
    assert [alone(model, source, generator.stop_ids, 3) for source in sources_of()] == [one.ids for one in short]


def test_padding_that_is_seen_changes_answers(monkeypatch):
    """The negative control."""
    from forgather.ml.generation import batch

    padded = batch._padded
    seen = lambda *given: {**(made := padded(*given)), "attention_mask": torch.ones_like(made["input_ids"])}  # noqa: E731
    monkeypatch.setattr(batch, "_padded", seen)
    generator = Generator(scattered(CONFIGS["T5"]()), byte_pairs())
    found = batch_answers(generator, sources_of(), Sampling(max_new_tokens=MOST))
    assert [alone(generator.model, source, generator.stop_ids) for source in sources_of()] != [one.ids for one in found]


def test_a_source_without_a_position_has_an_empty_answer():
    generator = Generator(scattered(CONFIGS["BART"]()), byte_pairs())
    (found,) = batch_answers(generator, sources_of([POSITIONS + 1]), Sampling(max_new_tokens=MOST))
    assert ((), CONTEXT) == (found.ids, found.finish)
    with pytest.raises(TrainingError, match="25 tokens, and the model has 24 positions for its encoder") as refused:
        generator.answer(sources_of([POSITIONS + 1])[0], Sampling())
    assert "FG921" == refused.value.code


def run(folder, make=None, adapter=None, **settings):
    """Trains with dropout on words for numbers; returns the trainer, its weights and its losses."""
    words, tokenizer, recorder = "again Hello again a again again Hello".split(), byte_pairs(), Recorder()
    file = folder / "rows.jsonl"
    rows = [{"source": str(n), "target": word} for n, word in enumerate(words)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = tokenize_seq2seq(seq2seq_rows(str(file)), tokenizer, source_prefix="say ", cache_dir=folder)
    plain = {"max_steps": 24, "learning_rate": 3e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 12}
    plain |= {"per_device_train_batch_size": 7, "per_device_eval_batch_size": 3, "use_cpu": True}
    config = T5Config(**{**T5, "dropout_rate": 0.1})
    trainer = Trainer(
        make or (lambda: seq2seq_from_config(config, tokenizer=tokenizer)),
        TrainingArguments(str(folder), **{**plain, "save_strategy": "best", **settings}),
        train_dataset=made,
        eval_dataset={"all": made, "few": made.select(range(2))},
        processing_class=tokenizer,
        data_collator=PaddingCollator(tokenizer),
        adapter=adapter,
        callbacks=[recorder],
    )
    trainer.train()
    losses = [line["loss"] for line in recorder.lines if "loss" in line]
    return trainer, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}, losses


GENERATES = {
    "predict_with_generate": True,
    "generation_max_new_tokens": MOST,
    "metric_for_best_model": "all_exact_match",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(tmp_path_factory.mktemp("generates"), **GENERATES)


@pytest.mark.parametrize("metric", thinned(["all_loss"], lambda metric: False))
def test_a_run_that_generates_trains_to_the_same_bits(metric, trained, tmp_path):
    """The quick set has the same for sharded weights, in tests/ml/distributed/test_answers.py."""
    _, weights, losses = run(tmp_path, metric_for_best_model=metric)

    assert trained[2] == losses and 24 == len(losses)
    assert all(torch.equal(weight, trained[1][name]) for name, weight in weights.items())


def test_metrics_are_those_of_the_answers_of_a_plain_loop(trained):
    trainer, tokenizer = trained[0], byte_pairs()
    rows = source_rows(trainer.eval_dataset["all"])
    answers = [by_generate(trainer.model.eval(), row.prompt) for row in rows]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in answers]
    right = [
        text == tokenizer.decode(row.expected, skip_special_tokens=True) for row, text in zip(rows, texts, strict=True)
    ]

    found = trainer.evaluate()

    assert 7 == len(rows) and 0 < sum(right) < 7
    assert sum(right) / 7 == found["eval_all_exact_match"] and sum(right[:2]) / 2 == found["eval_few_exact_match"]
    assert sum(map(len, answers)) / 7 == pytest.approx(found["eval_all_gen_len"])
    told = trainer.predict(trainer.eval_dataset["all"])
    assert [*answers] == [tuple(row[row != -100].tolist()) for row in told.predictions]
    assert [row.expected for row in rows] == [row[row != -100].tolist() for row in told.label_ids]
    (line, *_) = trainer.answered(trainer.eval_dataset["all"]).lines(tokenizer)
    assert {"row": 0, "prompt": "say 0", "reference": "again", "text": texts[0]}.items() <= line.items()
    best = max(line["eval_all_exact_match"] for line in trainer.state.log_history if "eval_all_exact_match" in line)
    assert best == trainer.state.best_metric
    bare = trainer.predict([{"input_ids": row.prompt} for row in rows])
    assert bare.label_ids is None and (bare.predictions == told.predictions).all()


@pytest.mark.matrix
def test_rouge_is_that_of_rouge_score_on_the_same_texts(trained):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rougeL"])
    trainer, tokenizer = trained[0], byte_pairs()
    told = trainer.predict(trainer.eval_dataset["all"])
    texts = [[tokenizer.decode(row[row != -100], skip_special_tokens=True) for row in ids] for ids in told[:2]]
    scores = [scorer.score(wanted, answer)["rougeL"].fmeasure for answer, wanted in zip(*texts, strict=True)]
    found = TextMetrics(tokenizer, [rouge])(EvalPrediction(told.predictions, told.label_ids))
    assert sum(scores) / 7 == pytest.approx(found["rougeL"], abs=1e-12)


@pytest.mark.parametrize(
    ("kind", "settings", "code", "message"),
    [
        ("T5", {"forced_bos_token_id": 7}, "FG988", r"every answer begin with token 7, and .* \(row 0\)"),
        ("BART", {"decoder_start_token_id": 7}, "FG988", "token 2 in training, and with token 7"),
        ("BART", {"decoder_start_token_id": None, "bos_token_id": None}, "FG963", "names no token"),
        ("BART", {"decoder_start_token_id": [2, 3]}, "FG963", r"names several: \[2, 3\]"),
    ],
)
def test_a_beginning_that_is_not_that_of_training_is_refused(kind, settings, code, message, tmp_path):
    model = scattered(CONFIGS[kind]())
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    rows = [{"input_ids": [5, 6], "labels": [7, 1]}] if code == "FG963" else [{"input_ids": [5], "labels": [9, 1]}]
    with pytest.raises(TrainingError, match=message) as refused:
        args = TrainingArguments(str(tmp_path), predict_with_generate=True, use_cpu=True)
        Trainer(model, args, processing_class=byte_pairs()).answered(rows)
    assert code == refused.value.code


@pytest.mark.parametrize(("kind",), thinned(["T5", "BART", "mBART", "Marian"], lambda kind: kind == "mBART"))
def test_the_decoder_of_a_new_model_begins_as_in_training(kind):
    model = seq2seq_from_config(CONFIGS[kind](), tokenizer=byte_pairs())
    labels = torch.tensor([[9, 8, byte_pairs().eos_token_id]])
    begin = model.prepare_decoder_input_ids_from_labels(labels=labels)[0, 0]
    assert begin == model.generation_config.decoder_start_token_id == model.config.decoder_start_token_id


def test_a_forced_first_token_with_which_targets_begin_is_followed():
    model = scattered(CONFIGS["mBART"]())
    model.generation_config.forced_bos_token_id = 33
    refuse_other_beginning(model, [[33, 5, model.config.eos_token_id]])
    generator = Generator(model, byte_pairs())
    found = batch_answers(generator, sources_of(), Sampling(max_new_tokens=MOST))
    assert {33} == {answer.ids[0] for answer in found}
    assert [alone(model, source, generator.stop_ids) for source in sources_of()] == [one.ids for one in found]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "no input_ids"),
        ({"input_ids": [], "labels": [1]}, "1 without a source"),
        ({"input_ids": [3], "labels": [-100, -100]}, "1 without a target"),
        ({"input_ids": [3], "labels": 4}, "1 without a target"),
        ({"input_ids": [3], "labels": [1], "decoder_input_ids": [2]}, "have 'decoder_input_ids'"),
    ],
)
def test_rows_that_are_no_sources_and_targets_are_refused(row, message):
    with pytest.raises(TrainingError, match=message) as refused:
        source_rows([row])
    assert "FG964" == refused.value.code


def test_padding_belongs_to_no_source_and_no_target():
    row = {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0], "labels": [7, 1, -100]}
    assert [(0, [5, 6], [7, 1]), (1, [4], [])] == source_rows([row, {"input_ids": [4]}])


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("kind", thinned(["T5", "BART"], lambda kind: False))
def test_a_lora_is_exported_as_transformers_and_peft_load_it(kind, tmp_path):
    """Trained with answers, then merged and as an adapter: the answers of both are those of the trained model."""
    base, out = tmp_path / "base", tmp_path / "out"
    out.mkdir()
    scattered(CONFIGS[kind](), torch.float32, 0.3).save_pretrained(base)
    make = partial(seq2seq_from_pretrained, base, tokenizer=byte_pairs())
    given = {"max_steps": 3, "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "predict_with_generate": True}
    trainer, _, _ = run(out, make, {"r": 4, "alpha": 16}, **given, generation_max_new_tokens=MOST)
    assert "SEQ_2_SEQ_LM" == trainer.model.peft_config["default"].task_type
    rows = source_rows(trainer.eval_dataset["all"])
    expected = [answer.ids for answer in trainer.answered(trainer.eval_dataset["all"]).answers]
    trained = TrainedAdapter(
        folder=out / "checkpoint-3", is_checkpoint=True, make_base=make, adapter=lora(r=4, alpha=16), seed=42
    )

    merged = export_merged(trained, tmp_path / "merged")
    alone = export_adapter(trained, tmp_path / "adapter")

    plain = AutoModelForSeq2SeqLM.from_pretrained(base)
    before = [by_generate(plain, row.prompt) for row in rows]
    models = [
        AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "merged"),
        PeftModel.from_pretrained(plain, tmp_path / "adapter"),
    ]
    assert [expected, expected] == [[by_generate(model, row.prompt) for row in rows] for model in models]
    assert expected != before
    assert all("greedy ids of" in made["comparison"] for made in (merged, alone))
