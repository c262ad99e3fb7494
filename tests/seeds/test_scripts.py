"""The scripts of guides to distributed training, as they are printed: each runs on what this machine has, or is answered.

What stands in: a narrow model for a download, the CPU for a GPU, and this package's trainer and arguments for those of
transformers.
"""

import sys
import traceback
import types
from pathlib import Path

import pytest
from ruamel.yaml import YAML

torch = pytest.importorskip("torch")
import transformers  # noqa: E402

from forgather.errors import ForgatherError  # noqa: E402
from forgather.ml import AccelTrainer, AccelTrainingArguments, PipelineTrainingArguments  # noqa: E402
from forgather.ml.strategy.fsdp_config import Sharding  # noqa: E402

SCRIPTS = Path(__file__).parent / "scripts"
RECIPE = Path(__file__).parents[2] / "projects" / "recipes" / "configs" / "fsdp_qlora_llama7b.yaml"


def script(name):
    return (SCRIPTS / f"{name}.py.txt").read_text(encoding="utf-8")


def run(text, **names):
    names = {"__name__": "script", **names}
    exec(compile(text, "script", "exec"), names)
    return types.SimpleNamespace(**names)


def narrow(layers=2):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=layers, **sizes)
    return transformers.LlamaForCausalLM(config)


def rows(*_):
    drawn = torch.randint(32, (8, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in drawn]


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """The script for a quantized model with a LoRA under FSDP, with our classes, and its config on a small run."""
    pytest.importorskip("peft")
    made = []

    class Recorded(AccelTrainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    auto = types.SimpleNamespace(from_pretrained=lambda name, **_: narrow())
    library = types.SimpleNamespace(
        AutoModelForCausalLM=auto,
        AutoTokenizer=types.SimpleNamespace(from_pretrained=lambda name: None),
        BitsAndBytesConfig=transformers.BitsAndBytesConfig,
        TrainingArguments=AccelTrainingArguments,
        Trainer=Recorded,
    )
    config = YAML(typ="safe").load(RECIPE.read_text(encoding="utf-8"))
    config["training"] |= {"output_dir": str(tmp_path / "out"), "num_train_epochs": 1, "tf32": None}
    config["training"] |= {"gradient_accumulation_steps": 1, "logging_steps": 1}
    file = tmp_path / "config.yaml"
    with file.open("w") as stream:
        YAML().dump(config, stream)

    def recipe(text):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "transformers", library)
            names = run(text.replace("torch.cuda.current_device()", '"cpu"'), load_dataset=rows)
        return names.main, str(file), made

    return recipe


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_argument_that_is_gone_is_answered_at_its_line(recipe):
    main, file, _ = recipe(script("qlora_recipe"))
    with pytest.raises(TypeError) as caught:
        main(file)
    assert "did you mean 'processing_class'?" == caught.value.hint
    lines = script("qlora_recipe").split("\n")
    (line,) = [frame.lineno for frame in traceback.extract_tb(caught.value.__traceback__) if frame.name == "main"]
    assert "trainer = Trainer(" in lines[line - 1]


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_the_recipe_trains_with_objects_of_torch_in_its_config(recipe, caplog):
    main, file, made = recipe(script("qlora_recipe").replace("tokenizer=tokenizer", "processing_class=tokenizer"))
    main(file)
    (trainer,) = made
    assert 2 == trainer.state.global_step
    found = Sharding.from_arguments(trainer.args.fsdp, trainer.args.fsdp_config)
    assert ("FULL_SHARD", torch.bfloat16, 1) == (found.strategy, found.precision.param_dtype, found.forward_prefetch)
    told = " ".join(caplog.messages)
    assert "'evaluation_strategy' is now 'eval_strategy'" in told
    assert "'warmup_ratio' is now 'warmup_steps'" in told
    assert "mixed_precision.reduce_dtype is bfloat16" in told
    assert "mixed_precision.buffer_dtype has no effect" in told


def test_the_search_for_a_batch_runs_and_ends_at_a_power_of_two():
    tried = []

    def train_step(model, rows):
        tried.append(rows)
        if rows > 40:
            raise RuntimeError("out of memory")

    assert 32 == run(script("find_batch_size"), train_step=train_step).find_optimal_batch_size(None)
    assert [16, 32, 64] == tried


def test_the_cuts_of_a_function_are_those_of_our_setting(tmp_path):
    model = torch.nn.Module()
    model.transformer = torch.nn.Module()
    model.transformer.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(8))
    spec = run(script("split_spec")).get_split_spec(model, 4)
    names = ("transformer.layers.1", "transformer.layers.3", "transformer.layers.5")
    assert dict.fromkeys(names, "end") == spec
    given = {"split_spec": spec, "pipeline_parallel_size": 4, "per_device_train_batch_size": 4}
    assert spec == PipelineTrainingArguments(str(tmp_path), use_cpu=True, **given).split_spec
    with pytest.raises(ForgatherError, match="4 stages"):
        PipelineTrainingArguments(str(tmp_path), use_cpu=True, **{**given, "pipeline_parallel_size": 3})


def arguments(tmp_path, **given):
    plain = {"use_cpu": True, "max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no"}
    return AccelTrainingArguments(str(tmp_path / "out"), **plain, **given)


@pytest.mark.matrix
def test_the_callback_that_monitors_is_called_by_the_trainer(tmp_path, capsys):
    kind = run(
        script("monitor_callback"), TrainerCallback=transformers.TrainerCallback, torch=torch
    ).DistributedMonitorCallback
    AccelTrainer(narrow(), arguments(tmp_path), train_dataset=rows(), callbacks=[kind()]).train()
    assert 2 == capsys.readouterr().out.count("GPU Memory - Allocated: 0.00GB")


def test_the_trial_with_a_small_model_is_answered():
    text = script("test_scaling")
    # The three dots are a positional argument after a keyword, which Python refuses.
    with pytest.raises(SyntaxError, match="positional argument follows keyword"):
        run(text)
    names = run(text.replace(", ...)", ")"), AccelTrainer=AccelTrainer)
    with pytest.raises(TypeError, match="no argument 'model_config'") as caught:
        names.test_distributed_setup()
    assert "model_init" in caught.value.hint


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
def test_the_profile_of_a_training_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trainer = AccelTrainer(narrow(), arguments(tmp_path), train_dataset=rows())
    run(script("profiling") + "    prof.step()\n" * 5, torch=torch, trainer=trainer)
    assert list((tmp_path / "profiler_logs").glob("*.pt.trace.json"))


def test_the_formula_of_resources_runs_and_says_more_than_any_machine_has():
    needed = run(script("calculate_resources")).calculate_resources(7e9, 2048, 4)
    # It multiplies the tokens of a batch by all weights; `fgcli plan` traces what a step really keeps.
    assert needed > 300_000  # GB
