"""Writes the table of what fine-tuning was tested for into docs/finetuning.md, and prints it.

    python scripts/write_finetuning.py build/finetuning.xml

Reads the report that `pytest ... --full --all-cells --junitxml build/finetuning.xml` wrote; `make test-finetune` runs
both. With `--files`, it prints the files of the tests. A failed test ends it with an error, and nothing is written.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from scripts.reports import write  # noqa: E402

PAGE = ROOT / "docs" / "finetuning.md"
HEAD = "| what | test | cases | largest difference | tests |\n|---|---|---|---|---|"
# What is promised, how it is tested, and the tests: files, or the names of some tests of a file.
REACH = (
    (
        "Chat templates",
        "text equal to the original byte for byte; ids and labels equal to those written by hand; the tokens before "
        "an answer equal to the prompt of generation",
        ("tests/ml/test_chat_tokens.py",),
    ),
    (
        "Rows of chats",
        "messages, ShareGPT, Alpaca, prompt and completion; every bad row is named",
        ("tests/ml/test_conversations.py", "tests/ml/test_labelled.py"),
    ),
    (
        "Packed examples",
        "each example once and whole; loss and gradients of packed conversations equal to those in rows of their own, "
        "under every strategy and loss, with a negative control",
        ("tests/ml/test_example_packing.py", "tests/ml/distributed/test_packed_examples.py"),
    ),
    (
        "Generated answers",
        "answers of padded batches equal to those of rows alone; under DDP, FSDP2 and ZeRO equal to those of one "
        "process, and the training has the same bits; metrics equal to those of single answers",
        ("tests/ml/test_answers.py", "tests/ml/distributed/test_answers.py", "tests/cli/test_harness.py"),
    ),
    (
        "Preference pairs",
        "texts and messages; rendered as by the tokenizer's chat template; every bad row is named",
        ("tests/ml/test_preference_rows.py", "tests/ml/test_data_preferences.py"),
    ),
    (
        "Losses of preferences",
        "values and gradients equal to TRL's, and to formulas",
        ("tests/ml/test_preference_losses.py", "tests/ml/test_preference_reference.py"),
    ),
    (
        "Losses of preferences under every strategy",
        "losses and weights equal to those of one process, or refused; with a negative control",
        ("tests/ml/distributed/test_preferences.py",),
    ),
    (
        "GRPO and RLOO through TRL",
        "weights equal to those of plain TRL, whole and with LoRA, in one process and in two; for the same answers, "
        "those of two processes equal to those of one; resume bit for bit; prompts and rewards are checked",
        ("tests/ml/test_rewarded_runs.py",),
    ),
    (
        "Adapters",
        "one process: gradients, resume bit for bit, peft reads the final folder with equal logits",
        ("tests/ml/test_adapters.py", "tests/ml/test_adapter_checkpoints.py"),
    ),
    (
        "Adapters under every strategy",
        "weights equal to those of one process; resume bit for bit, also under another strategy",
        ("tests/ml/distributed/test_adapters.py",),
    ),
    (
        "Killed adapters",
        "a LoRA with token rows is killed at 30 moments and resumed: the same bits in checkpoint and final adapter",
        ("tests/reliability/test_adapter_kills.py",),
    ),
    (
        "Killed runs on prepared rows",
        "packed, mixed and grouped rows; killed at 12 moments each and resumed in another epoch: the same bits",
        ("tests/reliability/test_data_kills.py",),
    ),
    (
        "LoRA+ and optimizers of bitsandbytes",
        "groups equal to peft's; recorded: weights equal to a plain loop, resume bit for bit, or refused",
        ("tests/ml/test_adapter_optimizers.py",),
    ),
    (
        "Recipes of another tool",
        "bytes unchanged; each key is read or answered by name; a small run trains",
        ("tests/projects/test_recipes.py",),
    ),
    (
        "Metrics and predictions",
        "equal to scikit-learn on the gathered rows; each row once, uneven ends included",
        ("tests/ml/test_predictions.py", "tests/ml/test_label_metrics.py", "tests/projects/test_classify.py"),
    ),
    (
        "Predictions under every strategy",
        "equal to those of one process; with a negative control",
        ("tests/ml/distributed/test_predictions.py",),
    ),
    (
        "Tags, texts from texts, images",
        "entities equal to seqeval's; each word, target token and image once in loss and metrics; random changes of "
        "images repeat after a resume; every bad row is named",
        (
            "tests/ml/test_entity_metrics.py",
            "tests/ml/test_tagged.py",
            "tests/ml/test_seq2seq.py",
            "tests/ml/test_images.py",
            "tests/projects/test_tasks.py",
            "tests/projects/test_task_checks.py",
        ),
    ),
    (
        "Generated texts of T5, BART, mBART, Marian, Pegasus and others with an encoder",
        "token ids equal to a loop without padding, cache and generate, and to generate row by row; training has the "
        "bits of a run without; ROUGE is that of rouge-score; export of a LoRA equal to transformers and peft",
        ("tests/ml/test_seq2seq_answers.py",),
    ),
    (
        "Tags, texts from texts, images and own modules under every strategy",
        "losses, metrics and weights equal to those of one process, uneven ends included; with a negative control",
        ("tests/ml/distributed/test_tasks.py",),
    ),
    (
        "Families and methods (projects/gallery)",
        "Llama, Qwen, Mistral, Gemma, Phi, GPT-2 by four methods: the loss of the trained model equals "
        "that of transformers, peft and torch alone; merged equals adapter",
        ("tests/projects/test_gallery.py",),
    ),
    (
        "Text-to-image models",
        "losses and weights equal to a plain loop with the parts of diffusers, for noise, v and flow matching; resume "
        "bit for bit; diffusers reads the LoRA and draws the same picture",
        ("tests/ml/test_diffusion.py", "tests/ml/test_diffusers.py", "tests/projects/test_sd_lora_recipe.py"),
    ),
    (
        "Text-to-image models under every strategy",
        "losses and weights equal to those of one process; resume bit for bit",
        ("tests/ml/distributed/test_diffusion.py",),
    ),
    (
        "New projects",
        "each kind is checked, shown, trained, killed and resumed to the same bits; a classifier on two processes",
        ("tests/cli/test_new_kind.py",),
    ),
    (
        "The demo of fine-tuning",
        "answers of the data equal to those of `inspect`; what is tested is neither trained on nor seen before; "
        "95 % of the answers stop, and full fine-tuning beats the majority by 15 points in two tasks",
        ("tests/projects/test_assistant.py",),
    ),
)


def files():
    """Returns the files of all tests."""
    return [file for _, _, tests in REACH for file in tests]


def table(report):
    """Returns the table for a report of pytest in JUnit's format.

    Args:
        report: the root element of the report.

    Raises:
        SystemExit: if a test failed, or a file was not tested.
    """
    found = defaultdict(list)
    for case in report.iter("testcase"):
        found[case.get("classname")].append(case)
        if case.find("failure") is not None or case.find("error") is not None:
            sys.exit(f"{case.get('classname')}: {case.get('name')} failed; nothing is written")
    return "\n".join([HEAD, *(_row(name, how, tests, found) for name, how, tests in REACH)])


def _row(name, how, tests, found):
    cases = []
    for file in tests:
        own = found.get(file.removesuffix(".py").replace("/", "."), [])
        if not own:
            sys.exit(f"{file} was not tested; nothing is written")
        cases += own
    skipped = sum(case.find("skipped") is not None for case in cases)
    count = f"{len(cases) - skipped}" + (f" ({skipped} skipped)" if skipped else "")
    command = ", ".join(f"`{re.sub('^tests/', '', file)}`" for file in tests)
    return f"| {name} | {how} | {count} | {_worst(cases)} | {command} |"


def _worst(cases):
    """Returns the largest of the figures that the tests recorded, by their names."""
    figures = defaultdict(list)
    for case in cases:
        for one in case.iter("property"):
            if one.get("name", "").startswith("difference"):
                figures[one.get("name")].append(float(one.get("value")))
    texts = []
    for name, values in sorted(figures.items()):
        worst = f"{max(values):.0e}" if max(values) else "0"
        texts.append(worst + name.removeprefix("difference"))
    return ", ".join(texts)


def main(file=ROOT / "build" / "finetuning.xml"):
    """Writes the table for a report."""
    content = table(ElementTree.parse(file).getroot())
    write(PAGE, content)


if __name__ == "__main__":
    if sys.argv[1:] == ["--files"]:
        print(*files())
    else:
        main(*sys.argv[1:])
