"""Every YAML block of the project's own document on distributed training: it trains, or is refused for what is wrong in it.

A block with `-- extends` is a config as it stands. One without is put, unchanged, into a frame:

* a block `trainer_args`: below `-- extends` of the trainer that its section is about (`FRAMES["block"]`);
* settings of `trainer_args`: into that block, indented (`FRAMES["settings"]`);
* a top-level target, which a config that extends a trainer template has already: into a config that names all its parts
  (`FRAMES["target"]`).

The project's default model is narrow and 24 blocks deep. Runs take two steps and as many gloo ranks as the sizes ask
for; the ranks are forked, and run what the launcher's workers run.
"""

import contextlib
import io
import os
import re
import shutil
import warnings
from pathlib import Path

import pytest

from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.project.world_size import processes_from_sizes
from tests.matrix import thinned

pytest.importorskip("torch")
HERE = Path(__file__).parent
BLOCKS = {file.stem: file for file in sorted((HERE / "blocks").glob("*.yaml"))}
FRAMES = {
    "leaf": "{block}",
    "block": "-- extends 'trainers/{trainer}.yaml'\n\n{block}",
    "settings": """\
-- extends 'trainers/{trainer}.yaml'

-- block trainer_args
    == super()
    -- filter indent(4, true)
    -- include 'block.yaml'
    -- endfilter
-- endblock trainer_args
""",
    "target": """\
meta: {{config_name: framed, nproc_per_node: auto}}
.run_dir: &run_dir !var {{name: run_dir, default: ~}}
.summary_writer: &summary_writer !partial:torch.utils.tensorboard:SummaryWriter {{log_dir: *run_dir}}
tokenizer: &tokenizer
    -- include 'defaults/tokenizer.yaml'
model_config: &model_config
    -- include 'defaults/model_config.yaml'
-- set model_tag = 'partial'
model: &model
    -- include 'defaults/model.yaml'
train_dataset: &train_dataset
    -- include 'defaults/train_dataset.yaml'
trainer_args: &trainer_args !singleton:forgather.ml:{arguments}
    output_dir: output
    per_device_train_batch_size: 4
    max_steps: -1
    save_strategy: "no"
-- include 'block.yaml'
main: !singleton:forgather.ml:{constructor}
    model: *model
    args: *trainer_args
    train_dataset: *train_dataset
    processing_class: *tokenizer
    {given}
""",
}
ACCEL, PIPELINE = "accel_trainer", "pipeline_trainer"
TRAINS = {
    "01_accel_basic": ("leaf", ACCEL),
    "02_accel_advanced": ("block", ACCEL),
    "03_batch_size": ("block", ACCEL),
    "04_communication": ("settings", ACCEL),
    "05_pipeline_basic": ("leaf", PIPELINE),
    "07_gpipe": ("settings", PIPELINE),
    "08_one_f_one_b": ("settings", PIPELINE),
    "09_interleaved": ("settings", PIPELINE),
    "12_distributed_env": ("target", PIPELINE, "distributed_env: *distributed_env"),
    "13_distributed_logging": ("target", ACCEL, "callbacks: *trainer_callbacks"),
    "14_memory_imbalance": ("settings", PIPELINE),
    "15_communication_bottleneck": ("settings", ACCEL),
    "16_memory": ("settings", ACCEL),
    "17_start_simple": ("leaf", ACCEL),
    "18_fault_tolerance": ("settings", ACCEL),
    "19_monitoring": ("target", ACCEL, "callbacks: *trainer_callbacks"),
}
REFUSED = {
    "06_pipeline_advanced": (
        ("block", PIPELINE),
        [
            ("FG771", "split_spec:", "cuts the model into 4 stages, and 4 ranks .* with 2 on each .* hold 8"),
            ("FG773", "pipeline_chunks: 8", "a step has 2 rows"),
            ("FG772", "stages_per_rank: 2", "'Schedule1F1B' runs one stage on each rank, but there are 2"),
        ],
    ),
    "10_chunks_calc": (
        ("settings", PIPELINE),
        [
            ("FG232", "!calc", "reads 'per_device_batch_size'"),
            ("FG232", "!calc", "reads 'total_batch_size'"),
        ],
    ),
    "11_hybrid": (("block", PIPELINE), [("FG771", "split_spec:", "into 3 stages, which 4 ranks")]),
}


@pytest.fixture
def framed(tmp_path):
    def framed(name, frame, trainer, given=""):
        folder = tmp_path / "narrow"
        shutil.copytree(HERE / "project", folder, ignore=shutil.ignore_patterns("__pycache__"))
        block = BLOCKS[name].read_text(encoding="utf-8")
        kind = {ACCEL: "Accel", PIPELINE: "Pipeline"}[trainer]
        words = {"trainer": trainer, "given": given, "arguments": f"{kind}TrainingArguments"}
        text = FRAMES[frame].format(block=block, constructor=f"{kind}Trainer", **words)
        (folder / "templates" / "block.yaml").write_text(block, encoding="utf-8")
        (folder / "templates" / "configs").mkdir(exist_ok=True)
        (folder / "templates" / "configs" / "a.yaml").write_text(text, encoding="utf-8")
        return folder

    return framed


def test_every_block_has_its_expectation():
    assert sorted({*TRAINS, *REFUSED}) == sorted(BLOCKS)


QUICK = ("08_one_f_one_b", "12_distributed_env")
"""A block of settings, and one that names all parts."""


@pytest.mark.parametrize("name", TRAINS)
def test_a_block_is_right_as_far_as_it_can_be_seen_without_a_run(name, framed):
    assert () == check_project(Project("a", str(framed(name, *TRAINS[name]))), for_run=True).errors


@pytest.mark.parametrize("name", thinned(TRAINS, lambda name: name in QUICK))
def test_a_block_trains(name, framed):
    from tests.ml.distributed.gang import run_ranks

    folder = framed(name, *TRAINS[name])
    processes = processes_from_sizes(Project("a", str(folder)).graph) or 2
    assert processes <= 8
    answers = run_ranks(processes, _train, str(folder), processes, *_settings(name), timeout=150)
    assert {0} == {status for status, _ in answers}, "\n".join(text for _, text in answers)
    losses = re.findall(r"loss", answers[0][1])
    assert losses or name in ("13_distributed_logging", "19_monitoring", "12_distributed_env"), answers[0][1]


def _two_steps(name):
    """Returns what `--set` is given: a block that replaces all settings leaves none to set, and `+` adds it."""
    replaces = "trainer_args" in (text := BLOCKS[name].read_text(encoding="utf-8")) and "super()" not in text
    return f"{'+' if replaces else ''}trainer_args.max_steps=2"


def _settings(name):
    given = [_two_steps(name)]
    if "layer." not in BLOCKS[name].read_text(encoding="utf-8"):  # of 24 blocks, those that the cuts name must be there
        given.append(f"model_config.num_hidden_layers={2 if TRAINS[name][1] == ACCEL else 8}")
    if name == "16_memory":
        given.append("+trainer_args.torch_compile_backend=eager")  # that of the machine takes minutes
    return given


def _train(folder, processes, *settings):
    """Runs what a worker of the launcher runs."""
    from forgather.cli.main import main

    os.chdir(folder)
    warnings.simplefilter("ignore")  # a worker of the launcher takes no warning for an error
    said = io.StringIO()
    given = ["--nproc-per-node", str(processes), *(word for setting in settings for word in ("--set", setting))]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["-p", folder, "-t", "a", "train", *given])
    return status, said.getvalue()


@pytest.mark.parametrize("name", REFUSED)
def test_a_block_that_cannot_be_right_is_refused_where_it_is_wrong(name, framed, capsys, monkeypatch):
    from forgather.cli.main import main

    frame, expected = REFUSED[name]
    folder = framed(name, *frame)
    found = check_project(Project("a", str(folder)), for_run=True).errors
    assert [code for code, _, _ in expected] == [one.code for one in found], found
    for (_, line, words), one in zip(expected, found, strict=True):
        assert line in Path(one.span.file).read_text(encoding="utf-8").split("\n")[one.span.line - 1]
        assert re.search(words, one.message)
    monkeypatch.chdir(folder)
    assert 1 == main(["-p", str(folder), "-t", "a", "train", "--set", _two_steps(name)])
    told = capsys.readouterr().err
    assert all(code in told for code, _, _ in expected), told
