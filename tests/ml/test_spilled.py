"""A model is exported with few of its weights in memory, and the files are the same."""

import ctypes
import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from forgather.ml import AccelTrainer, AccelTrainingArguments
from forgather.ml.checkpoint import spilled
from forgather.ml.checkpoint.export import export_checkpoint, export_saved_model
from forgather.ml.checkpoint.export_folder import ExportDraft
from forgather.ml.checkpoint.spilled import SpilledTensors
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.strategy.state import on_host
from tests.ml.distributed.gang import run_ranks
from tests.ml.fixtures import rows, tiny_llama
from tests.patience import patience

MIB = 1 << 20


def memory_at_rest():
    # Freed memory that the C library keeps would take weights without any growth.
    getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    return anonymous_memory()


def anonymous_memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def many():
    for number in range(16):
        yield f"{number}", torch.full((4 * MIB,), float(number))


@pytest.mark.parametrize(
    ("limit", "most"), [(0, 100 * MIB), pytest.param(64 * MIB, 164 * MIB, marks=pytest.mark.matrix)]
)
def test_few_weights_are_in_memory(limit, most, tmp_path):
    before = memory_at_rest()
    kept = on_host(many(), keep=True, place=SpilledTensors(tmp_path, max_bytes=limit))
    assert anonymous_memory() - before < most
    for name, expected in many():
        assert torch.equal(expected, kept[name])
    assert [] == list(tmp_path.iterdir())


def test_all_are_in_memory_if_the_disk_is_full(monkeypatch, tmp_path, caplog):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    kept = SpilledTensors(tmp_path, max_bytes=0).keep(torch.arange(5))
    assert kept.tolist() == [0, 1, 2, 3, 4]
    assert "a weight of 40 B stays in memory: No space left on device" in caplog.text
    assert [] == list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (3, 2), (0, 4)])
def test_each_dtype_and_shape_is_kept(dtype, shape, tmp_path):
    given = (torch.rand(shape) * 9).to(dtype)
    kept = SpilledTensors(tmp_path, max_bytes=0).keep(given)
    assert torch.equal(given, kept)
    assert (given.dtype, given.shape, given.stride()) == (kept.dtype, kept.shape, kept.stride())


def test_weights_of_the_model_itself_are_not_copied(tmp_path):
    weight = torch.rand(5)
    kept = on_host([("a", weight)], keep=True, place=SpilledTensors(tmp_path, max_bytes=0), own=[weight])
    assert kept["a"].data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("dtype", [pytest.param(None, marks=pytest.mark.matrix), "bfloat16"])
def test_few_weights_of_a_saved_model_are_in_memory_while_it_is_exported(dtype, tmp_path, monkeypatch):
    for number in range(2):
        save_file({f"{number}.{one}": torch.full((2 * MIB,), 1.0 + one) for one in range(8)}, tmp_path / f"{number}.st")
    placed = {f"{number}.{one}": f"{number}.st" for number in range(2) for one in range(8)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    written = ExportDraft.written_chunks
    peaks = []

    def measured(draft, name, chunks):
        for chunk in written(draft, name, chunks):
            peaks.append(anonymous_memory())
            yield chunk

    monkeypatch.setattr(ExportDraft, "written_chunks", measured)
    files = {}
    for limit in (0, 1 << 40):
        monkeypatch.setattr(spilled, "MAX_BYTES", limit)
        peaks.clear()
        before = memory_at_rest()
        folder = tmp_path / str(limit)
        export_saved_model(tmp_path, folder, max_shard_size="50MB", dtype=dtype)
        rise = max(peaks) - before
        # The control keeps the weights of 64 MiB, if they are converted.
        assert (rise > 44 * MIB) == (limit > 0 and dtype is not None)
        assert rise < 32 * MIB or limit
        files[limit] = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert files[0] == files[1 << 40]
    assert len(files[0]) > 3


def saved(folder, limit):
    spilled.MAX_BYTES = limit
    mapped = []
    kept = SpilledTensors._in_file
    SpilledTensors._in_file = lambda place, tensor: mapped.append(1) or kept(place, tensor)
    args = AccelTrainingArguments(
        str(folder), max_steps=1, use_cpu=True, fsdp="full_shard", per_device_train_batch_size=2, save_steps=1,
        save_strategy="steps",
    )  # fmt: skip
    environment = DistributedEnvironment(timeout_seconds=patience(30), start_timeout_seconds=patience(30))
    AccelTrainer(
        lambda: tiny_llama(tie_word_embeddings=True), args, train_dataset=rows(4), distributed_env=environment
    ).train()
    return len(mapped)


def test_the_files_of_a_model_are_the_same(tmp_path, monkeypatch):
    assert [0, 0] == run_ranks(2, saved, tmp_path / "memory", 1 << 30)
    on_disk, of_other = run_ranks(2, saved, tmp_path / "disk", 0)
    assert on_disk > 10
    assert of_other == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "memory" / name).read_bytes() == (tmp_path / "disk" / name).read_bytes()
    export_checkpoint(tmp_path / "disk" / "checkpoint-1", tmp_path / "one")
    monkeypatch.setattr(spilled, "MAX_BYTES", 0)
    export_checkpoint(tmp_path / "disk" / "checkpoint-1", tmp_path / "two")
    assert (tmp_path / "one" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
