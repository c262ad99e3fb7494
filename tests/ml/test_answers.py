"""Generated answers of an evaluation: those of rows alone, computed from the right prompts, and without a trace in training."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import (
    EvalPrediction,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    Qwen3Config,
)

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.data import CausalLMCollator, tokenize_chats, tokenize_examples
from forgather.ml.data.answer_rows import answer_rows
from forgather.ml.data.chat_template import stop_token_ids
from forgather.ml.generation.batch import batch_answers, looking_back
from forgather.ml.generation.generator import CONTEXT, LENGTH, STOP, Generator, Sampling
from forgather.ml.generation.prompt import chat_ids
from forgather.ml.models import from_config
from forgather.ml.text_metrics import TextMetrics, exact_match, rouge
from forgather.ml.trainer.argument_checks import SettingError
from tests.matrix import thinned
from tests.ml.chat_cases import CELLS, CONVERSATIONS, byte_pairs, dialogue
from tests.ml.fixtures import Recorder, Regression

POSITIONS = 24
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "rope_theta": 1e4}
LONG |= {"factor": 2.0, "original_max_position_embeddings": 12, "partial_rotary_factor": 1.0}
CONFIGS = {
    "GPT-2": lambda: GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS),
    "Llama": lambda: LlamaConfig(**SIZES),
    "Qwen": lambda: Qwen3Config(**SIZES, head_dim=8),
    "Gemma, sliding": lambda: Gemma3TextConfig(**SIZES, head_dim=8, **SLIDING),
    "Phi, long": lambda: Phi3Config(**SIZES, pad_token_id=0, original_max_position_embeddings=12, rope_parameters=LONG),
}
LENGTHS = (3, 9, 1, 21, POSITIONS, 14, 6, 23)
"""Of prompts: some have less room than the longest answer, and one has none."""


def prompts_of(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in lengths]


def alone(model, prompt, stops, most):
    """The oracle: without a cache, without padding."""
    ids, model = list(prompt), model.eval()
    while len(ids) < min(len(prompt) + most, POSITIONS):
        with torch.no_grad():
            ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stops:
            break
    return tuple(ids[len(prompt) :])


def scattered(config):
    """Returns a model whose next token depends on the prompt; with small weights it would repeat itself."""
    model = from_config(config, tokenizer=byte_pairs(), dtype=torch.float64, seed=3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4 if weight.ndim > 1 else 1)
    return model


@pytest.mark.parametrize("kind", thinned(list(CONFIGS), lambda kind: kind in ("GPT-2", "Phi, long")))
def test_answers_of_a_batch_are_those_of_rows_alone(kind):
    model, tokenizer = scattered(CONFIGS[kind]()), byte_pairs()
    before = [alone(model, prompt, (), 8) for prompt in prompts_of()]
    # Three tokens that some rows generate and others do not: some answers stop early, each at a step of its own.
    model.generation_config.eos_token_id = [before[0][1], before[1][3], before[5][0]]
    generator = Generator(model, tokenizer)
    expected = [alone(model, prompt, generator.stop_ids, 8) for prompt in prompts_of()]

    found = batch_answers(generator, prompts_of(), Sampling(max_new_tokens=8))

    assert expected == [answer.ids for answer in found]
    assert {STOP, LENGTH, CONTEXT} == {answer.finish for answer in found}
    assert len({len(answer) for answer in expected}) >= 4 and () in expected
    assert [tokenizer.decode(ids, skip_special_tokens=True) for ids in expected] == [one.text for one in found]
    single = [batch_answers(generator, [prompt], Sampling(max_new_tokens=8))[0] for prompt in prompts_of()]
    assert single == found
    short = batch_answers(generator, prompts_of(), Sampling(max_new_tokens=8), max_length=10)
    assert [ids[: max(0, 10 - length)] for ids, length in zip(expected, LENGTHS, strict=True)] == [a.ids for a in short]


def test_a_saved_setting_that_looks_back_is_followed_as_for_a_row_alone():
    model = scattered(CONFIGS["Llama"]())
    model.generation_config.repetition_penalty, model.generation_config.num_beams = 1.7, 3
    generator, prompts = Generator(model, byte_pairs()), prompts_of((3, 9, 1, 14))

    found = batch_answers(generator, prompts, Sampling(max_new_tokens=8))

    assert [generator.answer(prompt, Sampling(max_new_tokens=8)) for prompt in prompts] == found
    assert [alone(model, prompt, (), 8) for prompt in prompts] != [answer.ids for answer in found]


@pytest.mark.parametrize(
    ("setting", "value", "is_used"),
    [
        ("min_new_tokens", 1, True),
        ("no_repeat_ngram_size", 1, True),
        ("forced_eos_token_id", 1, True),
        ("forced_bos_token_id", 0, True),
        ("repetition_penalty", 1.0, False),
        ("guidance_scale", 1, False),
        ("min_length", 0, False),
    ],
)
def test_a_setting_looks_back_unless_it_has_no_effect(setting, value, is_used):
    model = SimpleNamespace(generation_config=GenerationConfig(**{setting: value}))
    assert ([setting] if is_used else []) == looking_back(model)


@pytest.mark.parametrize(("template", "case"), thinned(CELLS, lambda name, case: case == "many turns"))
def test_the_prompt_of_a_row_is_what_a_user_would_send(template, case):
    messages, tools = CONVERSATIONS[case]
    tokenizer = byte_pairs(template)
    messages = messages if messages[-1]["role"] == "assistant" else messages[:-1]
    (row,) = chat_rows([messages], tokenizer, tools)

    (found,) = answer_rows([row], stop_token_ids(tokenizer))

    assert chat_ids(tokenizer, messages[:-1], tools) == found.prompt
    assert tokenizer.decode(found.expected, skip_special_tokens=True).strip().endswith(messages[-1]["content"].strip())


def chat_rows(conversations, tokenizer, tools=None, **options):
    rows = [{"conversation": json.dumps({"messages": messages, "tools": tools})} for messages in conversations]
    return tokenize_chats(Dataset.from_list(rows), tokenizer, 4000, **options)


def stories(count=7):
    return [
        dialogue(*([f"q{number} " * (1 + number % 4), "a" * (1 + number % 3)] * (1 + number % 2)))
        for number in range(count)
    ]


def run(folder, **settings):
    """Trains with dropout; returns the trainer, its weights and its losses."""
    tokenizer, recorder = byte_pairs("chatml"), Recorder()
    rows = chat_rows(stories(), tokenizer)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 128}, attention_dropout=0.2)
    plain = {"max_steps": 24, "learning_rate": 1e-2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 12}
    plain |= {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 3,
        "use_cpu": True,
        "save_strategy": "best",
    }
    trainer = Trainer(
        lambda: from_config(config, tokenizer=tokenizer),
        TrainingArguments(str(folder), **{**plain, **settings}),
        train_dataset=rows,
        eval_dataset={"all": rows, "few": rows.select(range(2))},
        processing_class=tokenizer,
        data_collator=CausalLMCollator(tokenizer),
        callbacks=[recorder],
    )
    trainer.train()
    losses = [line["loss"] for line in recorder.lines if "loss" in line]
    return trainer, {name: weight.clone() for name, weight in trainer.model.state_dict().items()}, losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    generates = {
        "predict_with_generate": True,
        "generation_max_new_tokens": 6,
        "metric_for_best_model": "all_exact_match",
    }
    return run(tmp_path_factory.mktemp("generates"), **generates)


def test_a_run_that_generates_trains_to_the_same_bits(trained, tmp_path):
    _, weights, losses = run(tmp_path, metric_for_best_model="all_loss")

    assert trained[2] == losses and 24 == len(losses)
    assert all(torch.equal(weight, trained[1][name]) for name, weight in weights.items())


def test_a_run_that_draws_once_more_does_not_train_to_the_same_bits(trained, tmp_path, monkeypatch):
    """The negative control."""
    from forgather.ml.trainer import evaluation

    draws = lambda *args: torch.rand(1) * 0 + 1  # noqa: E731
    monkeypatch.setattr(evaluation.MetricFunctions, "refuse_large", draws)
    whole = evaluation.evaluate

    def drawing(*args, **options):
        torch.rand(1)
        return whole(*args, **options)

    monkeypatch.setattr("forgather.ml.trainer.trainer.evaluate", drawing)
    assert trained[2] != run(tmp_path, metric_for_best_model="all_loss")[2]


def test_metrics_are_those_of_the_answers_to_each_row(trained):
    trainer, tokenizer = trained[0], byte_pairs("chatml")
    rows = answer_rows(trainer.eval_dataset["all"], stop_token_ids(tokenizer))
    generator = Generator(trainer.model, tokenizer)
    answers = [generator.answer(row.prompt, Sampling(max_new_tokens=6)) for row in rows]
    right = [answer.ids == tuple(row.expected) for row, answer in zip(rows, answers, strict=True)]

    found = trainer.evaluate()

    assert 7 == len(rows) and 0 < sum(right) < 7
    assert sum(right) / 7 == found["eval_all_exact_match"] and sum(right[:2]) / 2 == found["eval_few_exact_match"]
    assert sum(len(answer.ids) for answer in answers) / 7 == pytest.approx(found["eval_all_gen_len"])
    assert sum(answer.finish == STOP for answer in answers) / 7 == found["eval_all_stopped"]
    told = trainer.predict(trainer.eval_dataset["all"])
    assert [answer.ids for answer in answers] == [tuple(row[row != -100].tolist()) for row in told.predictions]
    assert [row.expected for row in rows] == [row[row != -100].tolist() for row in told.label_ids]
    assert sum(right) / 7 == told.metrics["test_exact_match"]
    prompts = [{"input_ids": row.prompt} for row in rows]
    bare = trainer.predict(prompts)
    assert bare.label_ids is None and (bare.predictions == told.predictions).all()
    best = max(line["eval_all_exact_match"] for line in trainer.state.log_history if "eval_all_exact_match" in line)
    assert best == trainer.state.best_metric


def test_the_first_rows_alone_are_answered(trained, tmp_path):
    trainer = trained[0]
    args = trainer.args.replace(generation_max_samples=2, output_dir=str(tmp_path))
    few = Trainer(trainer.model, args, eval_dataset=trainer.eval_dataset["all"], processing_class=byte_pairs("chatml"))

    assert few.evaluate()["eval_exact_match"] == trainer.evaluate()["eval_few_exact_match"]


def test_functions_of_texts_get_answers_and_references():
    tokenizer, got = byte_pairs(), []

    def mine(predictions, references):
        got.append((predictions, references))
        return {"mine": 1.5}

    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("ab", "Hello", "ab", "again")]
    width = max(map(len, ids))
    ids = torch.tensor([row + [-100] * (width - len(row)) for row in ids]).numpy()
    found = TextMetrics(tokenizer, [exact_match, mine])(EvalPrediction(ids[:2], ids[2:]))

    assert {"exact_match": 0.5, "mine": 1.5} == found and [(["ab", "Hello"], ["ab", "again"])] == got


@pytest.mark.matrix
def test_rouge_is_the_mean_of_rows():
    pytest.importorskip("rouge_score")
    found = rouge(["the cat sat", "a b c d"], ["the cat ran", "a b c d"])
    # Two of three words, one of two pairs of words, and a common sequence of two words; the second row is right.
    assert {"rouge1": 5 / 6, "rouge2": 3 / 4, "rougeL": 5 / 6, "rougeLsum": 5 / 6} == pytest.approx(found)


def test_rouge_without_its_package_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(TrainingError, match=r"pip install 'forgather\[finetune\]'") as refused:
        rouge(["a"], ["a"])
    assert "FG965" == refused.value.code


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda answers, references: {}, "has no parameter 'predictions'"),
        (lambda predictions, references: 3, "returned a int"),
        (lambda predictions, references: {"exact_match": 3}, "returned 'exact_match', and another function"),
    ],
)
def test_a_function_that_computes_no_metric_is_refused(function, message):
    ids = torch.ones(2, 3, dtype=torch.long).numpy()
    with pytest.raises(TrainingError, match=message) as refused:
        TextMetrics(byte_pairs(), [exact_match, function])(EvalPrediction(ids, ids))
    assert "FG965" == refused.value.code


@pytest.mark.parametrize("functions", [None, exact_match, "exact_match", [exact_match, "rouge"]])
def test_functions_that_are_none_are_refused(functions):
    with pytest.raises(TrainingError, match="functions") as refused:
        TextMetrics(byte_pairs(), functions)
    assert "FG965" == refused.value.code


def test_outputs_of_a_model_are_no_answers():
    with pytest.raises(TrainingError, match="are no token ids") as refused:
        TextMetrics(byte_pairs())(EvalPrediction(torch.zeros(2, 3, 4).numpy(), torch.ones(2, 3).numpy()))
    assert "FG965" == refused.value.code


def labelled(labels, **more):
    return [{"input_ids": [5, 6, 7, 1], "labels": labels, **more}]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (labelled([5, 6, 7, 1]), "1 without a prompt"),
        (labelled([-100] * 4), "1 without a prompt"),
        (labelled([-100, -100, 7, -100]), "1 whose answer is not whole"),
        (labelled([-100, 6, 7, 1], position_ids=[0, 1, 0, 1]), "several documents"),
        (labelled(2), "one label for each token"),
        (labelled([3, 4]), "one label for each token"),
        ([{"text": "a"}], "no input_ids"),
        ([], "there are no rows"),
        (iter([]), "is a stream"),
    ],
)
def test_rows_without_a_prompt_and_an_answer_are_refused(rows, message):
    with pytest.raises(TrainingError, match=message) as refused:
        answer_rows(rows, [1])
    assert "FG964" == refused.value.code


def test_rows_that_cannot_be_answered_are_left_out_and_counted(caplog):
    rows = [
        *labelled([-100, -100, 7, 1], position_ids=range(4)),
        *labelled([5, 6, 7, 1]),
        *labelled([-100, 6, 7, -100]),
    ]

    (found,) = answer_rows(rows, [1])

    assert (0, [5, 6], [7, 1]) == found
    assert [
        "answers are generated for 1 row; left out: 1 without a prompt before the answer, 1 whose answer is not whole"
    ] == caplog.messages


def test_padding_belongs_to_no_prompt():
    rows = [
        {"input_ids": [0, 0, 5, 6, 7, 1], "attention_mask": [0, 0, 1, 1, 1, 1], "labels": [*[-100] * 4, 7, 1]},
        {"input_ids": [5, 6, 0, 0], "attention_mask": [1, 1, 0, 0]},
    ]
    assert [(0, [5, 6], [7, 1]), (1, [5, 6], [])] == answer_rows(rows, [1])


def test_prompt_and_completion_rows_are_answered():
    tokenizer = byte_pairs()
    texts = Dataset.from_dict({"prompt": ["again "], "completion": ["Hello"]})
    rows = tokenize_examples(texts, tokenizer, prompt_column="prompt", completion_column="completion")

    (found,) = answer_rows(rows, [tokenizer.eos_token_id])

    assert "again " == tokenizer.decode(found.prompt) and f"Hello{tokenizer.eos_token}" == tokenizer.decode(
        found.expected
    )


@pytest.mark.parametrize(
    ("model", "tokenizer", "message"),
    [(lambda: Regression(), byte_pairs, "Regression is not a model"), (CONFIGS["Llama"], lambda: None, "no tokenizer")],
)
def test_a_model_that_cannot_answer_is_refused(model, tokenizer, message, tmp_path):
    made = model()
    made = made if isinstance(made, Regression) else from_config(made, tokenizer=byte_pairs())
    with pytest.raises(TrainingError, match=message) as refused:
        Trainer(made, TrainingArguments(str(tmp_path), predict_with_generate=True), processing_class=tokenizer())
    assert "FG963" == refused.value.code


@pytest.mark.parametrize(
    ("setting", "code", "hint"),
    [
        ({"generation_num_beams": 4}, "FG811", "most likely token"),
        ({"generation_config": {"do_sample": True}}, "FG811", "generation_max_new_tokens"),
        ({"predict_with_generate": True, "batch_eval_metrics": True}, "FG814", "batch_eval_metrics"),
        ({"generation_max_length": 0}, "FG813", ""),
    ],
)
def test_settings_of_other_ways_to_generate_are_refused(setting, code, hint, tmp_path):
    with pytest.raises(SettingError) as refused:
        TrainingArguments(str(tmp_path), **setting)
    assert code == refused.value.code and hint in str(refused.value)
