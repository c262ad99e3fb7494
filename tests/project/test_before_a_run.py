"""What a run would meet only when it starts is told before: DeepSpeed's config, packages, classes, words of settings."""

import sys

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.requirements import Requirement
from tests.project.workbench import make_project

ACCEL = "-- extends 'trainers/accel_trainer.yaml'\n\n[trainer_args]\n    == super()\n"
SINGLE = "-- extends 'trainers/trainer.yaml'\n"


def found(tmp_path, config, **files):
    names = {name.replace("__", "."): text for name, text in files.items()}
    folder = make_project(tmp_path / "bench", {"templates/configs/main.yaml": config, **names})
    findings = check_project(Project("main", folder)).findings
    return [
        (one.code, one.span.file.rpartition("/")[2], one.span.line)
        for one in findings
        if one.severity in ("error", "warning")
    ]


DEEPSPEED = {
    "a scheduler of its own": ("    deepspeed:\n        scheduler: {type: WarmupLR}\n", ("FG743", "main.yaml", 6)),
    "an unknown key": ("    deepspeed:\n        zero_optimisation: {stage: 2}\n", ("FG741", "main.yaml", 6)),
    "an offload of weights at stage 2": (
        "    deepspeed:\n        zero_optimization:\n            stage: 2\n            offload_param: {device: cpu}\n",
        ("FG744", "main.yaml", 8),
    ),
    "another batch": ("    deepspeed:\n        train_micro_batch_size_per_gpu: 3\n", ("FG742", "main.yaml", 6)),
    "another whole batch": ("    deepspeed:\n        train_batch_size: 3\n", ("FG742", "main.yaml", 6)),
    "no file": ("    deepspeed: nothing.json\n", ("FG741", "main.yaml", 5)),
}


@pytest.mark.parametrize("case", DEEPSPEED)
def test_a_config_of_deepspeed_is_judged_as_the_run_judges_it(case, tmp_path):
    lines, expected = DEEPSPEED[case]
    assert [expected] == found(tmp_path, ACCEL + lines)


def test_settings_of_deepspeed_next_to_its_stage_are_judged_at_their_lines(tmp_path):
    lines = "    zero_stage: 2\n    offload_optimizer: {device: nvme}\n"
    notes = [("FG825", "main.yaml", 5), ("FG825", "main.yaml", 6)]
    assert [("FG744", "main.yaml", 6), *notes] == sorted(found(tmp_path, ACCEL + lines))
    assert [] == found(tmp_path, ACCEL + "    deepspeed: auto\n    strict: false\n")


def test_a_missing_deepspeed_is_no_fault_of_a_config_that_takes_fsdp2_then(tmp_path, monkeypatch):
    monkeypatch.setattr(Requirement, "lack", lambda self: "a package")
    asked = ACCEL + "    deepspeed: auto\n"
    assert ["FG882"] == [code for code, *_ in found(tmp_path, asked)]
    assert [] == found(tmp_path / "other", asked + "    strict: false\n")


def test_a_file_of_deepspeed_is_reported_at_its_own_line(tmp_path):
    config = ACCEL + '    deepspeed: "{{ project_dir }}/ds.json"\n'
    assert [("FG741", "ds.json", 2)] == found(tmp_path, config, ds__json="{\n  'a': 1\n}\n")


def test_a_whole_batch_is_not_judged_where_the_machine_says_how_many_processes_train(tmp_path):
    for numbers in ("{train_batch_size: 3}", "{train_batch_size: 64, gradient_accumulation_steps: 2}"):
        config = f"{ACCEL}    deepspeed: {numbers}\n\n[meta]\n    == super()\n    nproc_per_node: gpu\n"
        assert [] == found(tmp_path, config)


@pytest.mark.parametrize(
    ("settings", "zero", "code"),
    [
        (["accumulate_grad_batches: {0: 8, 5: 4}"], "gradient_accumulation_steps: 8", None),
        (["accumulate_grad_batches: {0: 8, 5: 4}"], "gradient_accumulation_steps: 4", "FG742"),
        (["global_batch_size: 64", "gradient_accumulation_steps: ~"], "train_batch_size: 64", None),
        (["global_batch_size: 64", "gradient_accumulation_steps: ~"], "gradient_accumulation_steps: 3", "FG742"),
        (["per_device_train_batch_size: 8"], "train_batch_size: 64, gradient_accumulation_steps: 4", None),
        (["per_device_train_batch_size: 8"], "train_batch_size: 64, gradient_accumulation_steps: 3", "FG742"),
        (["per_device_train_batch_size: 8"], "train_batch_size: 60", "FG742"),
    ],
)
def test_deepspeed_has_the_batch_that_the_arguments_give(tmp_path, settings, zero, code):
    config = ACCEL + "".join(f"    {line}\n" for line in [*settings, "num_train_epochs: 9", f"deepspeed: {{{zero}}}"])
    config += "\n[meta]\n    == super()\n    nproc_per_node: 2\n"
    assert [code] * bool(code) == [one for one, *_ in found(tmp_path, config)]


def test_the_check_of_deepspeed_needs_no_torch(tmp_path):
    torch = sys.modules.get("torch")
    found(tmp_path, ACCEL + "    deepspeed: auto\n")
    assert torch is sys.modules.get("torch")


OTHERS = {
    "a word of recomputation": (
        ACCEL + "    fsdp: full_shard\n    fsdp_config: {activation_checkpointing: selektive}\n",
        [("FG813", "main.yaml", 6)],
    ),
    "several classes to wrap": (
        ACCEL
        + "    fsdp: full_shard\n    fsdp_config:\n        transformer_layer_cls_to_wrap: [LlamaDecoderLayer, Block]\n",
        [("FG883", "main.yaml", 7)],
    ),
    "a library of quantised weights": (
        "main: !partial:builtins:print\n    - !singleton:transformers:HqqConfig {nbits: 4}\n",
        [("FG882", "main.yaml", 2)],
    ),
    "one tracker of several": (
        SINGLE + "\n[trainer_args]\n    == super()\n    report_to: [tensorboard, neptune]\n",
        [("FG881", "main.yaml", 5)],
    ),
    "a tracker with a wrong name": (
        SINGLE + "\n[trainer_args]\n    == super()\n    report_to: [tensorboard, wandbb]\n",
        [("FG583", "main.yaml", 5)],
    ),
    "a tokenizer of a folder that is not there": (
        SINGLE + "\n[tokenizer]\n    !singleton:transformers:AutoTokenizer.from_pretrained [../nowhere/at/all]\n",
        [("FG456", "main.yaml", 4)],
    ),
    "a loss with a word of its own": (
        SINGLE + "\n[loss_fn]\n    !singleton:torch.nn:CrossEntropyLoss {reduction: avg}\n",
        [("FG880", "main.yaml", 4)],
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_a_run_would_meet_is_reported_at_its_line(case, tmp_path):
    config, expected = OTHERS[case]
    assert expected == found(tmp_path, config)


def test_a_metric_of_a_derived_trainer_is_its_own_matter(tmp_path):
    metric = "\n[trainer_args]\n    == super()\n    eval_strategy: epoch\n    metric_for_best_model: accuracy\n"
    own = "\n[trainer]\n    !singleton:own.py:Own@trainer\n    model: *model\n    args: *trainer_args\n"
    own += "    train_dataset: *train_dataset\n    eval_dataset: *eval_dataset\n"
    text = "from forgather.ml import Trainer\n\n\nclass Own(Trainer):\n    pass\n"
    assert ("FG821", "main.yaml", 6) in found(tmp_path, SINGLE + metric)
    assert "FG821" not in {code for code, *_ in found(tmp_path / "two", SINGLE + metric + own, own__py=text)}
