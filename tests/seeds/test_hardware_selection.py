"""The scripts and command lines of the guide to distributed configuration, as they are printed there."""

import shlex
import sys
import types
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest

from forgather import hardware_selector
from forgather.cli.main import main

SNIPPETS = Path(__file__).parent / "selection"
WHOLE = ["select_basic", "configure", "gradient_accumulation", "gradient_checkpointing", "zero", "fsdp"]
COMMANDS = {"hardware_selector.py": "select", "run_training_benchmark.py": "benchmark"}


def snippet(name):
    return (SNIPPETS / f"{name}.py.txt").read_text()


@pytest.fixture
def names(monkeypatch):
    monkeypatch.setitem(sys.modules, "hardware_selector", hardware_selector)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "mixed_precision_dtype is 'bf16'")
        yield {"selector": hardware_selector.HardwareSelector()}


@pytest.mark.parametrize("name", WHOLE)
def test_a_script_runs_as_it_is_printed(name, names, capsys):
    exec(compile(snippet(name), name, "exec"), names)
    assert capsys.readouterr().out or name in ("zero", "gradient_checkpointing")


def command_lines():
    for file in sorted(SNIPPETS.glob("*.sh")):
        yield from (line for line in file.read_text().splitlines() if line.startswith("python "))


@pytest.mark.parametrize("line", list(command_lines()))
def test_a_command_line_runs_as_it_is_printed(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    _, script, *words = shlex.split(line)
    assert 0 == main([COMMANDS[script], *words])
    assert capsys.readouterr().out or (tmp_path / "bert_benchmark.json").is_file()


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_script_of_the_trainer_reaches_the_first_download(names, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    import os

    import torch

    monkeypatch.chdir(tmp_path)
    # The script uses `os` and `torch` without importing them.
    ran, marker, _ = snippet("hf_trainer").partition("# Create model and trainer")
    assert marker
    names |= {"os": os, "torch": torch}
    exec(compile(ran, "hf_trainer", "exec"), names)
    arguments, config = names["training_args"], names["config"]
    assert config["per_gpu_batch_size"] == arguments.per_device_train_batch_size
    assert config["gradient_checkpointing"] == arguments.gradient_checkpointing
    if not torch.cuda.device_count():
        assert "gpu_count is 0: planned for one GPU" in config["assumed"]


@pytest.mark.matrix
@pytest.mark.parametrize(("limit", "strategy"), [("40", "DDP"), ("7", "FSDP")])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_the_script_of_pytorch_trains_on_the_host(limit, strategy, names, tmp_path, monkeypatch):
    """With gloo in place of nccl, on one rank, and a narrow model in place of the download.

    The printed script calls the wrap policy, which is a TypeError; it means a partial of it. Its branch for DeepSpeed
    hands bools on as `offload_optimizer`, which DeepSpeed 0.19 refuses: it wants mappings.
    """
    torch = pytest.importorskip("torch")
    import torch.distributed as dist
    import transformers

    def narrow(name):
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32, "vocab_size": 64}
        return transformers.OPTForCausalLM(transformers.OPTConfig(word_embed_proj_dim=16, **sizes))

    given = snippet("pytorch")
    ran = (
        given.replace('backend="nccl"', f'"gloo", init_method="file://{tmp_path / "meet"}", rank=0, world_size=1')
        .replace("torch.cuda.set_device(local_rank)", "")
        .replace("model.to(local_rank)", "model")
        .replace("device_ids=[local_rank]", "")
        .replace("torch.cuda.device_count()", "8" if limit == "7" else "1")
        .replace("max_memory_gb = 24", f"max_memory_gb = {limit}")
        .replace("batch_size = 8", "batch_size = 1")
        .replace("=transformer_auto_wrap_policy(", "=__import__('functools').partial(transformer_auto_wrap_policy, ")
    )
    library = types.SimpleNamespace(AutoModelForCausalLM=types.SimpleNamespace(from_pretrained=narrow))
    monkeypatch.setitem(sys.modules, "transformers", library)
    monkeypatch.setitem(sys.modules, "transformers.models.opt.modeling_opt", transformers.models.opt.modeling_opt)
    try:
        # torch's older FSDP needs a GPU: without one, the script ends there, with its settings made.
        ends = strategy == "FSDP" and not torch.cuda.is_available()
        with pytest.raises(RuntimeError, match="FSDP needs a non-CPU accelerator") if ends else nullcontext():
            exec(compile(ran, "pytorch", "exec"), names)
        assert strategy == names["config"]["distributed_strategy"]
        kind = {"DDP": "DistributedDataParallel", "FSDP": "FullyShardedDataParallel"}[strategy]
        assert ("OPTForCausalLM" if ends else kind) == type(names["model"]).__name__
        assert not ends or isinstance(names["mixed_precision"].param_dtype, torch.dtype)
        assert next(names["model"].parameters()).requires_grad
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
