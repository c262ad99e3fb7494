"""`CheckpointManager` in a loop of the user's own, layers on devices, and the start of processes from a notebook."""

import sys
import types

import pytest

torch = pytest.importorskip("torch")

from accelerate.state import AcceleratorState, PartialState  # noqa: E402

from forgather.distributed import CheckpointManager, ModelParallel, launch_in_notebook  # noqa: E402
from forgather.distributed.notebook import refusal  # noqa: E402
from forgather.errors import CheckpointError, DistributedError, TrainingError  # noqa: E402
from forgather.ml.layer_placement import device_map  # noqa: E402
from tests.ml.distributed.gang import run_ranks  # noqa: E402
from tests.words import script_parts as parts  # noqa: E402


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loop(wraps=lambda module: module):
    torch.manual_seed(4)
    module = wraps(torch.nn.Sequential(parts.Classifier(), torch.nn.Dropout(0.3)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def trained(state, steps, manager=None):
    module, optimizer, schedule = state
    x = torch.arange(24.0).reshape(4, 6) / 24
    for step in steps:
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()
        schedule.step()
        if manager is not None:
            manager.save(module, step + 1, optimizer, schedule)
    return [weight.detach().clone() for weight in module.parameters()]


def whole(weights):
    return [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights]


def resumed_is_equal(wraps=lambda module: module, **given):
    expected = whole(trained(loop(wraps), range(6)))
    manager = CheckpointManager("saved", save_interval=2, **given)
    trained(loop(wraps), range(4), manager)
    manager.wait()
    torch.manual_seed(99)
    state = loop(wraps)
    assert 4 == manager.load("saved/checkpoint-4", *state)
    found = whole(trained(state, range(4, 6)))
    return [torch.equal(one, other) for one, other in zip(expected, found, strict=True)]


def sharded(module):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module)


def in_ddp(module):
    return torch.nn.parallel.DistributedDataParallel(module)


def resumed_on_ranks(kind):
    torch.manual_seed(0)
    return resumed_is_equal({"fsdp": sharded, "ddp": in_ddp}[kind], async_save=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_loop_that_resumes_ends_with_the_same_bits(in_background, folder):
    assert [True] * 4 == resumed_is_equal(async_save=in_background, keep_interval=2)
    assert ["checkpoint-2", "checkpoint-4"] == sorted(entry.name for entry in (folder / "saved").iterdir())


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_ranks_resume_with_the_same_bits(kind):
    assert [[True] * 4] * 2 == run_ranks(2, resumed_on_ranks, kind, start_group=True)


def test_only_multiples_of_the_interval_are_saved(caplog):
    state = loop()
    manager = CheckpointManager("saved", save_interval=3, keep_interval=1)
    assert [None, None] == [manager.save(state[0], step) for step in (1, 2)]
    assert 1 == caplog.text.count("is no multiple of save_interval 3, and is not saved")
    assert ["checkpoint-3", "checkpoint-4"] == [
        manager.save(state[0], 3).name,
        manager.save(state[0], 4, force=True).name,
    ]
    assert "checkpoint-4" == manager.newest().name
    assert not manager.newest().with_name("checkpoint-3").exists()


def test_what_cannot_be_restored_is_said(folder):
    module, optimizer, _ = loop()
    manager = CheckpointManager("saved")
    with pytest.raises(CheckpointError, match="'saved' has no intact checkpoint"):
        manager.load(None, module)
    manager.save(module, 1, optimizer)
    with pytest.raises(CheckpointError, match=r"has an optimizer, and load\(\) was given none"):
        manager.load(None, module)
    with pytest.raises(CheckpointError, match="does not fit Linear"):
        manager.load(None, other := torch.nn.Linear(2, 2), torch.optim.AdamW(other.parameters()))
    (folder / "saved" / "checkpoint-1" / "loop_state.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError):
        manager.load("saved/checkpoint-1", module, optimizer)


def test_an_engine_of_deepspeed_saves_itself():
    kind = type("Engine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    with pytest.raises(TrainingError, match=r"does not save a DeepSpeed engine.*engine.save_checkpoint"):
        CheckpointManager("saved").save(kind(), 1)


MANAGERS = {
    "save_interval": ({"save_interval": 0}, "FG813"),
    "keep_interval": ({"keep_interval": True}, "FG813"),
    "save_function": ({"save_function": "mine"}, "FG819"),
}


@pytest.mark.parametrize("name", MANAGERS)
def test_a_manager_names_a_wrong_argument(name):
    given, code = MANAGERS[name]
    with pytest.raises(TrainingError, match=name) as raised:
        CheckpointManager("saved", **given)
    assert code == raised.value.code


def test_a_manager_is_a_config():
    text = CheckpointManager("saved", 5, 2, True, print).to_config()
    for line in (
        'output_dir: "saved"',
        "save_steps: 5",
        "save_total_limit: 2",
        "async_save: true",
        "!var save_function",
    ):
        assert line in text


def test_layers_are_placed_in_their_order():
    model = parts.make_llama(layers=4)
    devices = [torch.device("cuda", number) for number in range(2)]
    places = device_map(model, devices)
    layers = [places[f"model.layers.{number}"].index for number in range(4)]
    assert layers == sorted(layers)
    assert {0, 1} == set(layers)
    assert 1 == places["lm_head"].index
    assert {name for name, _ in model.named_parameters()} == {
        name for name, _ in model.named_parameters() if any(name.startswith(place) for place in places)
    }


DEVICES = {
    "none": ([], "devices is empty"),
    "absent": ([0, 1], "this machine has no accelerator"),
    "mixed": (["cpu", "meta"], "has 'meta'"),
    "unknown": (["gpu"], "devices has 'gpu'"),
}


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.parametrize("name", DEVICES)
def test_devices_that_do_not_exist_are_refused(name):
    devices, said = DEVICES[name]
    with pytest.raises(TrainingError, match=said):
        ModelParallel(parts.Classifier(), devices)


def test_another_strategy_has_another_class():
    with pytest.raises(TrainingError, match=r"strategy is 'tensor' \(use TensorParallel\)"):
        ModelParallel(parts.Classifier(), ["cpu"], strategy="tensor")
    placed = ModelParallel(parts.Classifier(), ["cpu"])
    assert 4 == len(list(placed.parameters()))
    assert "place_layers" in placed.to_config()


def test_a_notebook_that_has_set_up_too_much_is_told(monkeypatch):
    for kind in (PartialState, AcceleratorState):
        monkeypatch.setattr(kind, "_shared_state", {})
    assert refusal() is None
    monkeypatch.setattr(PartialState, "_shared_state", {"device": "cpu"})
    with pytest.raises(DistributedError, match=r"this process has an Accelerator.*torchrun --nproc-per-node 2"):
        launch_in_notebook(print, num_processes=2)
    monkeypatch.setitem(sys.modules, "bitsandbytes", types.ModuleType("bitsandbytes"))
    assert "bitsandbytes is imported" in refusal()


def in_a_notebook(folder):
    AcceleratorState._reset_state(reset_partial_state=True)

    def cell(text):
        from forgather.distributed import setup_distributed_training

        config = {"fp16": False, "use_cpu": True, "zero_stage": 0, "save_dir": folder, "batch_size": 4}
        trainer = setup_distributed_training(parts.Classifier, {**config, "loss_fn": torch.nn.CrossEntropyLoss()})
        trainer.train(1, parts.numbers())

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        import os

        os.environ.pop(name, None)
    from tests.ml.distributed.gang import free_port

    launch_in_notebook(cell, ["x"], num_processes=2, port=free_port())


@pytest.mark.matrix
def test_a_cell_trains_in_several_processes(folder):
    run_ranks(1, in_a_notebook, str(folder / "out"))
    assert (folder / "out" / "model.safetensors").is_file()


def saved_by_two():
    CheckpointManager("saved").save(loop()[0], 1)


def test_random_numbers_of_another_number_of_processes_are_reported(caplog):
    run_ranks(2, saved_by_two, start_group=True)
    CheckpointManager("saved").load("saved/checkpoint-1", loop()[0])
    assert "random numbers of 2 processes, and there are 1" in caplog.text
