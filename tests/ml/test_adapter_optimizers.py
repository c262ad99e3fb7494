"""Optimizers for adapters: LoRA+ has the groups of peft, and the recorded figures of bitsandbytes are those of a loop."""

import importlib.metadata
import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

from forgather.cli.main import main
from forgather.errors import DistributedError, TrainingError
from forgather.ml import Trainer, TrainingArguments
from forgather.ml.adapters import lora
from forgather.ml.bitsandbytes_optim import NAMES, refuse_shards
from forgather.ml.optim import MuonWithAdamW
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.optimizers import make_optimizer
from forgather.project.check import check_project
from forgather.project.project import Project
from tests.ml.fixtures import tiny_llama
from tests.project.workbench import TINY_TRAINING, make_project

ROOT = Path(__file__).parents[2]
RECORD = json.loads((Path(__file__).parent / "recorded" / "bitsandbytes_optimizers.json").read_text())
CELLS = [
    (name, strategy, figure)
    for name, figures in RECORD["figures"].items()
    for strategy, figure in figures.items()
    if strategy != "size of the update"
]


# -- LoRA+


def rates(optimizer, model):
    """The learning rate and the weight decay of each trained weight, by name."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {
        names[id(weight)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for weight in group["params"]
    }


@pytest.mark.parametrize(
    "adapter",
    [
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
        {"trainable_token_indices": [3, 5]},
    ],
    ids=["DoRA", "embeddings and whole modules", "token rows"],
)
def test_loraplus_gives_every_weight_the_rate_that_peft_gives_it(adapter, settings):
    model = lora(r=2, **adapter).apply(tiny_llama(), seed=1)
    args = settings(loraplus_lr_ratio=8, weight_decay=0.1, learning_rate=1e-3)
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=8, loraplus_weight_decay=0.1
    )
    expected = rates(theirs, model)
    assert expected == rates(make_optimizer(model, args), model)
    assert {8e-3, 1e-3} <= {rate for rate, _ in expected.values()}
    plain = rates(make_optimizer(model, settings(weight_decay=0.1, learning_rate=1e-3)), model)
    assert {1e-3} == {rate for rate, _ in plain.values()}


def test_loraplus_works_with_the_optimizer_of_a_factory_and_not_with_several_optimizers(settings):
    model = lora(r=2).apply(tiny_llama(), seed=1)
    args = settings(loraplus_lr_ratio=4, learning_rate=0.1)
    made = rates(make_optimizer(model, args, lambda params, lr: torch.optim.SGD(params, lr=lr)), model)
    assert {0.1, 0.4} == {rate for rate, _ in made.values()}
    whole = make_optimizer(model, args, lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr))
    assert made.items() <= rates(whole, model).items()
    with pytest.raises(TrainingError, match="has optimizers inside") as caught:
        make_optimizer(model, args, MuonWithAdamW)
    assert "FG972" == caught.value.code


def test_loraplus_without_a_lora_is_refused(settings):
    with pytest.raises(SettingError, match="there is no adapter") as caught:
        Trainer(tiny_llama(), settings(loraplus_lr_ratio=4), train_dataset=[1])
    assert ("FG972", "args.loraplus_lr_ratio") == (caught.value.code, caught.value.argument)
    # The config may put the model into peft's wrapper itself.
    Trainer(lora(r=2).apply(tiny_llama(), seed=1), settings(loraplus_lr_ratio=4), train_dataset=[1])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_loraplus_of_another_kind_of_adapter_is_refused(settings):
    """Its weights would all be trained at one rate, as if the setting were not there."""
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with pytest.raises(TrainingError, match="has no LoRA") as caught:
        Trainer(get_peft_model(tiny_llama(), config), settings(loraplus_lr_ratio=4), train_dataset=[1])
    assert ("FG972", "args.loraplus_lr_ratio") == (caught.value.code, caught.value.argument)
    Trainer(get_peft_model(tiny_llama(), config), settings(), train_dataset=[1])


@pytest.mark.parametrize(("ratio", "is_told"), [("~", True), ("4", False)])
def test_a_rate_of_embeddings_without_loraplus_is_told(ratio, is_told, tmp_path, capsys):
    (tmp_path / "meta.yaml").write_text('name: "P"\ndefault_config: p.yaml\n')
    folder = tmp_path / "templates" / "configs"
    folder.mkdir(parents=True)
    lines = f"    loraplus_lr_embedding: 1e-5\n    loraplus_lr_ratio: {ratio}\n"
    (folder / "p.yaml").write_text(f"-- extends 'trainers/trainer.yaml'\n[trainer_args]\n    == super()\n{lines}")
    main(["-p", str(tmp_path), "check"])
    found = capsys.readouterr()
    assert is_told == ("loraplus_lr_embedding has no effect: loraplus_lr_ratio is not set" in found.out + found.err)


# -- bitsandbytes


@pytest.fixture(scope="module")
def oracle():
    path = ROOT / "scripts" / "oracles" / "bitsandbytes_optimizers.py"
    spec = importlib.util.spec_from_file_location("bitsandbytes_optimizers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_has_every_optimizer_under_every_strategy(oracle):
    assert [(name, strategy) for name in oracle.NAMES for strategy in oracle.STRATEGIES] == [cell[:2] for cell in CELLS]
    assert set(oracle.NAMES) <= set(NAMES)


@pytest.mark.parametrize(("name", "strategy", "figure"), CELLS, ids=str)
def test_what_is_not_refused_equals_a_plain_loop_and_resumes_bit_for_bit(name, strategy, figure):
    is_sharded = strategy in ("FSDP2", "tensor parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3")
    assert ("8bit" in name and is_sharded) == isinstance(figure, str)
    if not isinstance(figure, str):
        assert figure["resumed"] == 0
        # With 8 bits, a difference of rounding in a gradient may select the next of 256 values.
        limit = 5e-4 if "8bit" in name else 2e-5
        assert figure["plain"] <= limit < RECORD["figures"][name]["size of the update"] / 10


def test_the_record_is_of_the_versions_that_are_tested():
    pinned = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    for name in ("torch", "transformers"):
        assert pinned[name] == RECORD["versions"][name].partition("+")[0]


def test_the_page_has_the_recorded_figures(oracle):
    text = oracle.PAGE.read_text()
    assert oracle.page_with(text, oracle.table(RECORD)) == text, "run scripts/oracles/bitsandbytes_optimizers.py --page"


CONFIG = """\
-- extends 'project.yaml'
[optimizer]
    ~
[trainer_args]
    == super()
    optim: {optim}
    {more}
"""


@pytest.mark.parametrize(
    ("trainer", "optim", "more", "expected"),
    [
        ("accel", "paged_adamw_32bit", "fsdp: full_shard", set()),
        ("accel", "adamw_8bit", "", set()),
        ("accel", "adamw_8bit", "fsdp: full_shard", {"trainer.args.optim"}),
        ("accel", "paged_lion_8bit", "deepspeed: {zero_optimization: {stage: 2}}", {"trainer.args.optim"}),
        ("pipeline", "adamw_8bit", "", set()),
        ("pipeline", "adamw_8bit", "{fsdp: full_shard, data_parallel_size: 2}", {"trainer.args.optim"}),
    ],
)
def test_the_check_refuses_states_of_8_bits_for_sharded_weights(tmp_path, trainer, optim, more, expected):
    base = TINY_TRAINING.replace("'trainers/trainer.yaml'", f"'trainers/{trainer}_trainer.yaml'")
    more = more.strip("{}").replace(", d", "\n    d") if trainer == "pipeline" else more
    config = CONFIG.format(optim=optim, more=more)
    folder = make_project(tmp_path / "bench", {"templates/project.yaml": base, "templates/configs/a.yaml": config})
    found = {one.path for one in check_project(Project("a.yaml", str(folder))).errors if one.code == "FG971"}
    assert expected == found


@pytest.mark.parametrize(("module", "is_refused"), [("bitsandbytes.optim.adamw", True), ("torch.optim.sgd", False)])
def test_an_optimizer_that_the_user_calls_is_refused_for_sharded_weights(module, is_refused):
    kind = type("AdamW8bit", (torch.optim.SGD,), {"__module__": module})
    optimizer = kind([torch.zeros(2)], lr=0.1)
    if not is_refused:
        refuse_shards(optimizer)
        return
    with pytest.raises(DistributedError, match="steps plain tensors") as caught:
        refuse_shards(optimizer)
    assert "FG971" == caught.value.code


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optim": "paged_adamw_8bit"}, "FG971.*optim is 'paged_adamw_8bit', which needs bitsandbytes.*not installed"),
        ({"optim": "adamw_torch_4bit"}, "FG708.*optim is 'adamw_torch_4bit', which needs torchao.*not installed"),
        (
            {"optim": "adamw_torch", "bf16_stochastic_round": True},
            "FG708.*bf16_stochastic_round is true, which needs torchao.*not installed",
        ),
    ],
)
def test_an_optimizer_of_a_library_that_is_not_installed_is_refused(settings, said, tmp_path, monkeypatch):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    args = TrainingArguments(tmp_path, use_cpu=True, **settings)
    with pytest.raises(TrainingError, match=said):
        make_optimizer(torch.nn.Linear(2, 2), args, None)
