"""Writes questions about functions of the standard library, with answers: train, validation and test (data/*.jsonl).

A conversation begins with the definition of a function or with the first sentence of a docstring. The answers come from
the syntax tree. Held out are the modules of which `make demo` reads no file: neither the model nor its fine-tuning has
seen them. Each held-out module belongs either to the validation data, by which settings are chosen, or to the test. No
text occurs twice. The same Python writes the same files.

Usage: python make_data.py
"""

import ast
import json
import random
import re
import zlib
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
PARTS = ("train", "validation", "test")
ASKED = 150  # questions of each task in the validation data, and in the test
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


def part_of(module, read):
    """Returns the part that a module belongs to; `read` has the names of the modules for training."""
    # A digest of the name divides the others: neither their order nor their size has a part in it.
    return "train" if module in read else "test" if zlib.crc32(module.encode()) % 2 else "validation"


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


def held_out_rows(items):
    """Returns a row for each task of a text, for the first texts, with a limit for each module."""
    rows, taken = {}, Counter()
    for module, text, answers in items:
        if taken[module] < FROM_ONE_MODULE and taken.total() < ASKED:
            taken[module] += 1
            for task in answers:
                rows.setdefault(task, []).append(row(module, text, [task], answers))
    return rows


def rows_of(sources, read):
    """Returns the rows of each part: for training with all questions about a text, otherwise with one.

    Args:
        sources: the columns `file` and `text`.
        read: the names of the modules for training.
    """
    draw, train, held_out = random.Random(0), [], {"validation": {}, "test": {}}
    signatures, sentences = (found_in(sources, read, subjects) for subjects in (functions, descriptions))
    for items, mixed in ((signatures, list), (sentences, balanced)):
        parts = {part: [item for item in items if part_of(item[0], read) == part] for part in PARTS}
        for module, text, answers in mixed(parts["train"]):
            train.append(row(module, text, draw.sample(list(answers), len(answers)), answers))
        held_out["validation"] |= held_out_rows(mixed(parts["validation"]))
        # From the end: the settings were chosen by questions from the beginning, some of modules that are now tested.
        held_out["test"] |= held_out_rows(mixed(parts["test"][::-1]))
    draw.shuffle(train)
    # In turn, so that the first rows, which are asked at each evaluation, are one of each task.
    turns = {part: zip_longest(*rows.values()) for part, rows in held_out.items()}
    return {"train": train} | {part: [one for some in rows for one in some if one] for part, rows in turns.items()}


def main():
    out = Path(__file__).parent / "data"
    out.mkdir(exist_ok=True)
    read = {module_of(file) for file in python_sources(max_bytes=READ_BY_DEMO)["file"]}
    for name, rows in rows_of(python_sources(), read).items():
        with (out / f"{name}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        turns = sum(len(row["messages"]) // 2 for row in rows)
        print(f"{name:10} {len(rows)} conversations, {turns} answers, {len({row['module'] for row in rows})} modules")


if __name__ == "__main__":
    main()
