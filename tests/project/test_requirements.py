"""Distributions that a config needs: those that are missing or too old are reported at the key, and nothing is imported."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from forgather.requirements import needed_by_call, needed_by_setting, needed_distribution
from forgather.rules import shipped_rules
from tests.project.workbench import ROOT

TABLE = json.loads((ROOT / "forgather/ml/requirements.json").read_text())
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def installed(folder, name, version):
    """Writes the metadata of a distribution, without its module."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize("name", TABLE["distributions"])
def test_the_table_has_the_versions_of_the_extras(name):
    facts = TABLE["distributions"][name]
    if "extra" in facts:
        assert f"{name}>={facts['version']}" in EXTRAS[facts["extra"]]
    assert name in {rule["distribution"] for rule in TABLE["needed_by"]}


def test_each_extra_for_fine_tuning_is_in_the_table_or_serves():
    known = {facts.get("extra") for facts in TABLE["distributions"].values()}
    # `sweep` is for a command, `nvml` for what monitors show besides, and `lightning` for scripts that import it.
    assert {"dev", "tools", "serve", "sweep", "nvml", "lightning"} | known - {None} >= EXTRAS.keys() >= known - {None}


def test_what_is_extra_is_pinned():
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))
    names = {name.lower().replace("_", "-") for name in pinned}
    # setuptools is part of the environment, and no run needs a certain version.
    wanted = {re.split(r"[\[>]", one)[0] for extra in EXTRAS.values() for one in extra} - {"setuptools"}
    assert {one for one in wanted if one.lower() not in names} == set()


def needs(names):
    return sorted({one.distribution for one in names})


@pytest.mark.parametrize(
    ("constructor", "expected"),
    [
        ("forgather.ml.adapters:lora", ["peft"]),
        ("peft:LoraConfig", ["peft"]),
        ("sklearn.metrics:f1_score", ["scikit-learn"]),
        ("rouge_score.rouge_scorer:RougeScorer", ["rouge-score"]),
        ("forgather.ml.text_metrics:rouge", ["rouge-score"]),
        ("transformers:BitsAndBytesConfig", ["bitsandbytes"]),
        ("transformers.utils.quantization_config:BitsAndBytesConfig", ["bitsandbytes"]),
        ("transformers:TorchAoConfig", ["torchao"]),
        ("trl:DPOTrainer", ["trl"]),
        ("diffusers.models:UNet2DModel", ["diffusers"]),
        ("transformers:LlamaConfig", []),
        ("forgather.ml:Trainer", []),
        ("pefty:f", []),
        ("print", []),
    ],
)
def test_a_call_needs_its_library(constructor, expected):
    assert expected == needs(needed_by_call(constructor))


ARGUMENTS = "forgather.ml:TrainingArguments"


@pytest.mark.parametrize(
    ("constructor", "setting", "value", "expected"),
    [
        (ARGUMENTS, "optim", "paged_adamw_32bit", ["bitsandbytes"]),
        (ARGUMENTS, "optim", "adamw_bnb_8bit", ["bitsandbytes"]),
        (ARGUMENTS, "optim", "adamw_8bit", ["bitsandbytes"]),
        (ARGUMENTS, "optim", "adamw_torch_8bit", ["torchao"]),
        (ARGUMENTS, "optim", "adamw_torch_fused", []),
        (ARGUMENTS, "deepspeed", True, ["deepspeed"]),
        (ARGUMENTS, "deepspeed", None, []),
        ("my:Trainer", "adapter", True, []),
        ("forgather.ml:AccelTrainer", "adapter", True, ["peft"]),
        ("forgather.ml:AccelTrainer", "adapter", None, []),
        ("any:thing", "load_in_4bit", True, ["bitsandbytes"]),
        ("any:thing", "load_in_4bit", False, []),
        ("any:thing", "quantization.load_in_8bit", True, ["bitsandbytes"]),
        ("any:thing", "my_load_in_8bit", True, []),
    ],
)
def test_a_value_of_a_setting_needs_its_library(constructor, setting, value, expected):
    assert expected == needs(needed_by_setting(constructor, setting, value))


@pytest.mark.parametrize(
    ("version", "lack"),
    [
        (None, "peft >= 0.18, which is not installed"),
        ("0.17.9", "peft >= 0.18, and 0.17.9 is installed"),
        ("0.18.0rc1", "peft >= 0.18, and 0.18.0rc1 is installed"),
        ("0.18.0", None),
        ("0.100", None),
    ],
)
def test_versions_are_compared_as_versions(tmp_path, monkeypatch, version, lack):
    if version:
        installed(tmp_path, "peft", version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert lack == needed_distribution("peft").lack()


def test_what_has_no_extra_is_installed_by_its_name():
    assert "pip install hqq" == needed_distribution("hqq").hint
    assert "pip install 'forgather[quant]'" == needed_distribution("torchao").hint


CONFIG = """\
quantization: &quantization !singleton:transformers:BitsAndBytesConfig@quantization
    load_in_4bit: true
adapter: !singleton:forgather.ml.adapters:lora
    r: 4
score: !partial:rouge_score.rouge_scorer:RougeScorer []
arguments: !singleton:transformers:TrainingArguments@args
    output_dir: out
    optim: paged_adamw_8bit
nested: !partial:dict
    quantization: {load_in_8bit: true}
main: !partial:print [*quantization]
"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "templates/configs").mkdir(parents=True)
    (tmp_path / "meta.yaml").write_text("name: needs\n")
    (tmp_path / "templates/configs/a.yaml").write_text(CONFIG)
    old = tmp_path / "old"
    for name in ("bitsandbytes", "peft", "rouge-score"):
        installed(old, name, "0.0.1")
    return tmp_path


def checked(project, *words):
    """Runs a command in a process that finds old distributions first, and returns it and its findings."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project / "old"), str(ROOT)])}
    script = "import sys; from forgather.cli.main import main; status = main(sys.argv[1:]); "
    script += "print(sorted({'peft', 'bitsandbytes', 'rouge_score', 'torch'} & {*sys.modules}), file=sys.stderr)"
    command = [sys.executable, "-c", script + "; sys.exit(status)", *words]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True)


def test_the_check_reports_each_at_its_key_and_imports_nothing(project):
    done = checked(project, "check", "--json")
    assert done.stderr.endswith("[]\n"), done.stderr
    found = [one for one in json.loads(done.stdout)["findings"] if one["code"] == "FG882"]
    assert [
        (2, "quantization.load_in_4bit needs bitsandbytes >= 0.49, and 0.0.1 is installed"),
        (3, "lora needs peft >= 0.18, and 0.0.1 is installed"),
        (5, "RougeScorer needs rouge-score >= 0.1.2, and 0.0.1 is installed"),
        (8, "args.optim: paged_adamw_8bit needs bitsandbytes >= 0.49, and 0.0.1 is installed"),
        (10, "quantization.load_in_8bit needs bitsandbytes >= 0.49, and 0.0.1 is installed"),
    ] == [(one["line"], one["message"]) for one in found]
    assert "pip install 'forgather[quant]'" == found[0]["hint"]
    # The missing module is part of the same finding.
    assert not [one for one in json.loads(done.stdout)["findings"] if one["code"] == "FG320"]


def test_a_run_is_refused_before_anything_is_built(project):
    done = checked(project, "train")
    assert 1 == done.returncode
    assert "error[FG882]: quantization.load_in_4bit needs bitsandbytes >= 0.49" in done.stderr
    assert done.stderr.endswith("[]\n") and not list(Path(project).glob("runs"))


def test_no_rule_of_a_constructor_names_a_package_of_its_own():
    assert not [rules.about for every in shipped_rules().values() for rules in every if hasattr(rules, "needs")]
