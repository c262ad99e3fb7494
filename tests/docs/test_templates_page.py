"""The recipe of the page on templates trains, and learns completions alone."""

import json
import re
from pathlib import Path

from forgather.ml.data.tokenizer import train_bpe
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.ml.fixtures import tiny_llama
from tests.project.workbench import make_project

PAGE = Path(__file__).parents[2] / "docs" / "templates.md"


def recipe():
    part = PAGE.read_text().partition("## Fine-tuning on examples")[2]
    return re.search(r"```yaml\n(.*?)```", part, re.S).group(1)


def test_fine_tuning_on_examples_trains_a_local_model_on_completions(tmp_path):
    from datasets import Dataset

    rows = [{"prompt": f"{number} and {number}? ", "completion": f"is {2 * number}"} for number in range(40)]
    texts = [row["prompt"] + row["completion"] for row in rows]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    bench = make_project(tmp_path / "bench", {"templates/configs/main.yaml": recipe(), "examples.jsonl": lines})
    tokenizer = train_bpe(Dataset.from_dict({"text": texts}), 300, cache_dir=tmp_path / "cache")
    tokenizer.save_pretrained(bench / "model")
    tiny_llama(vocab_size=300, num_hidden_layers=1).save_pretrained(bench / "model")

    assert [] == list(check_project(Project("main", bench)).findings)
    project = Project("main", bench, overrides=(("main.args.max_steps", "2"),))
    trainer = project("main", run_dir=str(tmp_path / "run"))
    trainer.train()

    row = trainer.train_dataset[0]
    learned = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label != -100]
    text, answer = (tokenizer.decode(ids) for ids in (row["input_ids"], learned))
    assert text.removesuffix("<|endoftext|>") in texts
    assert re.fullmatch(r"is \d+<\|endoftext\|>", answer)
    assert 2 == trainer.state.global_step
