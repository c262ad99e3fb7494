"""Every config of every project is planned, or refused by a code that says why."""

import contextlib
import importlib.util
import json
import runpy
import shutil
import sys

import pytest

from forgather.cli.main import main
from tests.matrix import thinned
from tests.project.workbench import ROOT

CONFIGS = [
    f"{file.parents[2].name}/{file.stem}" for file in sorted((ROOT / "projects").glob("*/templates/configs/*.yaml"))
]
QUICK = ("module/wine", "tiny_llama/hub")
REFUSED = {
    "preferences/grpo": "FG969",
    "recipes/deepspeed_zero2_sd_lora": "FG742",
    "recipes/fsdp_qlora_llama7b": "FG844",
    "tiny_llama/hub": "FG843",
}
"""What a plan cannot be made of: generated answers, contradictory settings, and what only the Hub has."""
NEEDS = {"qlora": "bitsandbytes", "sd_lora": "diffusers", "diffusion/": "diffusers", "grpo": "trl"}
FAMILIES = ("gemma", "gpt2", "llama", "mistral", "phi", "qwen")
COMMANDS = {
    "diffusion": [["make_pipeline.py"], ["make_pipeline.py", "--kind", "sd3"]],
    "recipes": [["make_small.py"]],
    **{name: [["make_data.py"]] for name in ("assistant", "classify", "large", "seq2seq", "tag")},
}
"""What the README of a project says to run before its configs, of each project that needs it."""


@pytest.fixture(scope="module")
def projects(tmp_path_factory):
    """Makes a copy of all projects, and what their configs start from."""
    folder = tmp_path_factory.mktemp("copy") / "projects"
    shutil.copytree(ROOT / "projects", folder, ignore=shutil.ignore_patterns("output_models", "models"))
    made = set()

    def train(project, config, *words):
        with contextlib.redirect_stdout(sys.stderr):
            assert 0 == main(["-p", str(folder / project), "-t", config, "train", "--max-steps", "1", *words])

    def prepare(name, monkeypatch):
        project, config = name.split("/")
        if name in QUICK or project in made:
            return folder / project
        made.add(project)
        for command in COMMANDS.get(project, ()):
            if project != "diffusion" or importlib.util.find_spec("diffusers"):
                monkeypatch.setattr(sys, "argv", command)
                runpy.run_path(str(folder / project / command[0]), run_name="__main__")
        if project == "preferences":
            train(project, "base")
        if project == "assistant":
            train("tiny_llama", "tiny")
        if project == "gallery":
            for family in FAMILIES:
                train(project, "tiny", "--family", family)
        if project == "recipes" and importlib.util.find_spec("diffusers"):
            pictures = ["make_pipeline.py", "--pictures", "8", str(folder / "recipes/models")]
            monkeypatch.setattr(sys, "argv", pictures)
            runpy.run_path(str(folder / "diffusion/make_pipeline.py"), run_name="__main__")
        return folder / project

    return prepare


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("name", thinned(CONFIGS, lambda name: name in QUICK))
def test_a_config_is_planned_or_refused_by_a_code(name, projects, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = projects(name, monkeypatch)
    monkeypatch.setenv("FORGATHER_TRUST", str(folder))
    monkeypatch.chdir(folder.parents[1])
    lacks = [library for word, library in NEEDS.items() if word in name and not importlib.util.find_spec(library)]
    expected = "FG882" if lacks else REFUSED.get(name)
    family = name.removeprefix("gallery/").split("_")[0]
    words = ["--model", str(folder / f"output_models/tiny_{family}")] if family in FAMILIES else []
    capsys.readouterr()

    status = main(["-p", str(folder), "-t", name.split("/")[1], "plan", "--json", *words])

    written = capsys.readouterr()
    if expected is not None:
        assert 1 == status and f"[{expected}]" in written.err and "Traceback" not in written.err
        assert " --> " in written.err and "help:" in written.err
        return
    assert 0 == status, written.err
    found = json.loads(written.out)
    for rank in found["ranks"]:
        rows = {row["name"]: row["num_bytes"] for row in rank["phases"][0]["rows"]}
        assert rows["parameters"] > 0 and rank["phases"][0]["num_bytes"] == sum(rows.values())
