"""Generated code runs on the real libraries: the same model, the same losses as the config's own run."""

import importlib.util
import json
import subprocess
import sys

import pytest

if not importlib.util.find_spec("torch"):
    pytest.skip("needs torch", allow_module_level=True)

from forgather.cli.main import main
from forgather.launch import plan_run, prepare_run, run
from forgather.project.project import Project
from tests.project.workbench import TINY_TRAINING

CONFIG = (
    TINY_TRAINING.replace("max_steps: 2", "max_steps: 3")
    + """\
    logging_steps: 1
[trainer_callbacks]
    -- include 'callbacks/quiet.yaml'
    mine: !singleton:callbacks.py:Losses
"""
)
CALLBACK = """\
import json
from transformers import TrainerCallback
from .where import FILE


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            with open(FILE, "a") as stream:
                stream.write(json.dumps(logs["loss"]) + "\\n")
"""


@pytest.fixture
def project(tmp_path):
    rows = [{"text": f"row {number} of a text that is long enough to be cut into blocks"} for number in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "templates" / "configs").mkdir(parents=True)
    (tmp_path / "templates" / "configs" / "a.yaml").write_text(CONFIG)
    (tmp_path / "meta.yaml").write_text("name: exported\n")
    (tmp_path / "callbacks.py").write_text(CALLBACK)
    (tmp_path / "where.py").write_text(f"FILE = {str(tmp_path / 'losses.txt')!r}\n")
    return tmp_path


def exported(project, *targets):
    file = project / "exported.py"
    assert 0 == main(["-p", str(project), "code", *targets, "--verify", "-o", str(file)])
    return file


def test_the_exported_model_is_the_model_of_the_project(project):
    import torch

    file = exported(project, "model", "tokenizer")
    spec = importlib.util.spec_from_file_location("exported_model", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    built = module.build()
    model, tokenizer = Project("a", project)("model", "tokenizer")
    assert model.config.to_dict() == built["model"].config.to_dict()
    assert tokenizer.get_vocab() == built["tokenizer"].get_vocab()
    ours, theirs = model.state_dict(), built["model"].state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


OWN_MODEL = """\
[model]
    !singleton:own.py:model
    tokenizer: *tokenizer
"""
OWN = """\
from transformers import LlamaConfig, LlamaForCausalLM

def model(tokenizer):
    sizes = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
"""


SCRIPT = """\
import runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
print(sorted(module for module in sys.modules if module.startswith("forgather")))
"""


@pytest.mark.matrix
def test_the_exported_script_trains_to_the_same_losses_and_loads_nothing_of_the_config_layer(project):
    (project / "own.py").write_text(OWN)
    config = project / "templates" / "configs" / "a.yaml"
    config.write_text(config.read_text() + OWN_MODEL)
    plan = plan_run(Project("a", project))
    assert 0 == run(plan, prepare_run(plan, ["fgcli", "train"])).status
    losses = (project / "losses.txt").read_text()
    (project / "losses.txt").unlink()

    # What a process imports, and what libraries say of it, needs one that has imported nothing.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(exported(project))], capture_output=True, text=True, check=False
    )

    assert 0 == done.returncode, done.stderr
    assert 3 == len(losses.splitlines())
    assert losses == (project / "losses.txt").read_text()
    # DeepSpeed warns of a missing device where it is imported, which saving a model is no reason for.
    assert "accelerator" not in done.stderr
    assert (project / "out" / "model.safetensors").is_file()
    loaded = done.stdout.splitlines()[-1]
    assert "forgather.ml.models" in loaded
    assert [] == [part for part in ("forgather.config", "forgather.project", "forgather.codegen") if part in loaded]
