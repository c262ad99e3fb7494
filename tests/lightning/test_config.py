"""A config with the words of Lightning's Trainer: what `fgcli check` says of them, and a run of it."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forgather.cli.options import OWN_NAMES
from forgather.launch.in_process import plan_run, prepare_run, run
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.project.workbench import make_project

MODULE = """
import torch
import forgather.lightning as L

class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x).squeeze(-1), y)

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(x).squeeze(-1), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1)), batch_size=4)
"""
CONFIG = """\
-- extends 'trainers/lightning.yaml'

[module]
    !singleton:line.py:Line@module []

[train_dataloaders]
    !singleton:line.py:loader@train_dataloaders []

[val_dataloaders]
    !singleton:line.py:loader@val_dataloaders []

[trainer_callbacks]
    - !singleton:forgather.lightning:ModelCheckpoint {CHECKPOINT}
    - !singleton:forgather.lightning:EarlyStopping {monitor: val_loss}

[trainer_words]
    == super()
    accelerator: cpu
    max_epochs: 2
    logger: false
    enable_progress_bar: false
"""
CHECKPOINT = '{filename: "model-{epoch:02d}", monitor: val_loss, save_top_k: 2, save_last: true}'


def project(folder, *lines, checkpoint=CHECKPOINT, more="", trust=True):
    text = CONFIG.replace("{CHECKPOINT}", checkpoint) + "".join(f"    {line}\n" for line in lines) + more
    return Project("main", make_project(folder, {"templates/configs/main.yaml": text, "line.py": MODULE}), trust=trust)


def findings(folder, *lines, **more):
    found = check_project(project(folder, *lines, **more), reserved=OWN_NAMES).findings
    return [(one.code, one.span.line, one.path) for one in found if one.severity.value == "error"]


GOOD = [
    ("precision: bf16-mixed", "gradient_clip_val: 0.5", "accumulate_grad_batches: {0: 2, 1: 1}"),
    ("strategy: deepspeed_stage_2",),
    ("strategy: !singleton:forgather.lightning:FSDPStrategy {sharding_strategy: SHARD_GRAD_OP, cpu_offload: true}",),
    ("strategy: !singleton:forgather.lightning:DDPStrategy {start_method: popen, static_graph: true}",),
    ("max_time: 00:01:00:00", "min_epochs: 1", "limit_train_batches: 0.5", "fast_dev_run: false"),
]


@pytest.mark.parametrize("lines", GOOD)
def test_words_that_mean_something_have_no_findings(lines, tmp_path):
    assert [] == findings(tmp_path, *lines)


WRONG = [
    ("precision: bf16-true", "FG811", "trainer.precision"),
    ("max_epoch: 3", "FG810", "trainer.max_epoch"),
    ("strategy: ddp_spawn", "FG811", "trainer.strategy"),
    ("strategy: !singleton:forgather.lightning:DDPStrategy {start_method: fork}", "FG811", "trainer.strategy"),
    ("limit_val_batches: 1.5", "FG813", "trainer.limit_val_batches"),
    ("enable_checkpointing: false", "FG812", "trainer.callbacks"),
    ("devices: [2, 3]", "FG811", "trainer.devices"),
]


@pytest.mark.parametrize(("line", "code", "path"), WRONG)
def test_a_word_that_is_refused_is_found_at_its_line(line, code, path, tmp_path):
    ((found, number, where),) = findings(tmp_path, line)
    assert (code, path) == (found, where)
    # The last line is the wrong one; a conflict with the callbacks is at those.
    assert number == (13 if path == "trainer.callbacks" else 22)


def test_an_option_of_a_callback_is_checked(tmp_path):
    (found,) = findings(tmp_path, checkpoint="{monitor: val_loss, every_n_train_steps: 5}")
    assert ("FG811", "trainer.callbacks") == (found[0], found[2])


def test_a_check_of_words_imports_no_torch(tmp_path):
    project(tmp_path)
    code = (
        "import sys\n"
        "from forgather.project.check import check_project\n"
        "from forgather.project.project import Project\n"
        f"assert not [one for one in check_project(Project('main', {str(tmp_path)!r})).findings if one.code != 'FG440']\n"
        "print({'torch', 'transformers', 'accelerate'} & set(sys.modules))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "set()" == told.stdout.strip()


def test_a_module_of_a_config_trains_and_resumes_from_a_link(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plan = plan_run(project(tmp_path))
    outcome = run(plan, prepare_run(plan, ["train"]))
    folder = tmp_path / "output_models/main"
    assert (0, str(folder / "checkpoint-8")) == (outcome.status, outcome.checkpoint)
    assert {
        "last.ckpt": "checkpoint-8",
        "model-epoch=00.ckpt": "checkpoint-4",
        "model-epoch=01.ckpt": "checkpoint-8",
    } == {link.name: os.readlink(link) for link in folder.glob("*.ckpt")}
    # What a run from the beginning would write again.
    shutil.rmtree(folder / "checkpoint-4")
    longer = tmp_path / "templates/configs/main.yaml"
    longer.write_text(longer.read_text().replace("max_epochs: 2", "max_epochs: 3"))
    plan = plan_run(Project("main", tmp_path, trust=True, resume_from_checkpoint=str(folder / "last.ckpt")))
    assert 0 == run(plan, prepare_run(plan, ["train"])).status
    assert ["checkpoint-12", "checkpoint-8"] == sorted(one.name for one in folder.glob("checkpoint-*"))


def test_a_module_is_built_with_the_seed_of_the_words(tmp_path):
    def weight(**variables):
        built = Project("main", tmp_path, trust=True, **variables)("module")
        return built.layer.weight.detach().tolist()

    project(tmp_path)
    assert weight() == weight() != weight(seed=7)


def test_the_script_of_the_page_trains(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/coming-from/lightning.md").read_text(encoding="utf-8")
    script = re.search("```python\n(.*?)```", page, re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    # The seed of a script stays that of its process.
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")
    exec(compile(script, "page", "exec"), {"__name__": "page"})
    assert 3 == len(list((tmp_path / "checkpoints").glob("model-epoch=*.ckpt")))


def test_the_config_of_the_page_has_no_findings(tmp_path):
    page = (Path(__file__).parents[2] / "docs/coming-from/lightning.md").read_text(encoding="utf-8")
    text = re.search("```yaml\n(.*?)```", page, re.DOTALL)[1]
    folder = make_project(tmp_path, {"templates/configs/main.yaml": text, "line.py": MODULE})
    assert () == check_project(Project("main", folder, trust=True), reserved=OWN_NAMES).findings
