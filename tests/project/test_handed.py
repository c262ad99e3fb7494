"""What becomes of arguments: partials that lack what never comes, lists of callbacks, files."""

import json

import pytest

from forgather.ml import data
from forgather.project.check import check_project
from forgather.project.project import Project
from forgather.signatures.reader import Reader
from tests.project.workbench import make_project

TRAINER = """\
main: !call:forgather.ml:Trainer
  model: !call:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]
  train_dataset: [1]
  args: !call:forgather.ml:TrainingArguments
    output_dir: out
"""


@pytest.fixture
def told(tmp_path):
    def told(text, **files):
        files = {f"{name}.py": source for name, source in files.items()}
        folder = make_project(tmp_path / "bench", {"templates/configs/a.yaml": text, **files})
        found = check_project(Project("a.yaml", str(folder))).findings
        return [(one.code, one.span.line, one.hint) for one in found if one.severity != "lint"]

    return told


@pytest.mark.parametrize(
    ("argument", "code", "hint"),
    [
        ("lr_scheduler_factory: !partial:torch.optim.lr_scheduler:StepLR", "FG208", "add step_size"),
        ("optimizer_factory: !partial:own.py:optimizer", "FG208", "add momentum"),
        ("loss_fn: !partial:torch.nn:CrossEntropyLoss", "FG240", "!singleton:torch.nn:CrossEntropyLoss"),
        ("callbacks: ['callbacks.py:Shout']", "FG242", "write !singleton:callbacks.py:Shout"),
        ("callbacks: [shout]", "FG242", "as !singleton:callbacks.py:MyCallback"),
        ("callbacks: [!partial:transformers:ProgressCallback ]", "FG240", "!singleton:transformers:ProgressCallback"),
        ("callbacks: {mine: !call:transformers:ProgressCallback }", "FG242", "!dlist"),
        ("callbacks: !dlist {mine: 3}", "FG242", "give callbacks"),
    ],
)
def test_what_the_trainer_cannot_use_is_found(told, argument, code, hint):
    (found,) = told(TRAINER + f"  {argument}\n", own="def optimizer(params, lr, momentum): ...\n")
    assert (code, 6) == found[:2]
    assert hint in found[2]


@pytest.mark.parametrize(
    "argument",
    [
        "lr_scheduler_factory: !partial:torch.optim.lr_scheduler:StepLR {step_size: 2}",
        "lr_scheduler_factory: !partial:transformers:get_linear_schedule_with_warmup",
        "lr_scheduler_factory: !partial:own.py:schedule",
        "optimizer_factory: !partial:torch.optim:SGD",
        "optimizer_factory: !partial:own.py:optimizer {momentum: 0.9}",
        "optimizer_factory: !partial:own.py:optimizer {latent_args: {momentum: 0.9}}",
        "loss_fn: !singleton:torch.nn:CrossEntropyLoss",
        "loss_fn: !partial:torch.nn.functional:cross_entropy",
        "callbacks: [!call:transformers:ProgressCallback ]",
        "callbacks: !dlist {mine: !call:transformers:ProgressCallback , other: ~}",
        "callbacks: [!call:own.py:made , !var {name: more, default: ~}]",
    ],
)
def test_what_it_can_use_or_may_be_able_to_is_not(told, argument):
    own = (
        "def optimizer(params, lr, momentum): ...\n"
        "def schedule(first, optimizer, num_training_steps): ...\n"
        "def made(): ...\n"
    )
    assert [] == told(TRAINER + f"  {argument}\n", own=own)


@pytest.mark.parametrize(
    ("loss", "unchecked"),
    [("!partial:own.py:loss {scale: 2.0}", False), ("!partial:own.py:missing {scale: 2.0}", True)],
)
def test_the_reduction_of_a_partial_of_a_known_function_is_not_an_open_question(tmp_path, loss, unchecked):
    files = {
        "templates/configs/a.yaml": TRAINER + f"  loss_fn: {loss}\n",
        "own.py": "def loss(logits, labels, scale=1.0): ...\nglobals().update(missing=loss)\n",
    }
    checked = check_project(Project("a.yaml", str(make_project(tmp_path / "bench", files))))
    assert unchecked is any("loss_fn.reduction" in one.reason for one in checked.unchecked)


def test_files_and_folders_that_are_written_out_and_not_there_are_found(told, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    here = tmp_path.as_posix()
    text = (
        f"good: !call:forgather.ml.data:text_files [['{here}/in', '{here}/in/*.txt', '{here}/**/a.txt']]\n"
        f"none: !call:forgather.ml.data:text_files [['{here}/in/a.txt', '{here}/in/*.text']]\n"
        f"kind: !call:forgather.ml.data:parquet {{paths: '{here}/in'}}\n"
        "later: !call:forgather.ml.data:parquet [!var {name: folder, default: x}]\n"
        "args: !call:forgather.ml:TrainingArguments {output_dir: out, resume_from_checkpoint: 'runs/no'}\n"
        "auto: !call:forgather.ml:TrainingArguments {output_dir: out, resume_from_checkpoint: auto}\n"
        "main: 1\n"
    )
    assert [("FG456", 2), ("FG456", 3), ("FG456", 5)] == [found[:2] for found in told(text)]


def test_a_folder_that_was_not_prepared_is_found_with_the_command_that_writes_it(told, tmp_path):
    found = told("main: !call:forgather.ml.data:prepared {folder: tokens/trian}\n")
    assert ("FG456", 1) in [one[:2] for one in found]
    (tmp_path / "tokens").mkdir()
    assert "FG456" not in [one[0] for one in told(f"main: !call:forgather.ml.data:prepared ['{tmp_path}/tokens']\n")]


def test_every_reader_of_data_files_is_asked_for_files_that_are_not_there(told, tmp_path):
    reader = Reader(str(tmp_path))
    every = [f"forgather.ml.data:{name}" for name in data.__all__]
    parameters = {name: getattr(reader.read(name), "signatures", ()) for name in every}
    readers = [name for name, found in parameters.items() if any("paths" in one.parameters for one in found)]
    assert len(readers) >= 7
    lines = [f"r{number}: !call:{name} {{paths: [nowhere.jsonl]}}\n" for number, name in enumerate(readers)]
    found = told("".join(lines) + "main: 1\n")
    assert [*range(1, len(readers) + 1)] == [line for code, line, _ in found if code == "FG456"]


@pytest.mark.parametrize(
    ("constructor", "argument"),
    [
        ("forgather.ml.models:from_pretrained", "pretrained_model_name_or_path"),
        ("forgather.ml.classifiers:classifier_from_pretrained", "pretrained_model_name_or_path"),
        ("forgather.ml.data:load_tokenizer", "pretrained_model_name_or_path"),
        ("forgather.ml.preference_losses:DPOLoss", "reference"),
        ("forgather.ml.preference_losses:KTOLoss", "reference"),
        ("forgather.ml.distillation:DistillationLoss", "teacher"),
    ],
)
def test_every_folder_of_a_model_is_looked_for(constructor, argument, told):
    given = f"main: !call:{constructor}\n  {argument}: "
    assert ("FG456", 2) in [found[:2] for found in told(f"{given}./no/model\n")]
    for name in ("owner/name", "gpt2", "bert-base-uncased"):
        assert "FG456" not in [found[0] for found in told(f"{given}{name}\n")]
    assert ("FG456", 2) in [found[:2] for found in told(f"{given}nofolder\n")]


@pytest.mark.parametrize(
    ("argument", "made_by", "setting", "codes"),
    [
        ("model", "forgather.ml.models:from_pretrained [gpt2]", "counter", ["FG620"]),
        ("model_init", "transformers:AutoModelForCausalLM.from_pretrained [gpt2]", "counter", ["FG620"]),
        ("model", "forgather.ml.models:from_pretrained [gpt2]", "sequential", []),
        ("model", "forgather.ml.models:from_config [!call:transformers:LlamaConfig ]", "counter", []),
    ],
)
def test_weights_of_a_loaded_model_are_not_computed_by_position(argument, made_by, setting, codes, told):
    text = TRAINER.replace(
        "model: !call:forgather.ml.models:from_config [!call:transformers:LlamaConfig ]",
        f"{argument}: !partial:{made_by}",
    )
    assert codes == [code for code, *_ in told(f"{text}    initial_weights: {setting}\n")]


@pytest.mark.parametrize(
    ("constructor", "is_encoder_decoder", "codes"),
    [
        ("forgather.ml.models:seq2seq_from_pretrained", False, ["FG974"]),
        ("forgather.ml.models:seq2seq_from_pretrained", True, []),
        ("forgather.ml.models:from_pretrained", True, ["FG974"]),
        ("forgather.ml.models:from_pretrained", False, []),
        ("forgather.ml.classifiers:classifier_from_pretrained", True, []),
    ],
)
def test_a_folder_with_a_model_of_another_kind_is_refused(constructor, is_encoder_decoder, codes, told, tmp_path):
    config = {"model_type": "any", "is_encoder_decoder": is_encoder_decoder}
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    text = f"main: !call:{constructor}\n  pretrained_model_name_or_path: {tmp_path}/model\n"
    assert [(code, 2) for code in codes] == [found[:2] for found in told(text) if found[0] in ("FG974", "FG456")]


def test_a_model_in_the_cache_of_the_hub_is_found(told, tmp_path, monkeypatch):
    (tmp_path / "hub/models--mine").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert [] == told("main: !call:forgather.ml.models:from_pretrained [mine]\n")


def test_what_libraries_would_load_from_this_machine_is_looked_for(told, tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    here = tmp_path.as_posix()
    text = (
        "made: !partial:forgather.ml.models:from_pretrained ['./models/x']\n"
        "mask: !call:transformers:AutoModelForMaskedLM.from_pretrained {pretrained_model_name_or_path: a/b/c}\n"
        "name: !call:transformers:AutoModelForMaskedLM.from_pretrained {pretrained_model_name_or_path: owner/name}\n"
        f"there: !call:forgather.ml.models:from_pretrained ['{here}']\n"
        "disk: !call:datasets:load_from_disk [rows]\n"
        "store: !call:datasets:load_from_disk ['s3://rows']\n"
        f"good: !call:datasets:load_dataset {{path: json, data_files: {{train: '{here}/a.jsonl', test: 'hf://x/y'}}}}\n"
        f"one: !call:datasets:load_dataset {{path: json, data_files: {{train: '{here}/a.jsonl', test: '{here}/b'}}}}\n"
        "hub: !call:datasets:load_dataset {path: owner/rows, data_files: train.json}\n"
        "local: !call:datasets:load_dataset [./rows]\n"
        f"code: !call:forgather.ml.data:python_sources ['{here}/nowhere']\n"
        "main: 1\n"
    )
    assert [("FG456", line) for line in (1, 2, 5, 8, 10, 11)] == [found[:2] for found in told(text)]
