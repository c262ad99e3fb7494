"""projects/assistant: its answers are those of `inspect`, what is held out is not trained on, and all of it runs."""

import inspect
import itertools
import json
import re
import runpy
import shutil
import sys
from collections import Counter
from unittest.mock import MagicMock

import pytest

pytest.importorskip("torch")

from forgather.cli.main import main
from forgather.ml.data import python_sources
from forgather.ml.models import from_config
from forgather.project.project import Project
from tests.matrix import thinned
from tests.ml.chat_cases import byte_pairs
from tests.project.workbench import ROOT

PROJECT = ROOT / "projects/assistant"
QUESTIONS = runpy.run_path(str(PROJECT / "make_data.py"))["QUESTIONS"].values()


class Anything(dict):
    """Names that stand for anything, so that a signature can be executed."""

    def __missing__(self, name):
        return MagicMock()


def signature_facts(text):
    """Returns the answers about a signature as Python itself sees them."""
    names = Anything()
    exec(f"{text} pass", {}, names)
    name, function = next((name, value) for name, value in names.items() if inspect.isfunction(value))
    parameters = inspect.signature(function).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    last = list(parameters)[-1]
    return {
        "How many parameters?": str(len(parameters)),
        "How many have a default?": str(sum(one.default is not inspect.Parameter.empty for one in parameters)),
        "Which one is last?": stars.get(last.kind, "") + last.name,
        "What is its name?": name,
    }


def divided(message):
    """Returns the text before the question in a message, and the question."""
    (question,) = (one for one in QUESTIONS if message["content"].endswith(one))
    return message["content"].removesuffix(question).removesuffix(" "), question


def texts(rows):
    return [divided(row["messages"][0])[0] for row in rows]


@pytest.mark.parametrize(("part",), thinned([8, 1], lambda part: part == 8))
def test_the_answers_are_those_of_inspect_and_what_is_held_out_is_not_trained_on(part):
    make = runpy.run_path(str(PROJECT / "make_data.py"))
    sources = python_sources()[:]
    few = {name: values[::part] for name, values in sources.items()}
    read = {make["module_of"](file) for file in python_sources(max_bytes=make["READ_BY_DEMO"])["file"]}

    parts = make["rows_of"](few, read)

    assert parts == make["rows_of"](few, read) and make["PARTS"] == tuple(parts)
    train, *held_out = parts.values()
    assert {row["module"] for row in train} <= read and len(train) == len(set(texts(train)))
    for one, other in itertools.combinations(parts.values(), 2):
        assert {row["module"] for row in one}.isdisjoint(row["module"] for row in other)
        assert set(texts(one)).isdisjoint(texts(other))
    for rows in held_out:
        assert set(make["QUESTIONS"]) == {row["task"] for row in rows} == {row["task"] for row in train}
        assert len(rows) == len({row["messages"][0]["content"] for row in rows})
        of_modules = Counter((row["module"], row["task"]) for row in rows)
        assert max(of_modules.values()) <= make["FROM_ONE_MODULE"] and (part > 1 or 5 * make["ASKED"] == len(rows))
    about = [row for row in train + sum(held_out, []) if texts([row])[0].startswith(("def ", "async def "))]
    for row in about[:: part * 2]:
        facts = signature_facts(texts([row])[0])
        questions = [divided(message)[1] for message in row["messages"][::2]]
        assert [facts[question] for question in questions] == [message["content"] for message in row["messages"][1::2]]
        assert len(questions) == (1 if row["module"] not in read else 4)


def test_held_out_is_what_the_demo_does_not_read():
    rendered = Project("tiny.yaml", str(ROOT / "projects/tiny_llama")).rendered.text
    (read,) = re.findall(r"max_bytes: ([\d_]+)", rendered)
    assert int(read) == runpy.run_path(str(PROJECT / "make_data.py"))["READ_BY_DEMO"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A copy of the project with a few rows of data, beside a tiny model in place of the demo's."""
    from transformers import LlamaConfig

    root = tmp_path_factory.mktemp("projects")
    shutil.copytree(PROJECT, root / "assistant", ignore=shutil.ignore_patterns("output_models", "data"))
    (root / "assistant/data").mkdir()
    base = root / "tiny_llama/output_models/tiny_llama"
    tokenizer = byte_pairs()
    tokenizer.save_pretrained(base)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    from_config(LlamaConfig(**sizes), tokenizer=tokenizer, seed=0).save_pretrained(base)
    rows = [
        {"task": task, "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]}
        for task, text, answer in (("count", "def f(a, b): How many?", "2"), ("name", "def f(a, b): Name?", "f"))
    ]
    for name, times in (("train", 40), ("validation", 1), ("test", 1)):
        lines = [json.dumps(row) + "\n" for row in rows] * times
        (root / f"assistant/data/{name}.jsonl").write_text("".join(lines))
    return root / "assistant"


def compared(folder, capsys, *words):
    capsys.readouterr()
    before, sys.argv = sys.argv, ["compare.py", *words]
    try:
        runpy.run_path(str(folder / "compare.py"), run_name="__main__")
    finally:
        sys.argv = before
    return capsys.readouterr().out


def test_the_three_models_are_graded(folder, capsys):
    for config in ("lora", "full"):
        changes = ["trainer_args.num_train_epochs=40", "trainer_args.eval_strategy=no", "trainer_args.save_strategy=no"]
        changes += ["trainer_args.learning_rate=2e-2", "+trainer_args.use_cpu=true"]
        changes += ["trainer_args.per_device_train_batch_size=8"]
        assert 0 == main(["-p", str(folder), "-t", config, "train", *(w for c in changes for w in ("--set", c))])

    facts = json.loads(compared(folder, capsys, "--json"))

    assert {"base", "lora", "full"} == set(facts["models"]) and 2 == facts["questions"]
    assert {"count": 1.0, "name": 1.0} == facts["majority"]
    assert {"count": 1.0, "name": 1.0} == facts["models"]["full"]["right"] and 1.0 == facts["models"]["full"]["stopped"]
    assert {"count": 0.0, "name": 0.0} == facts["models"]["base"]["right"]
    assert facts["models"]["lora"]["trained_parameters"] < facts["models"]["full"]["trained_parameters"]
    printed = compared(folder, capsys).splitlines()
    assert "| | majority | base | lora | full |" == printed[0] and printed[2].startswith("| count | 100.0% | 0.0% | ")
    (folder / "data/validation.jsonl").write_text((folder / "data/test.jsonl").read_text().splitlines()[0] + "\n")
    assert {"count": 1.0} == json.loads(compared(folder, capsys, "--validation", "--json"))["majority"]
    # The same questions, asked by the command.
    file = str(folder / "data/test.jsonl")
    assert 0 == main(["generate", str(folder / "output_models/lora"), "--prompts", file, "--json"])
    answers = json.loads(capsys.readouterr().out)["answers"]
    right = [one["finish"] == "stop" and one["answer"].strip() == one["expected"] for one in answers]
    assert {"count": float(right[0]), "name": float(right[1])} == facts["models"]["lora"]["right"]
    samples = next(folder.glob("output_models/lora/runs/*/samples.jsonl")).read_text().splitlines()
    assert 2 == len(samples) and all("->" in json.loads(line)["prompt"] for line in samples)
    assert "->" in next(folder.glob("output_models/lora/runs/*/report.html")).read_text().replace("&gt;", ">")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("steps",), thinned([300], lambda steps: False))
def test_the_reach_of_the_demo(steps, tmp_path, capsys, record_property):
    for name in ("tiny_llama", "assistant"):
        ignored = shutil.ignore_patterns("output_models", "data")
        shutil.copytree(ROOT / "projects" / name, tmp_path / name, ignore=ignored)
    folder = tmp_path / "assistant"
    assert 0 == main(["-p", str(tmp_path / "tiny_llama"), "train", "--max-steps", str(steps)])
    runpy.run_path(str(folder / "make_data.py"), run_name="__main__")
    for config in ("lora", "full"):
        assert 0 == main(["-p", str(folder), "-t", config, "train"])

    facts = json.loads(compared(folder, capsys, "--json"))

    # What projects/assistant/README.md says of the three models.
    for model, tasks in (("base", 0), ("lora", 2), ("full", 2)):
        found = facts["models"][model]
        assert found["stopped"] >= 0.95 or model == "base"
        assert tasks <= sum(share >= facts["majority"][task] + 0.15 for task, share in found["right"].items())
