"""Every Python block of the seed on scripts: it runs with stand-ins for the names that it leaves open, or is answered.

The only change to a block is `distributed` in its imports, which is `forgather.distributed` here. A block that is
refused on this hardware (one process, no accelerator) names the reason at the call of its line.
"""

import json
import logging
import re
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forgather.distributed import DistributedTrainer, setup_distributed_training  # noqa: E402
from forgather.distributed.monitor import TrainingMonitor  # noqa: E402
from forgather.errors import ForgatherError  # noqa: E402
from tests.ml.distributed.gang import import_engine, run_ranks  # noqa: E402
from tests.words import script_parts as parts  # noqa: E402

SNIPPETS = {file.name[:2]: file for file in sorted((Path(__file__).parent / "snippets").glob("*.py.txt"))}
MAPPINGS = ("02", "03", "04", "05", "06", "11", "18", "20")
"""The blocks that consist of a mapping for the one call."""
ANSWERED = {"20": "activation_checkpointing.partition_activations is True"}
HERE = {"fp16": False, "use_cpu": True, "log_interval": 50, "steps_per_print": 50}


class YourModel(parts.Classifier):
    """Logits alone would need a `loss_fn`, which the seed's call does not give: this one returns its loss."""

    def forward(self, x, labels=None):
        logits = super().forward(x)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def rows():
    return [{"x": x, "labels": y} for x, y in parts.numbers(8)]


def text_of(name):
    text = SNIPPETS[name].read_text(encoding="utf-8")
    return re.sub(r"^from distributed\b", "from forgather.distributed", text, flags=re.MULTILINE)


def run(name, names, replace=()):
    text = text_of(name)
    for old, new in replace:
        assert old in text
        text = text.replace(old, new)
    exec(compile(text, f"{name}.py", "exec"), names)  # noqa: S102 - the seed's own text
    return names


def answer(name, names, replace=()):
    """Returns the error of a block and the line of the block at which it was raised."""
    with pytest.raises(ForgatherError) as raised:
        run(name, names, replace)
    lines = [entry.lineno + 1 for entry in raised.traceback if str(entry.path).endswith(f"{name}.py")]
    return raised.value, text_of(name).split("\n")[lines[-1] - 1].strip()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(1)
    return tmp_path


@pytest.fixture
def no_deepspeed(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)


def test_every_block_is_here():
    assert [f"{number:02}" for number in range(1, 22)] == list(SNIPPETS)


def test_the_one_call_names_what_is_missing(no_deepspeed):
    error, line = answer("01", {"YourModel": YourModel})
    assert ("FG811", "dist_training = setup_distributed_training(model, config)") == (error.code, line)
    assert "fp16: False" in error.hint
    error, line = answer("01", {"YourModel": YourModel}, [("'fp16': True", "'fp16': False")])
    assert ("FG802", "dist_training.train(epochs=10)") == (error.code, line)


def test_the_one_call_trains(no_deepspeed, folder, caplog):
    with_data = [("'fp16': True", "'fp16': False, 'train_dataset': rows, 'use_cpu': True")]
    found = run("01", {"YourModel": YourModel, "rows": rows()}, with_data)["dist_training"]
    assert 10 == found.trainer.state.global_step
    assert (folder / "checkpoints" / "model.safetensors").is_file()
    assert "deepspeed is not installed, and strict is false: FSDP2 (shard_grad_op) trains" in caplog.text
    # The record of the run says it, too.
    records = [json.loads(file.read_text()) for file in (folder / "checkpoints" / "runs").glob("*/summary.json")]
    assert ["FSDP2 (shard_grad_op)"] == [record["deepspeed_replaced"]["trained_with"] for record in records]


@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_makes_a_config_without_deepspeed(name, no_deepspeed):
    config = {**run(name, {})["config"], **HERE}
    if name in ANSWERED:
        with pytest.raises(ForgatherError, match=ANSWERED[name]):
            setup_distributed_training(YourModel(), config)
        return
    config.pop("train_batch_size", None)
    trainer = setup_distributed_training(YourModel(), {**config, "save_dir": "out"})
    trainer.train(1, rows() * 4)
    assert trainer.trainer.state.global_step >= 1


def trains(name):
    config = {**run(name, {})["config"], **HERE}
    # Eight ranks would have 64 rows in an update of 8 x 2 each; here one process has them.
    config.pop("train_batch_size", None)
    trainer = setup_distributed_training(YourModel, {**config, "save_dir": "out"})
    try:
        trainer.train(1, rows() * 4)
    except ForgatherError as error:
        return str(error)
    return trainer.trainer.state.global_step


@pytest.mark.matrix
@pytest.mark.parametrize("name", [name for name in MAPPINGS if name not in ANSWERED])
def test_a_mapping_trains_with_deepspeed(name):
    pytest.importorskip("deepspeed")
    import_engine()
    # In a process of its own: DeepSpeed keeps the process group of the first engine.
    assert [True] == [isinstance(found, int) and found >= 1 or found for found in run_ranks(1, trains, name)]


def test_layers_need_devices_that_exist():
    error, line = answer("07", {"model": YourModel()})
    assert "FG811" == error.code
    assert line.startswith(("devices", "model_parallel = ", ")", "strategy"))
    found = run("07", {"model": YourModel()}, [("[0, 1, 2, 3]", "['cpu']")])["model_parallel"]
    assert (2, 3) == tuple(found(torch.ones(2, 6))["logits"].shape)


@pytest.mark.parametrize(("name", "count"), [("08", 2), ("09", 4)])
def test_a_split_model_names_the_launch_line(name, count):
    error, _ = answer(name, {"model": parts.make_llama(layers=4)})
    assert "FG776" == error.code
    assert f"torchrun --nproc-per-node {count} script.py" in error.hint


def split(name, variable):
    return run(name, {"model": parts.make_llama(layers=4)})[variable].to_config()


def test_a_split_model_is_made_in_a_group():
    assert "tensor_parallel_size: 2" in run_ranks(2, split, "08", "tensor_parallel")[1]
    assert "split_spec: 4" in run_ranks(4, split, "09", "pipeline_parallel")[3]


def test_a_loader_has_a_sampler():
    found = run("10", {"YourDataset": lambda: parts.numbers(70)}, [("num_workers=4", "num_workers=0")])
    assert [32, 32] == [len(batch) for batch in found["sampler"]]
    assert 2 == len(list(found["data_loader"]))


def test_a_manager_saves_and_loads(folder):
    model = YourModel()
    names = {
        "engine": model,
        "step": 1000,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "checkpoint_path": "checkpoints/checkpoint-1000",
    }
    names["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(names["optimizer"], 2)
    run("12", names)
    assert ["checkpoint-1000"] == [entry.name for entry in (folder / "checkpoints").iterdir()]


def test_a_save_function_writes_its_own_file(folder):
    names = run("13", {"torch": torch, "get_custom_data": lambda: [7], **run("12", _empty_manager())})
    path = names["manager"].save(YourModel(), 3)
    custom = torch.load(path / "custom")
    assert (3, [7]) == (custom["step"], custom["custom_data"])


def _empty_manager():
    model = YourModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {
        "engine": model,
        "step": 1000,
        "optimizer": optimizer,
        "lr_scheduler": schedule,
        "checkpoint_path": "checkpoints/checkpoint-1000",
    }


def test_a_monitor_calls_back(caplog, capsys):
    names = {"loss_value": 3.0, "accuracy_value": 0.5, "step": 10, "threshold": 2.0, "logger": logging.getLogger("x")}
    names = run("14", names)
    names["monitor"].track_metric("loss", 4.0, 11)
    assert "High loss detected" in caplog.text
    names["monitor"].close()
    run("15", names)["monitor"].close()
    assert "CPU Memory: " in capsys.readouterr().out


class FailingOnce(YourModel):
    """A model whose eleventh call fails, as that of a device that is gone for a moment."""

    calls = 0

    def forward(self, x, labels=None):
        FailingOnce.calls += 1
        if FailingOnce.calls == 11:
            raise RuntimeError("the device is gone for a moment")
        return super().forward(x, labels)


def test_a_failure_is_recovered_from(no_deepspeed, caplog):
    model = FailingOnce()
    names = {
        "DistributedTrainer": DistributedTrainer,
        "engine": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "monitor": TrainingMonitor(save_logs=False),
        "config": {**HERE, "batch_size": 2},
        "logger": logging.getLogger("script"),
    }
    run("16", names)
    assert "fault_tolerance: " in names["trainer"].to_config()
    # Without further attempts, so that the error reaches the script.
    names["trainer"].enable_fault_tolerance(True, 0, 4)
    run("17", {**names, "epochs": 2, "data_loader": rows() * 2})
    trainer = names["trainer"]
    assert "Training error: " in caplog.text
    trainer.train(2)
    assert 16 == trainer.trainer.state.global_step


def test_a_kernel_is_answered():
    error, line = answer("19", {})
    assert ("FG788", "@register_custom_kernel('my_custom_op')") == (error.code, line)
    assert "@register_custom_kernel('my_custom_op', reference=f)" in error.hint


def test_a_profiler_reports_memory(capsys):
    run("21", {})
    assert "memory" in capsys.readouterr().out.lower()
