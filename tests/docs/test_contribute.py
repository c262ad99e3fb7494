"""The examples of the pages for contributors work where the pages say that they go."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from forgather.cli import parsing
from forgather.cli.main import main

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/how-to/contribute"


def module_of(page, name, folder, monkeypatch):
    """Returns the module whose source a page shows, under the name that it would have in the package."""
    source = re.search(r"^```python\n(.*?)^```$", (PAGES / page).read_text(), re.M | re.S)[1]
    file = folder / f"{name.rpartition('.')[2]}.py"
    file.write_text(source)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def test_the_command_of_the_page_runs(tmp_path, monkeypatch, capsys):
    module_of("add_a_command.md", "forgather.cli.commands.count", tmp_path, monkeypatch)
    monkeypatch.setitem(parsing.COMMANDS, "count", "count the nodes of a config")
    project = str(ROOT / "projects/tiny_llama")
    assert 0 == main(["-p", project, "-t", "tiny.yaml", "count"])
    assert re.search(r"^   1  transformers:LlamaConfig$", capsys.readouterr().out, re.M)
    assert 0 == main(["-p", project, "-t", "tiny.yaml", "count", "--json"])
    assert [1] == [json.loads(capsys.readouterr().out)["transformers:LlamaConfig"]]


def test_the_callback_of_the_page_warns_of_slow_steps_alone(tmp_path, monkeypatch, caplog):
    pytest.importorskip("torch")
    from forgather.ml import Trainer, TrainingArguments
    from tests.ml.callback_scene import rows, tiny_model

    made = module_of("add_a_callback.md", "forgather.ml.callbacks.slow_steps", tmp_path, monkeypatch).SlowStepCallback

    def warnings_of(callback):
        caplog.clear()
        args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=4, save_strategy="no", logging_steps=1)
        Trainer(tiny_model(), args, train_dataset=rows(), callbacks=[callback]).train()
        return [record.getMessage() for record in caplog.records if re.match(r"step \d+ took", record.getMessage())]

    assert 2 == len(warnings_of(made(factor=0.0, warmup_steps=2)))
    assert [] == warnings_of(made(factor=1e9, warmup_steps=2))

    # The test that the page shows passes, under both trainers.
    monkeypatch.setattr("forgather.ml.callbacks.SlowStepCallback", made, raising=False)
    names = {}
    exec(re.findall(r"^```python\n(.*?)^```$", (PAGES / "add_a_callback.md").read_text(), re.M | re.S)[1], names)
    for kind in ("ours", "transformers"):
        names["test_each_step_is_timed"](kind, tmp_path / kind)


def test_every_page_is_in_the_index():
    index = (ROOT / "docs/index.md").read_text()
    assert [] == [page.name for page in PAGES.glob("*.md") if f"how-to/contribute/{page.name}" not in index]
