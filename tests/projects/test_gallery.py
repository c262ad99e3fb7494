"""projects/gallery: each family trains by each method, from a tiny model; plain libraries get the numbers of its run."""

import importlib.util
import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from forgather.cli.main import main
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.matrix import thinned
from tests.project.workbench import ROOT

GALLERY = ROOT / "projects/gallery"
FAMILIES = ("llama", "qwen", "mistral", "gemma", "phi", "gpt2")
METHODS = ("full", "lora", "qlora", "dpo")
LEAVES = [(family, method) for family in FAMILIES for method in METHODS]
QUICK = [("llama", "lora"), ("gpt2", "dpo")]
LLAMA_LIKE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES = {
    "gpt2": {"n_embd": 64, "n_layer": 2},
    # The sixth layer of Gemma attends to the whole row; the window of the others is shorter than the rows.
    "gemma": {**LLAMA_LIKE, "num_hidden_layers": 6, "head_dim": 16, "sliding_window": 16},
    "mistral": {**LLAMA_LIKE, "sliding_window": 16},
    "qwen": {**LLAMA_LIKE, "head_dim": 16},
}
"""Sizes of the models that the tests train."""


def train(config, out, *words, **changes):
    """Trains a config of the gallery for two steps, and returns the records of its run."""
    changes = {"+trainer_args.use_cpu": "true", "trainer_args.logging_steps": 1, **changes}
    told = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    line = ["-p", str(GALLERY), "-t", config, "train", "--max-steps", "2", "--output-dir", str(out)]
    assert 0 == main([*line, *words, *told])
    run = max((out / "runs").iterdir())
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Returns a function from a family to the folder of a tiny model, whose weights are stored in bfloat16."""
    made = {}

    def make(family):
        if family not in made:
            out = tmp_path_factory.mktemp(family) / "base"
            sizes = {f"model_config.{name}": size for name, size in SIZES.get(family, LLAMA_LIKE).items()}
            train("tiny", out, "--family", family, **sizes)
            AutoModelForCausalLM.from_pretrained(out).bfloat16().save_pretrained(out)
            made[family] = out
        return made[family]

    return make


def test_each_family_is_trained_by_each_method_in_ten_lines_at_most():
    configs = {file.stem: file.read_text() for file in (GALLERY / "templates/configs").glob("*.yaml")}

    assert {f"{family}_{method}" for family, method in LEAVES} == configs.keys() - {"tiny"}
    assert max(len(text.splitlines()) for name, text in configs.items() if name != "tiny") <= 10
    for family in FAMILIES:
        # What is said of a family is the same in each of its configs.
        own = [text for name, text in configs.items() if name.startswith(f"{family}_")]
        assert 1 == len({tuple(re.findall(r"ns\.(base_model|chat_template) = (.*)", text)) for text in own})


@pytest.mark.parametrize(("family", "method"), LEAVES)
def test_a_config_has_no_finding_but_a_missing_library(family, method):
    found = {finding.code for finding in check_project(Project(f"{family}_{method}", GALLERY)).findings}

    lacks = method == "qlora" and not importlib.util.find_spec("bitsandbytes")
    assert ({"FG882"} if lacks else set()) == found


def loss_sums(model, row):
    """Returns the sum of the losses of a row's targets, and their number."""
    labels = torch.tensor(row["labels"])[1:]
    logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1].float()
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()


def log_probability(model, prompt, answer):
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return F.log_softmax(logits, -1)[range(len(answer)), answer].sum()


@torch.no_grad()
def plain_loss(method, base, out, rows):
    """Returns the loss of a trained model on the rows, each alone, computed by transformers, peft and torch alone."""
    from peft import PeftModel

    if method == "full":
        model = AutoModelForCausalLM.from_pretrained(out).eval()
    else:
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), out).eval()
    if method == "dpo":
        losses = []
        for row in rows:
            sides = [(row["prompt_ids"], row[f"{name}_ids"]) for name in ("chosen", "rejected")]
            better, worse = (log_probability(model, *side) for side in sides)
            with model.disable_adapter():
                base_better, base_worse = (log_probability(model, *side) for side in sides)
            losses.append(-F.logsigmoid(0.1 * (better - base_better - worse + base_worse)))
        return float(torch.stack(losses).mean())
    total, count = (sum(parts) for parts in zip(*(loss_sums(model, row) for row in rows), strict=True))
    return float(total / count)


def linear_layers(folder):
    """Returns the names of all linear layers of a model, the output layer excepted."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    kinds = (torch.nn.Linear, Conv1D)
    return {name for name, module in model.named_modules() if isinstance(module, kinds)} - {"lm_head"}


def adapted_layers(folder):
    names = load_file(folder / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model.").split(".lora_")[0] for name in names}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # peft asks transformers for an old name
@pytest.mark.parametrize(("family", "method"), thinned(LEAVES, lambda *leaf: leaf in QUICK))
def test_a_config_trains_and_plain_libraries_get_its_loss(family, method, bases, tmp_path, record_property):
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    base, out = bases(family), tmp_path / "out"
    # In float32, so that the losses can be compared: products in bfloat16 depend on how rows are padded.
    exact = {"+model.dtype": "float32"} if method in ("lora", "dpo") else {}
    exact |= {"trainer_args.bf16": "false"} if method == "full" else {}

    records = train(f"{family}_{method}", out, "--model", str(base), **exact)

    losses = [record["loss"] for record in records if "loss" in record]
    assert 2 == len(losses) and all(map(math.isfinite, losses))
    if method == "dpo":
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6)
    if method != "full":
        assert linear_layers(base) == adapted_layers(out)
    if method == "qlora":
        return
    [logged] = [record["eval_loss"] for record in records if "eval_loss" in record]
    rows = Project(f"{family}_{method}", GALLERY, model=str(base))("eval_dataset")
    plain = plain_loss(method, base, out, list(rows))
    record_property("difference", abs(logged - plain))
    assert logged == pytest.approx(plain, abs=1e-5)
    if method == "lora" and family != "llama":
        # It is written only if logits and greedy tokens are those of the adapter.
        assert 0 == main(["export", str(out), str(tmp_path / "merged"), "--merge"])


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_an_evaluation_changes_nothing_in_a_training_on_4_bit_weights(bases, tmp_path):
    pytest.importorskip("bitsandbytes")
    words = ["--model", str(bases("llama"))]
    adapters = []
    for number, strategy in enumerate(("steps", "no")):
        out = tmp_path / str(number)
        train("llama_qlora", out, *words, **{"trainer_args.eval_strategy": strategy, "+trainer_args.eval_steps": 1})
        adapters.append(load_file(out / "adapter_model.safetensors"))

    assert all(torch.equal(weight, adapters[1][name]) for name, weight in adapters[0].items())
