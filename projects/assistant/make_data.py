"""Writes questions about functions of the standard library, with answers, as data/train.jsonl and data/test.jsonl.

A conversation begins with the definition of a function: its signature and the first sentence of its docstring. The
answers come from the syntax tree. Held out are the modules of which `make demo` reads no file: neither the model
nor its fine-tuning has seen them. No signature occurs twice. The same Python writes the same files.

Usage: python make_data.py
"""

import ast
import json
import random
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

from forgather.ml.data import python_sources

READ_BY_DEMO = 6_000_000  # bytes: `max_bytes` of projects/tiny_llama
QUESTIONS = {
    "count": "How many parameters?",
    "defaults": "How many have a default?",
    "last": "Which one is last?",
    "name": "What is its name?",
    "kind": "Class or function?",
}
TESTED = 150  # questions of each task
FROM_ONE_MODULE = 15  # at most, of those
LONGEST = 80  # characters of a signature and of a description


def functions(tree):
    """Yields the functions with two parameters or more, as (signature, answers by task)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            of = node.args
            names = [arg.arg for arg in (*of.posonlyargs, *of.args)] + ([f"*{of.vararg.arg}"] if of.vararg else [])
            names += [arg.arg for arg in of.kwonlyargs] + ([f"**{of.kwarg.arg}"] if of.kwarg else [])
            num_defaults = len(of.defaults) + sum(value is not None for value in of.kw_defaults)
            before = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
            signature = f"{before} {node.name}({ast.unparse(of)}):"
            if len(names) >= 2 and len(signature) <= LONGEST:
                answers = {"count": len(names), "defaults": num_defaults, "last": names[-1], "name": node.name}
                yield signature, {task: str(answer) for task, answer in answers.items()}


def descriptions(tree):
    """Yields the first sentences of docstrings with what they describe, as (sentence, answers by task)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            sentence = re.split(r"(?<=[.!?])\s|\n\s*\n", (ast.get_docstring(node) or "").strip())[0]
            if 0 < len(sentence) <= LONGEST:
                is_class = isinstance(node, ast.ClassDef)
                yield " ".join(sentence.split()), {"kind": "class" if is_class else "function"}


def module_of(file):
    return file.split("/")[0].removesuffix(".py")


def found_in(sources, read, subjects):
    """Returns (module, text, answers) of what occurs in the sources, each text once, in random order."""
    found = {}
    for file, source in zip(sources["file"], sources["text"], strict=True):
        module = module_of(file)
        for text, answers in subjects(ast.parse(source)):
            # The modules for training come first, so that no text of theirs is in the test.
            if text not in found or (module in read and found[text][0] not in read):
                found[text] = (module, text, answers)
    items = list(found.values())
    random.Random(0).shuffle(items)
    return items


def balanced(items):
    """Returns as many descriptions of functions as of classes."""
    kinds = {kind: [item for item in items if item[2]["kind"] == kind] for kind in ("class", "function")}
    return [item for pair in zip(*kinds.values(), strict=False) for item in pair]


def row(module, text, asked, answers):
    messages = []
    for number, task in enumerate(asked):
        begin = f"{text} " if number == 0 else ""
        messages.append({"role": "user", "content": begin + QUESTIONS[task]})
        messages.append({"role": "assistant", "content": answers[task]})
    return {"module": module, "task": asked[0], "messages": messages}


def rows_of(sources, read):
    """Returns the rows for training, with all questions about a text, and those for the test, with one question.

    Args:
        sources: the columns `file` and `text`.
        read: the names of the modules for training.
    """
    draw, train, test = random.Random(0), [], {task: [] for task in QUESTIONS}
    signatures, sentences = (found_in(sources, read, subjects) for subjects in (functions, descriptions))
    for items, mixed in ((signatures, list), (sentences, balanced)):
        for module, text, answers in mixed([item for item in items if item[0] in read]):
            train.append(row(module, text, draw.sample(list(answers), len(answers)), answers))
        tested = Counter()
        for module, text, answers in mixed([item for item in items if item[0] not in read]):
            if tested[module] < FROM_ONE_MODULE and tested.total() < TESTED:
                tested[module] += 1
                for task in answers:
                    test[task].append(row(module, text, [task], answers))
    draw.shuffle(train)
    # In turn, so that the first rows, which are asked at each evaluation, are one of each task.
    return train, [one for some in zip_longest(*test.values()) for one in some if one]


def main():
    out = Path(__file__).parent / "data"
    out.mkdir(exist_ok=True)
    read = {module_of(file) for file in python_sources(max_bytes=READ_BY_DEMO)["file"]}
    for name, rows in zip(("train", "test"), rows_of(python_sources(), read), strict=True):
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        turns = sum(len(row["messages"]) // 2 for row in rows)
        print(f"{name:6} {len(rows)} conversations, {turns} answers, {len({row['module'] for row in rows})} modules")


if __name__ == "__main__":
    main()
