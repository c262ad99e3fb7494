"""One call of a script and the config that `to_config()` prints train to the same bits, in twelve and more combinations.

Each combination is trained by the call; the text of `to_config()` is then written into the folder of a project, and the
config is trained as any other. Losses, weights and checkpoints are compared exactly.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from forgather.distributed import DistributedTrainer, PipelineParallel, TensorParallel  # noqa: E402
from forgather.errors import ForgatherError  # noqa: E402
from forgather.project.project import Project  # noqa: E402
from tests.matrix import thinned  # noqa: E402
from tests.ml.distributed.gang import import_engine, run_ranks  # noqa: E402
from tests.patience import patience  # noqa: E402
from tests.words import script_parts as parts  # noqa: E402

LLAMA = functools.partial(parts.make_llama, layers=2)
BASE = {"fp16": False, "use_cpu": True, "save_dir": "out", "log_interval": 1, "batch_size": 2, "zero_stage": 0}
FINE = {**BASE, "learning_rate": 1e-2}


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.8, 0.99))


def two_groups(model):
    named = dict(model.named_parameters())
    slow = [weight for name, weight in named.items() if "bias" in name]
    fast = [weight for name, weight in named.items() if "bias" not in name]
    return torch.optim.SGD([{"params": slow, "lr": 1e-3}, {"params": fast}], lr=1e-2, momentum=0.9)


def loader(**given):
    return torch.utils.data.DataLoader(parts.numbers(), batch_size=4, **given)


CALLS = {
    "plain": {"config": FINE},
    "accumulated": {"config": {**FINE, "gradient_accumulation_steps": 2, "activation_checkpointing": True}},
    "clipped": {"config": {**FINE, "gradient_clipping": 0.05, "warmup_steps": 2}},
    "bf16": {"config": {**FINE, "bf16": True}},
    "resumed": {"config": {**FINE, "save_interval": 3}, "resumes": "checkpoint-6"},
    "async_save": {"config": {**FINE, "save_interval": 2, "async_save": True, "keep_checkpoints": 2}},
    "save_function": {"config": {**FINE, "save_interval": 4, "save_function": parts.write_step}},
    "optimizer": {"module": parts.Classifier, "optimizer": adamw, "data": functools.partial(loader, shuffle=True)},
    "groups": {"module": parts.Classifier, "optimizer": two_groups, "data": functools.partial(loader, drop_last=True)},
    "ddp": {"config": FINE, "ranks": 2},
    "fsdp_for_zero_2": {"config": {**FINE, "zero_stage": 2}, "ranks": 2, "deepspeed": False},
    "fsdp_for_zero_3": {"config": {**FINE, "zero_stage": 3, "save_interval": 3}, "ranks": 2, "deepspeed": False},
    "zero_2": {"config": {**FINE, "zero_stage": 2, "allgather_base_size": 1000}, "ranks": 2, "deepspeed": True},
    "tensor": {"config": FINE, "ranks": 2, "split": functools.partial(TensorParallel, devices=[0, 1])},
    "pipeline": {
        "config": {**FINE, "batch_size": 4},
        "ranks": 2,
        "split": functools.partial(PipelineParallel, devices=[0, 1], stages=2),
    },
}
QUICK = ("accumulated", "resumed", "optimizer", "fsdp_for_zero_2")


@contextlib.contextmanager
def inside(folder):
    before = os.getcwd()
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def prepared(case):
    """Returns (engine, optimizer, config, data) of a call; what exists already is the same each time."""
    torch.manual_seed(11)
    if case.get("deepspeed") is False:
        # As where DeepSpeed is not installed: neither found nor imported.
        sys.modules["deepspeed"] = None
    if "module" in case:
        module = case["module"]()
        config = {**BASE, "loss_fn": torch.nn.CrossEntropyLoss(), "batch_size": 4, "seed": 7}
        return module, case["optimizer"](module), config, case["data"]()
    engine = case["split"](LLAMA) if "split" in case else LLAMA
    return engine, None, case["config"], parts.token_rows()


def called(folder, case):
    """Trains by the call; returns the result, the text of the config, and the names of its variables."""
    engine, optimizer, config, data = prepared(case)
    with inside(folder):
        trainer = DistributedTrainer(engine, optimizer, config=config)
        if case.get("resumes"):
            trainer.train(1, data)
            trainer.restore_from_checkpoint(f"out/{case['resumes']}")
        trainer.train(1, data)
        return parts.result_of(trainer.trainer, "out"), trainer.to_config()


def by_config(folder, case, text):
    """Trains by the text, in a project of its own; the variables are made again."""
    engine, optimizer, config, data = prepared(case)
    (Path(folder) / "templates" / "configs").mkdir(parents=True, exist_ok=True)
    (Path(folder) / "meta.yaml").write_text("name: of a script\n")
    (Path(folder) / "templates" / "configs" / "a.yaml").write_text(text)
    variables = {"train_dataset": getattr(data, "dataset", data)}
    if "module" in case:
        variables |= {"model": engine, "loss_fn": config["loss_fn"]}
        if "!var optimizer_factory" in text:
            variables["optimizer_factory"] = lambda model: case["optimizer"](model)
    if "save_function" in case.get("config", {}):
        variables["save_function"] = parts.write_step
    with inside(folder):
        trainer = Project("a", ".", trust=True)("main", **variables)
        if case.get("resumes"):
            trainer.train()
            trainer.train(f"out/{case['resumes']}")
        else:
            trainer.train()
        return parts.result_of(trainer, "out")


def trained(ranks, function, *arguments):
    if ranks == 1:
        return function(*arguments)
    return run_ranks(ranks, function, *arguments)[0]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", thinned(sorted(CALLS), lambda name: name in QUICK))
def test_a_call_and_its_config_train_to_the_same_bits(name, tmp_path):
    case = CALLS[name]
    if case.get("deepspeed"):
        pytest.importorskip("deepspeed")
        import_engine()
    ranks = case.get("ranks", 1)
    by_call, text = trained(ranks, called, str(tmp_path / "call"), case)
    other = trained(ranks, by_config, str(tmp_path / "config"), case, text)
    assert by_call == other
    assert len(by_call["losses"]) >= 2
    assert len(set(by_call["losses"])) > 1


def by_engine(stage, config):
    from forgather.ml.strategy.deepspeed import import_deepspeed

    deepspeed = import_deepspeed("cpu")
    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    torch.manual_seed(11)
    module = parts.Classifier()
    settings = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5, "zero_allow_untested_optimizer": True}
    settings |= {"zero_optimization": {"stage": stage}, **config}
    engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module), config=settings)
    words = {"use_cpu": True, "save_dir": "out", "loss_fn": torch.nn.CrossEntropyLoss(), "log_interval": 1}
    try:
        trainer = DistributedTrainer(engine, config=words)
    except ForgatherError as error:
        return str(error)
    trainer.train(1, parts.numbers())
    return parts.result_of(trainer.trainer, "out")


def of_module():
    torch.manual_seed(11)
    module = parts.Classifier()
    words = {**BASE, "loss_fn": torch.nn.CrossEntropyLoss(), "batch_size": 4, "gradient_clipping": 0.5}
    trainer = DistributedTrainer(module, adamw(module), config=words)
    trainer.train(1, parts.numbers())
    return parts.result_of(trainer.trainer, "out")


@pytest.mark.matrix
def test_an_engine_of_deepspeed_is_its_module(tmp_path, monkeypatch):
    pytest.importorskip("deepspeed")
    import_engine()
    monkeypatch.chdir(tmp_path)
    (found,) = run_ranks(1, by_engine, 0, {})
    assert found == run_ranks(1, of_module)[0]
    for stage, config, said in ((1, {}, "a DeepSpeed engine of ZeRO stage 1"), (0, {"dump_state": True}, "dump_state")):
        assert said in run_ranks(1, by_engine, stage, config)[0]


def test_another_text_gives_other_bits(tmp_path):
    case = CALLS["optimizer"]
    by_call, text = called(str(tmp_path / "call"), case)
    changed = text.replace("lr: 0.003", "lr: 0.0031")
    assert text != changed
    assert by_call["weights"] != by_config(str(tmp_path / "config"), case, changed)["weights"]


SCRIPT = """\
import functools
import hashlib
from forgather.distributed import setup_distributed_training
from tests.words import script_parts as parts

config = {"fp16": False, "use_cpu": True, "save_dir": "out", "log_interval": 1, "batch_size": 2, "zero_stage": 0}
model = functools.partial(parts.make_llama, layers=2)
setup_distributed_training(model, {**config, "learning_rate": 1e-2}).train(1, parts.token_rows())
"""


@pytest.mark.matrix
def test_a_script_under_torchrun_is_the_same_run(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    by_ranks, _ = run_ranks(2, called, str(tmp_path / "ranks"), CALLS["ddp"])[0]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py"]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=patience(200), check=False
    )
    assert 0 == ended.returncode, ended.stderr
    digest = hashlib.sha256((tmp_path / "out" / "model.safetensors").read_bytes()).hexdigest()
    assert by_ranks["weights"] == digest


def by_hand(make_optimizer, epochs):
    """Trains as the tutorials of torch do: the loader's order, clipping at 1.0, a linear schedule."""
    torch.manual_seed(11)
    module = parts.Classifier()
    optimizer = make_optimizer(module)
    batches, losses = list(loader(shuffle=False)), []
    steps = epochs * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for x, y in batches * epochs:
        loss = torch.nn.functional.cross_entropy(module(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, module


@pytest.mark.parametrize("make_optimizer", [adamw, two_groups])
def test_a_call_is_the_loop_that_its_arguments_describe(make_optimizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    losses, module = by_hand(make_optimizer, 2)
    torch.manual_seed(11)
    own = parts.Classifier()
    words = {**BASE, "loss_fn": torch.nn.CrossEntropyLoss(), "batch_size": 4}
    trainer = DistributedTrainer(own, make_optimizer(own), config=words)
    trainer.train(2, loader(shuffle=False))
    found = [line["loss"] for line in trainer.trainer.state.log_history if "loss" in line]
    assert losses == pytest.approx(found, abs=1e-6)
    for one, other in zip(module.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
