"""The recipes of another tool: their files are unchanged, every key is read or answered by name, and they train."""

import contextlib
import copy
import hashlib
import io
import os
import shutil
import warnings
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from forgather.cli.main import main
from forgather.errors import Severity
from forgather.project.check import check_project
from forgather.project.project import Project

PROJECT = Path(__file__).parents[2] / "projects" / "recipes"
QLORA = "fsdp_qlora_llama7b"
# Of the files in the document that they come from.
DIGESTS = {
    "fsdp_qlora_llama7b.yaml": "5eadd7470e78e08609de4e65ad450ea540f0438cdf9fa1772b1ac06fc0e6e023",
    "deepspeed_zero2_sd_lora.yaml": "4b6d915972fbcb7e96d0f5abdc19b21408c7643c86b7b3146753371d4275463c",
    "deepspeed_zero2_config.json": "11fcf1cd2e621e78f2984084481759b19e3507fd19257a643954c8d16940a6a3",
}
HAS_BITSANDBYTES = find_spec("bitsandbytes") is not None


@pytest.fixture
def project(tmp_path):
    """A copy of the project without what its runs have made."""
    ignored = shutil.ignore_patterns("outputs", "datasets", "models", "__pycache__")
    return Path(shutil.copytree(PROJECT, tmp_path / "recipes", ignore=ignored))


@pytest.mark.parametrize("name", sorted(DIGESTS))
def test_a_recipe_is_unchanged(name):
    assert DIGESTS[name] == hashlib.sha256((PROJECT / "configs" / name).read_bytes()).hexdigest()


def findings(project, config=QLORA):
    """What the check says: code, and line of the recipe; 0 for a line of another file."""
    found = check_project(Project(config, str(project))).findings
    recipe = str(project / "configs" / f"{QLORA}.yaml")
    return {(one.code, one.span.line if one.span and one.span.file == recipe else 0): one for one in found}


def line_of(key):
    lines = (PROJECT / "configs" / f"{QLORA}.yaml").read_text().split("\n")
    return next(number for number, line in enumerate(lines, 1) if line.strip().startswith(f"{key}:"))


# -- QLoRA


def test_the_check_explains_the_words_of_the_qlora_recipe_at_their_lines(project):
    found = findings(project)
    missing = {("FG882", line_of("load_in_4bit")), ("FG882", line_of("optim"))}
    assert (set() if HAS_BITSANDBYTES else missing) == {
        place for place, one in found.items() if one.severity is Severity.ERROR
    }
    assert {("FG825", line_of("warmup_ratio")), ("FG825", line_of("evaluation_strategy")), ("FG456", 0)} == {
        place for place, one in found.items() if one.severity is Severity.WARNING
    }
    told = {one.path.rpartition(".")[2]: one.message for (code, line), one in found.items() if code == "FG973"}
    assert "16 / 64 = 0.25" in told["lora_alpha"]
    assert "4 rows x 4 micro-batches x 4 processes = 64 rows" in told["per_device_train_batch_size"]
    assert all(("FG973", line_of(key)) in found for key in told)
    assert {"forward_prefetch", "limit_all_gathers", "num_gpus", "master_port"} <= set(told)


def changed(value):
    if isinstance(value, bool):
        return not value
    return value[1:] if isinstance(value, str | list) else value + 1


def test_every_key_of_the_qlora_recipe_has_an_effect_or_an_answer(project):
    file = project / "configs" / f"{QLORA}.yaml"
    yaml = YAML()
    recipe = yaml.load(file)
    answered = {one.path.rpartition(".")[2] for (code, _), one in findings(project).items() if code == "FG973"}
    before = Project(QLORA, str(project)).rendered.text
    silent = []
    for section, settings in recipe.items():
        for key, value in settings.items():
            settings[key] = changed(value)
            yaml.dump(recipe, file)
            settings[key] = value
            if Project(QLORA, str(project)).rendered.text == before and key not in answered:
                silent.append(f"{section}.{key}")
    assert [] == silent


def test_a_key_that_nobody_knows_is_an_error_at_its_line(project):
    file = project / "configs" / f"{QLORA}.yaml"
    sections = ("model", "lora", "fsdp", "training", "dataset", "hardware")
    lines = ["further: {x: 1}"]
    for line in file.read_text().split("\n"):
        lines += [line, f"  unknown_to_{line[:-1]}: 1"] if line[:-1] in sections else [line]
    file.write_text("\n".join(lines))
    wrong = {line for (_, line), one in findings(project).items() if one.severity is Severity.ERROR}
    expected = {number for number, line in enumerate(lines, 1) if "unknown_to_" in line or "further" in line}
    assert 7 == len(expected & wrong)


def make_small(project):
    spec = spec_from_file_location("make_small", project / "make_small.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.write(project, 32)


WITHOUT_BITSANDBYTES = """\
-- extends 'configs/qlora_on_cpu.yaml'
[quantization]
    ~
[sample_prompts]
    []
[trainer_args]
    == super()
    optim: adamw_torch
"""


def train(folder, config):
    """Runs what a worker of the launcher runs."""
    os.chdir(folder)
    warnings.simplefilter("ignore")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["-p", str(folder), "-t", config, "train", "--max-steps", "2", "--nproc-per-node", "2"])
    return status, said.getvalue()


@pytest.mark.parametrize("config", ["qlora_on_cpu", "without_bitsandbytes"])
def test_the_qlora_recipe_trains_on_two_processes_with_its_overlay(config, project):
    from tests.ml.distributed.gang import run_ranks

    if config == "qlora_on_cpu" and not HAS_BITSANDBYTES:
        assert {"FG882"} == {one.code for one in check_project(Project(config, str(project)), for_run=True).errors}
        return
    (project / "templates" / "configs" / "without_bitsandbytes.yaml").write_text(WITHOUT_BITSANDBYTES)
    make_small(project)
    answers = run_ranks(2, train, project, config, timeout=150)
    assert {0} == {status for status, _ in answers}, "\n".join(text for _, text in answers)
    assert "131,072 of" in answers[0][1], answers[0][1]
    assert (project / "outputs" / "llama-7b-qlora-fsdp" / "adapter_model.safetensors").exists()


def test_the_overlay_changes_what_the_machine_forces_and_nothing_else(project):
    make_lines = [set(Project(config, str(project)).rendered.text.split("\n")) for config in (QLORA, "qlora_on_cpu")]
    added = [line.strip() for line in make_lines[1] - make_lines[0]]
    keys = {line.partition(":")[0] for line in added if line}
    assert {
        "config_name",
        "nproc_per_node",
        "pretrained_model_name_or_path",
        "per_device_train_batch_size",
        "num_proc",
    } == keys


@pytest.mark.parametrize("name", ["fsdp_qlora_llama7b", "deepspeed_zero2_sd_lora"])
def test_a_section_of_a_recipe_that_is_no_mapping_is_found_at_its_line(project, name):
    file = project / "configs" / f"{name}.yaml"
    recipe = YAML(typ="safe").load(file.read_text())
    for section, values in recipe.items():
        numbers = [key for key in values if key in ("output_dir", "num_gpus", "gradient_accumulation_steps")]
        for path in ((section,), *((section, key) for key in numbers)):
            for value in (None, [1], 3.5):
                other = copy.deepcopy(recipe)
                other[section] = value if len(path) == 1 else {**values, path[1]: value}
                with file.open("w") as stream:
                    YAML().dump(other, stream)
                (found,) = (one for one in check_project(Project(name, str(project))).findings if one.code == "FG952")
                begin = next(n for n, line in enumerate(file.read_text().split("\n"), 1) if f"{path[-1]}:" in line)
                # A list of several lines begins below its key.
                assert (str(file), True) == (found.span.file, found.span.line in (begin, begin + 1))
