"""The recipe of a LoRA on Stable Diffusion: every key is read or answered by name, and it trains with its overlay."""

import runpy
import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from forgather.errors import Severity
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.projects.test_recipes import PROJECT, changed, train

RECIPE, OVERLAY = "deepspeed_zero2_sd_lora", "sd_lora_on_cpu"
HAS_DIFFUSERS = find_spec("diffusers") is not None
LACKING = set() if HAS_DIFFUSERS else {"FG882"}


@pytest.fixture
def project(tmp_path):
    """A copy of the project without what its runs have made."""
    ignored = shutil.ignore_patterns("outputs", "datasets", "models", "__pycache__")
    return Path(shutil.copytree(PROJECT, tmp_path / "recipes", ignore=ignored))


def findings(project, config=RECIPE):
    return check_project(Project(config, str(project))).findings


def errors(found):
    return {one.code: one for one in found if one.severity is Severity.ERROR}


def test_the_check_reports_the_triangle_at_its_line_and_explains_the_words(project):
    found = findings(project)
    assert {"FG742", *LACKING} == set(errors(found))
    triangle = errors(found)["FG742"]
    assert "train_batch_size is 16" in triangle.message and "4 x 4" not in triangle.message.split("is 16")[0]
    file = project / "configs" / "deepspeed_zero2_config.json"
    assert str(file) == triangle.span.file
    assert '"train_batch_size": 16' in file.read_text().split("\n")[triangle.span.line - 1]
    told = {one.path.rpartition(".")[2]: one.message for one in found if one.code == "FG973"}
    assert "WarmupDecayLR" in told["config_file"] and "constant_with_warmup" in told["config_file"]
    assert "4 rows x 4 micro-batches x 4 processes = 64 rows" in told["train_batch_size"]
    assert "fp16" in told["mixed_precision"] and "offload_param" in told["config_file"]


def test_every_key_has_an_effect_or_an_answer(project):
    file = project / "configs" / f"{RECIPE}.yaml"
    yaml = YAML()
    recipe = yaml.load(file)
    answered = {one.path.rpartition(".")[2] for one in findings(project) if one.code == "FG973"}
    before = Project(RECIPE, str(project)).rendered.text
    silent = []
    for section, settings in recipe.items():
        for key, value in settings.items():
            settings[key] = changed(value)
            yaml.dump(recipe, file)
            settings[key] = value
            if Project(RECIPE, str(project)).rendered.text == before and key not in answered:
                silent.append(f"{section}.{key}")
    assert [] == silent


def test_a_key_that_nobody_knows_is_an_error_at_its_line(project):
    file = project / "configs" / f"{RECIPE}.yaml"
    lines = ["further: {x: 1}"]
    for line in file.read_text().split("\n"):
        section = line[:-1] in ("model", "lora", "deepspeed", "training", "dataset", "hardware")
        lines += [line, f"  unknown_to_{line[:-1]}: 1"] if section else [line]
    file.write_text("\n".join(lines))
    wrong = {
        one.span.line
        for one in findings(project)
        if one.severity is Severity.ERROR and one.span and one.span.file == str(file)
    }
    expected = {number for number, line in enumerate(lines, 1) if "unknown_to_" in line or "further" in line}
    assert expected == wrong & expected


def test_two_words_for_the_steps_between_checkpoints_must_agree(project):
    file = project / "configs" / f"{RECIPE}.yaml"
    text = file.read_text()
    file.write_text(text.replace("checkpointing_steps: 500", "checkpointing_steps: 100"))
    assert {"FG742", *LACKING} < set(errors(findings(project)))
    line = text.split("\n").index("  checkpointing_steps: 500") + 1
    assert any(one.span and one.span.line == line for one in errors(findings(project)).values())


def test_a_precision_that_nobody_knows_is_not_left_out(project):
    file = project / "configs" / f"{RECIPE}.yaml"
    text = file.read_text()
    file.write_text(text.replace('mixed_precision: "fp16"', 'mixed_precision: "fp8"'))
    assert text != file.read_text()
    assert "has no setting 'mixed_precision'" in errors(findings(project))["FG810"].message


def test_the_overlay_has_no_error_and_a_reason_for_each_line(project):
    assert LACKING == set(errors(findings(project, OVERLAY)))
    lines = (project / "templates" / "configs" / f"{OVERLAY}.yaml").read_text().split("\n")
    sets = [number for number, line in enumerate(lines) if line.strip().startswith("-- set")]
    assert 8 == len(sets) and all(lines[number - 1].strip().startswith("##") for number in sets)


@pytest.mark.skipif(not HAS_DIFFUSERS, reason="the extra 'diffusion' is not installed: make test-finetune brings it")
def test_it_trains_on_two_processes_under_zero_2_with_its_overlay(project):
    from tests.ml.distributed.gang import import_engine, run_ranks

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        script = runpy.run_path(str(PROJECT.parent / "diffusion" / "make_pipeline.py"))
        script["write_pictures"](project / "models" / "pictures", 32)
        script["write_pipeline"](project / "models" / "sdxl")
    import_engine()
    answers = run_ranks(2, train, project, OVERLAY, timeout=150)
    assert {0} == {status for status, _ in answers}, "\n".join(text for _, text in answers)
    assert "589,824 of" in answers[0][1]
    output = project / "outputs" / "sdxl-lora-deepspeed"
    assert (output / "pytorch_lora_weights.safetensors").exists()
    assert 2 == len(list(output.rglob("images/step-2-*.png")))
