"""Asks the base model, the LoRA and the fully fine-tuned model the questions of data/test.jsonl; counts right answers.

Settings are chosen by the questions of `--validation`, so that the test is looked at once, at the end.

An answer is right if it is the expected text and the model stopped by itself. The most likely token is taken each time.
The majority is the share of right answers if every question of a task got the answer that is most frequent there:
no constant answer is better.

Usage: python compare.py [--validation] [--json]
"""

import json
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from forgather.ml.data import set_chat_template
from forgather.ml.generation.batch import batch_answers
from forgather.ml.generation.generator import STOP, Generator, Sampling
from forgather.ml.generation.loading import Source, load_for_generation
from forgather.ml.generation.prompt import CHAT, PromptForm, read_questions

HERE = Path(__file__).parent
MODELS = {
    "base": HERE.parent / "tiny_llama" / "output_models" / "tiny_llama",
    "lora": HERE / "output_models" / "lora",
    "full": HERE / "output_models" / "full",
}
LONGEST = 24  # tokens of an answer
BATCH = 50  # questions


def facts_of(folder, questions, tasks):
    """Returns the share of right answers of a model by task, the share that stops, and how it was trained."""
    loaded = load_for_generation(Source(folder=folder, is_checkpoint=False))
    # The base model has no chat template of its own.
    set_chat_template(loaded.tokenizer, HERE / "chat.jinja")
    form, generator = PromptForm(tokenizer=loaded.tokenizer, form=CHAT), Generator(loaded.model, loaded.tokenizer)
    began, right, answers = time.perf_counter(), defaultdict(list), []
    for start in range(0, len(questions), BATCH):
        prompts = [form.ids(question) for question in questions[start : start + BATCH]]
        answers += batch_answers(generator, prompts, Sampling(max_new_tokens=LONGEST))
    for question, task, answer in zip(questions, tasks, answers, strict=True):
        right[task].append(answer.finish == STOP and answer.text.strip() == question.expected)
    summaries = sorted(folder.glob("runs/*/summary.json"))
    summary = json.loads(summaries[-1].read_text(encoding="utf-8")) if summaries else {}
    return {
        "right": {task: sum(them) / len(them) for task, them in right.items()},
        "stopped": sum(answer.finish == STOP for answer in answers) / len(answers),
        "answering_seconds": round(time.perf_counter() - began, 1),
        "trained_parameters": summary.get("model", {}).get("num_trainable"),
        "training_seconds": summary.get("seconds"),
    }


def majorities(questions, tasks):
    expected = defaultdict(Counter)
    for question, task in zip(questions, tasks, strict=True):
        expected[task][question.expected] += 1
    return {task: them.most_common(1)[0][1] / them.total() for task, them in expected.items()}


def table(facts):
    models = facts["models"]
    lines = ["| | majority | " + " | ".join(models) + " |", "|---|" + "---|" * (len(models) + 1)]
    for task, share in facts["majority"].items():
        shares = (share, *(one["right"][task] for one in models.values()))
        lines.append(f"| {task} | " + " | ".join(f"{one:.1%}" for one in shares) + " |")
    for name, key, form in (
        ("answers that stop", "stopped", ".1%"),
        ("trained parameters", "trained_parameters", ","),
        ("seconds of training", "training_seconds", ".0f"),
        ("seconds of answering", "answering_seconds", ".0f"),
    ):
        values = ("" if one[key] is None else f"{one[key]:{form}}" for one in models.values())
        lines.append(f"| {name} | | " + " | ".join(values) + " |")
    return "\n".join(lines)


def main(words):
    data = HERE / "data" / ("validation.jsonl" if "--validation" in words else "test.jsonl")
    missing = [str(path) for path in (data, *MODELS.values()) if not path.exists()]
    if missing:
        sys.exit(f"{missing[0]} does not exist: 'make assistant' makes it")
    questions = read_questions(data)
    tasks = [json.loads(line)["task"] for line in data.read_text(encoding="utf-8").splitlines()]
    models = {name: facts_of(folder, questions, tasks) for name, folder in MODELS.items()}
    facts = {"questions": len(questions), "majority": majorities(questions, tasks), "models": models}
    print(json.dumps(facts, indent=2) if "--json" in words else table(facts))


if __name__ == "__main__":
    main(sys.argv[1:])
