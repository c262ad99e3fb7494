"""Which figures a run shows: those that mean something for its task, at every place, and no other."""

import functools
import io
import json
import re

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.data import IterableDataset
from transformers import BertConfig, BertForSequenceClassification, MixtralConfig, MixtralForCausalLM

from forgather.ml import Trainer
from forgather.ml.callbacks import JsonLogger, ProgressCallback, RunSummaryCallback, TBLogger, TextSampleCallback
from forgather.ml.callbacks.summary import model_facts
from forgather.ml.metrics import read_metrics
from forgather.ml.model_class import class_name
from tests.ml.callback_scene import letters, rows, tiny_model
from tests.ml.fixtures import Regression, regression_rows


class Pixels(nn.Module):
    """A classifier of whole numbers that are no tokens."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, pixels):
        return self.layer(pixels.float() / 255)


def pixels():
    return [{"pixels": torch.tensor([n, n, 9, 250], dtype=torch.uint8), "labels": n % 3} for n in range(8)]


def bert():
    sizes = {"vocab_size": 10, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=8, max_position_embeddings=8))


def sentences():
    return [{"input_ids": row["input_ids"], "labels": number % 2} for number, row in enumerate(rows(8))]


def mixture():
    sizes = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "head_dim": 4}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, output_router_logits=True, max_position_embeddings=16))


class Endless(IterableDataset):
    def __iter__(self):
        yield from rows(16)


def focal(logits, labels, reduction="mean"):
    losses = F.cross_entropy(logits, labels, reduction="none")
    losses = losses * (1 - (-losses).exp())
    return losses.sum() if reduction == "sum" else losses.mean()


TOKENS, SAMPLES = "tokens", "samples"
LANGUAGE = {"model": tiny_model, "data": rows, "eval": lambda: rows(6)}
NO_TEXT = {"text": False, "unit": SAMPLES, "perplexity": False}
TASKS = {
    "causal LM": {**LANGUAGE, "unit": TOKENS, "perplexity": True},
    "LM with a loss of its own": {**LANGUAGE, "loss_fn": focal, "unit": TOKENS, "perplexity": False},
    "LM with torch's cross entropy": {**LANGUAGE, "loss_fn": nn.CrossEntropyLoss(), "unit": TOKENS, "perplexity": True},
    "LM with weighted classes": {
        **LANGUAGE, "loss_fn": nn.CrossEntropyLoss(weight=torch.ones(10)), "unit": TOKENS, "perplexity": False,
    },
    "LM with a smoothed loss_fn": {
        **LANGUAGE, "loss_fn": functools.partial(F.cross_entropy, label_smoothing=0.1), "unit": TOKENS,
        "perplexity": False,
    },
    "label smoothing": {**LANGUAGE, "args": {"label_smoothing_factor": 0.1}, "unit": TOKENS, "perplexity": False},
    "mixture of experts": {**LANGUAGE, "model": mixture, "unit": TOKENS, "perplexity": True},
    "stream without length": {**LANGUAGE, "data": Endless, "eval": Endless, "unit": TOKENS, "perplexity": True},
    "several evaluation sets": {
        **LANGUAGE, "eval": lambda: {"code": rows(6), "prose": rows(4)}, "sets": ["eval_code", "eval_prose"],
        "unit": TOKENS, "perplexity": True,
    },
    "regression": {"model": Regression, "data": regression_rows, "eval": regression_rows, **NO_TEXT},
    "pixels": {"model": Pixels, "data": pixels, "eval": pixels, "loss_fn": nn.CrossEntropyLoss(), **NO_TEXT},
    "classifier of sentences": {"model": bert, "data": sentences, "eval": sentences, **NO_TEXT},
}  # fmt: skip


def run(settings, folder, task):
    screen = io.StringIO()
    console = Console(file=screen, width=400)
    args = settings(
        max_steps=2, logging_strategy="steps", logging_steps=1, eval_strategy="steps", eval_steps=2,
        save_strategy="steps", save_steps=2, logging_dir=str(folder), **task.get("args", {}),
    )  # fmt: skip
    callbacks = [
        ProgressCallback(console, live=False),
        JsonLogger(),
        TBLogger(),
        TextSampleCallback("a", letters(), max_new_tokens=2, console=console),
        RunSummaryCallback(console=console),
    ]
    data = {"train_dataset": task["data"](), "eval_dataset": task["eval"]()}
    trainer = Trainer(task["model"](), args, **data, loss_fn=task.get("loss_fn"), callbacks=callbacks)
    trainer.train()
    return screen.getvalue()


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_figure_is_shown_where_it_means_something_and_nowhere_else(settings, tmp_path, task, caplog):
    folder = tmp_path / "run"
    screen = run(settings, folder, task)
    summary = json.loads((folder / "summary.json").read_text())
    page = re.sub(r"<(style|script)>.*?</\1>", "", (folder / "report.html").read_text(), flags=re.S)
    tiles = page[page.index('class="tiles"') : page.index('class="charts"')]
    logged = {name for record in read_metrics(folder) for name in record}
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    other = SAMPLES if task["unit"] == TOKENS else TOKENS

    # Speeds: console, closing line, report, metrics and state speak of one unit.
    assert ("tok/s" in screen, "samples/s" in screen) == (task["unit"] == TOKENS, task["unit"] == SAMPLES)
    assert (f"{task['unit']}/s" in tiles, f"{other}/s" in tiles) == (True, False)
    assert f"{task['unit']}_per_second" in logged
    assert not {f"{other}_per_second", "train_tokens_per_second" if other == TOKENS else ""} & logged
    assert (summary[f"{task['unit']}_per_second"] is not None, summary[f"{other}_per_second"]) == (True, None) or (
        other == SAMPLES and summary["samples_per_second"] is not None  # of the whole call, as transformers counts it
    )
    assert (task["unit"] == TOKENS) == (state["num_input_tokens_seen"] > 0)

    # Perplexity: the closing lines and the report.
    assert task["perplexity"] == ("(perplexity" in screen) == ("perplexity" in tiles) == summary["has_perplexity"]

    # Evaluations: each set, at each place.
    for stem in task.get("sets", ["eval"]):
        label = "eval loss" if stem == "eval" else f"eval loss ({stem.removeprefix('eval_')})"
        value = summary["final"][f"{stem}_loss"]
        assert f"{stem}_loss" in logged
        assert 2 == len(re.findall(f"{re.escape(label)} +{value:.4f}", screen))
        assert label in tiles

    # Text: samples of what writes text alone, and one line where there are none.
    assert task.get("text", True) == (folder / "samples.jsonl").exists()
    said = [line for line in caplog.messages if "text" in line or "failed" in line]
    assert said == [] if task.get("text", True) else ["no text is sampled"] == [line.split(":")[0] for line in said]


def test_a_perplexity_that_says_nothing_is_left_out(settings, tmp_path):
    def enormous(model):
        with torch.no_grad():
            model.lm_head.weight.mul_(1e4)
        return model

    task = {**LANGUAGE, "model": lambda: enormous(tiny_model())}
    screen = run(settings, tmp_path / "run", task)
    assert "eval loss" in screen
    assert "(perplexity" not in screen
    assert "<span>perplexity" not in (tmp_path / "run/report.html").read_text()


class FSDPLike(nn.Module):
    """A class of the user whose name begins like those of torch."""


def test_the_class_that_is_named_is_the_users():
    sharded = type("FSDPPixels", (FSDPModule, Pixels), {})()
    assert ("Pixels", "FSDPLike") == (class_name(sharded), class_name(FSDPLike()))
    assert "Pixels" == model_facts(sharded)["class"]
