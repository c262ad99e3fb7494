"""What `compute_metrics` and `predict` get is what transformers' trainer gives: the same arrays, for the same rows."""

import weakref

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import BertConfig, BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification

from forgather.errors import TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.trainer import metric_functions
from tests.ml.fixtures import Recorder, regression_rows, tiny_llama

LABELS = {
    "sequence": (BertForSequenceClassification, lambda number, length: {"labels": number % 3}),
    "tokens": (BertForTokenClassification, lambda number, length: {"labels": [number % 3] * (length - 1) + [-100]}),
    "spans": (
        BertForQuestionAnswering,
        lambda number, length: {"start_positions": number % 3, "end_positions": number % 4},
    ),
}


def bert(kind):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return kind(BertConfig(vocab_size=50, num_labels=2 if kind is BertForQuestionAnswering else 3, **sizes))


def rows_of(task, count=11):
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        length = 4 + number % 5 if task == "causal" else 7
        ids = torch.randint(1, 50, (length,), generator=generator).tolist()
        extra = {"labels": ids} if task == "causal" else LABELS[task][1](number, length)
        made.append({"input_ids": ids, "attention_mask": [1] * length, **extra})
    return made


def collate(rows):
    """Pads every column that is a list to the longest of the batch; of another length in each batch."""

    def column(name, filler):
        if not isinstance(rows[0][name], list):
            return torch.tensor([row[name] for row in rows])
        longest = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    return {name: column(name, -100 if name == "labels" else 0) for name in rows[0]}


class Keeping:
    """A `compute_metrics` that keeps what it was called with."""

    def __init__(self):
        self.got = []

    def __call__(self, prediction, compute_result=None):
        details = {} if compute_result is None else {"compute_result": compute_result}
        parts = [getattr(prediction, name) for name in ("predictions", "label_ids", "inputs", "losses")]
        self.got.append((parts, details))
        return {"calls": len(self.got)}


def both(task, folder, *, preprocess=None, **settings):
    """Returns (metrics, what `compute_metrics` got) of transformers' trainer and of ours."""
    model = tiny_llama() if task == "causal" else bert(LABELS[task][0])
    found = []
    for trainer, arguments in (
        (transformers.Trainer, transformers.TrainingArguments),
        (Trainer, TrainingArguments),
    ):
        keeping = Keeping()
        args = arguments(str(folder), per_device_eval_batch_size=4, use_cpu=True, report_to="none", **settings)
        made = trainer(
            model,
            args,
            eval_dataset=rows_of(task),
            data_collator=collate,
            compute_metrics=keeping,
            preprocess_logits_for_metrics=preprocess,
        )
        found.append((made.evaluate(), keeping.got))
    return found


def assert_same(theirs, ours):
    if isinstance(theirs, tuple | list):
        assert len(theirs) == len(ours)
        for one, other in zip(theirs, ours, strict=True):
            assert_same(one, other)
    elif theirs is None:
        assert ours is None
    else:
        assert type(theirs) is type(ours)
        assert theirs.dtype == ours.dtype
        np.testing.assert_array_equal(np.asarray(theirs), np.asarray(ours))


@pytest.mark.parametrize("task", ["causal", *LABELS])
def test_compute_metrics_gets_what_transformers_gives_it(task, tmp_path):
    (metrics, theirs), (own, ours) = both(task, tmp_path, include_for_metrics=["inputs", "loss"])
    assert_same([parts for parts, _ in theirs], [parts for parts, _ in ours])
    assert metrics["eval_calls"] == own["eval_calls"] == 1


def test_logits_are_preprocessed_as_in_transformers(tmp_path):
    reduced = {"preprocess": lambda logits, labels: (logits.argmax(-1), (logits * (labels != -100)[..., None]).sum(-1))}
    (_, theirs), (_, ours) = both("tokens", tmp_path, **reduced)
    assert_same(theirs[0][0], ours[0][0])


def test_metrics_of_batches_are_called_as_in_transformers(tmp_path):
    (metrics, theirs), (own, ours) = both("causal", tmp_path, batch_eval_metrics=True)
    assert_same([parts for parts, _ in theirs], [parts for parts, _ in ours])
    assert [details for _, details in ours] == [{"compute_result": done} for done in (False, False, True)]
    assert metrics["eval_calls"] == own["eval_calls"] == 3


@pytest.mark.parametrize("labelled", [True, False])
def test_predict_returns_what_transformers_returns(labelled, tmp_path):
    model, rows = bert(BertForSequenceClassification), rows_of("sequence")
    rows = rows if labelled else [{name: row[name] for name in row if name != "labels"} for row in rows]
    theirs = transformers.Trainer(
        model, transformers.TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), data_collator=collate
    ).predict(rows)
    ours = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True), data_collator=collate).predict(rows)
    assert_same([theirs.predictions, theirs.label_ids], [ours.predictions, ours.label_ids])
    assert ("test_loss" in theirs.metrics) == ("test_loss" in ours.metrics) == labelled


def trainer_of(folder, compute, model=None, rows=None, **settings):
    preprocess = settings.pop("preprocess", None)
    return Trainer(
        bert(BertForSequenceClassification) if model is None else model,
        TrainingArguments(str(folder), use_cpu=True, **settings),
        eval_dataset=rows_of("sequence") if rows is None else rows,
        compute_metrics=compute,
        preprocess_logits_for_metrics=preprocess,
    )


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def test_the_best_model_is_chosen_by_a_metric(tmp_path):
    recorder = Recorder()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "max_steps": 3, "learning_rate": 1e-2}
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, metric_for_best_model="accuracy", load_best_model_at_end=True, **settings
    )
    trainer = Trainer(
        bert(BertForSequenceClassification),
        args,
        train_dataset=rows_of("sequence"),
        eval_dataset=rows_of("sequence"),
        callbacks=[recorder],
        compute_metrics=accuracy,
    )
    trainer.train()
    seen = [line["eval_accuracy"] for line in recorder.lines if "eval_accuracy" in line]
    assert len(seen) == 3
    assert trainer.state.best_metric == max(seen)
    assert all(type(value) is float for value in seen)


def test_several_sets_have_metrics_of_their_own(tmp_path):
    sets = {"few": rows_of("sequence")[:2], "all": rows_of("sequence")}
    metrics = trainer_of(tmp_path, lambda prediction: {"rows": len(prediction.label_ids)}, rows=sets).evaluate()
    assert (metrics["eval_few_rows"], metrics["eval_all_rows"]) == (2, 11)


def test_rows_of_a_model_of_ones_own_are_predicted(tmp_path):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x):
            return self.inner(x).squeeze(-1)

    rows = [{"x": row["x"], "labels": row["y"]} for row in regression_rows(5)]
    model = Own()
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True), loss_fn=nn.MSELoss())
    found = trainer.predict(rows)
    with torch.no_grad():
        expected = model(torch.stack([torch.as_tensor(row["x"]) for row in rows]))
    np.testing.assert_allclose(found.predictions, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("settings", [{}, {"stream": True}])
def test_predictions_above_the_limit_are_refused_with_their_size(tmp_path, monkeypatch, settings):
    # 11 rows of 8 tokens, of 64 logits of 4 bytes
    monkeypatch.setattr(metric_functions, "LIMIT", 11 * 8 * 64 * 4 - 1)
    rows = [{"input_ids": list(range(8)), "labels": list(range(8))} for _ in range(11)]
    model = tiny_llama(vocab_size=64)
    data = torch.utils.data.IterableDataset if settings else None
    given = type("Stream", (data,), {"__iter__": lambda self: iter(rows)})() if data else rows
    refused = trainer_of(tmp_path, lambda prediction: {"n": 1}, model, given)
    with pytest.raises(TrainingError, match="would get 22.0 KiB of predictions") as error:
        refused.evaluate()
    assert error.value.code == "FG870"
    assert "preprocess_logits_for_metrics" in error.value.hint
    for allowed in (
        {"eval_full_logits": True},
        {"preprocess": lambda logits, labels: logits.argmax(-1)},
        {"batch_eval_metrics": True},
    ):
        compute = lambda prediction, compute_result=True: {"n": len(prediction.predictions)}  # noqa: E731
        assert "eval_n" in trainer_of(tmp_path, compute, model, given, **allowed).evaluate()


def test_large_predictions_are_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(metric_functions, "LIMIT", 11 * 8 * 64 * 4 - 1)
    data = [{"input_ids": list(range(8)), "labels": list(range(8))} for _ in range(11)]
    recorder = Recorder()
    settings = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2, "save_strategy": "no"}
    args = TrainingArguments(str(tmp_path), use_cpu=True, **settings)
    trainer = Trainer(
        tiny_llama(vocab_size=64),
        args,
        train_dataset=data,
        eval_dataset=data,
        callbacks=[recorder],
        compute_metrics=accuracy,
    )
    with pytest.raises(TrainingError, match=r"would get 22\.0 KiB") as error:
        trainer.train()
    assert error.value.code == "FG870"
    assert trainer.state.global_step == 0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "returned a float, not a mapping"),
        ({"matrix": [[1]]}, "returned a list for 'matrix', not a number"),
        ({3: 1.0}, "returned the name 3"),
        ({"loss": 1.0}, "returned 'loss', and the evaluation has another 'eval_loss'"),
        ({"f1": 1.0, "eval_f1": 0.5}, "returned 'eval_f1', and the evaluation has another"),
    ],
)
def test_metrics_that_cannot_be_reported_are_refused(tmp_path, returned, message):
    with pytest.raises(TrainingError, match=message) as error:
        trainer_of(tmp_path, lambda prediction: returned).evaluate()
    assert error.value.code == "FG871"


@pytest.mark.parametrize(
    ("preprocess", "message"),
    [
        (lambda logits, labels: logits.sum(), "contain a number"),
        (lambda logits, labels: "none", "contain a str"),
        (lambda logits, labels: logits[:1], r"contain a tensor of shape \(1, 3\)"),
        (lambda logits, labels: (), "contain no tensors"),
        (lambda logits, labels: logits.flatten(), r"contain a tensor of shape \(24,\)"),
        (
            lambda logits, labels: logits[:, None, : 3 if len(logits) == 8 else 2],
            "only the second size may differ",
        ),
    ],
)
def test_predictions_that_are_not_of_rows_are_refused(tmp_path, preprocess, message):
    with pytest.raises(TrainingError, match=message) as error:
        trainer_of(tmp_path, accuracy, preprocess=preprocess).evaluate()
    assert error.value.code == "FG872"


def test_a_function_that_cannot_be_called_after_each_batch_is_refused_before_training(tmp_path):
    with pytest.raises(TrainingError, match="no parameter compute_result") as error:
        trainer_of(tmp_path, accuracy, batch_eval_metrics=True)
    assert error.value.code == "FG873"


def test_the_error_of_a_metric_is_the_users(tmp_path):
    def fails(prediction):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        trainer_of(tmp_path, fails).evaluate()


def test_an_overridden_loss_gives_its_outputs(tmp_path):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    keeping, plain = Keeping(), Keeping()
    model = bert(BertForSequenceClassification)
    Own(
        model, TrainingArguments(str(tmp_path), use_cpu=True), eval_dataset=rows_of("sequence"), compute_metrics=keeping
    ).evaluate()
    trainer_of(tmp_path, plain, model).evaluate()
    assert_same(plain.got[0][0], keeping.got[0][0])


def test_an_evaluation_without_metrics_keeps_no_outputs(tmp_path, monkeypatch):
    """Logits are as large as activations: without `compute_metrics` nothing may hold those of an earlier batch."""
    alive = []
    model = tiny_llama()
    trainer = Trainer(model, TrainingArguments(str(tmp_path), use_cpu=True), data_collator=collate)
    inner = model.forward

    def noting(*args, **kwargs):
        alive.append(sum(one() is not None for one in made))
        output = inner(*args, **kwargs)
        made.append(weakref.ref(output.logits))
        return output

    made = []
    monkeypatch.setattr(model, "forward", noting)
    trainer.evaluate([{"input_ids": [1, 2, 3], "labels": [1, 2, 3]} for _ in range(24)])
    assert alive == [0, 0, 0]
