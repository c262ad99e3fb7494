"""`fgcli ckpt export`: the model of a checkpoint, as others read it."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from forgather.cli.main import main
from forgather.ml import Trainer
from tests.cli.checkpoint_folders import forge
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_layouts import part
from tests.ml.fixtures import Regression, assert_same_weights, regression_rows, rows, weights
from tests.ml.test_model_export import assert_same_files, held, mixtral, tied_gpt2, tiny_llama


@pytest.fixture
def checkpoint(settings):
    def make(model, data=None):
        args = settings(save_strategy="steps", save_steps=2, max_steps=2)
        trainer = Trainer(model, args, train_dataset=data or rows(length=12))
        trainer.train()
        return trainer.model, Path(args.output_dir) / "checkpoint-2"

    return make


@pytest.mark.parametrize("make", [tiny_llama, tied_gpt2, mixtral])
@pytest.mark.parametrize("size", ["50GB", "40KB"])
def test_the_export_of_a_checkpoint_is_that_of_the_model(checkpoint, tmp_path, capsys, make, size):
    model, folder = checkpoint(make())
    assert 0 == main(["ckpt", "export", str(folder), str(tmp_path / "exported"), "--max-shard-size", size])
    model.save_pretrained(tmp_path / "theirs", max_shard_size=size)
    ours = held(tmp_path / "exported")
    sums = dict(reversed(line.split("  ")) for line in ours.pop("SHA256SUMS").decode().splitlines())
    assert {"kind": "model", "dtype": ["float32"]} == ours.pop("export.json")
    assert_same_files(held(tmp_path / "theirs"), ours)
    files = {file.name: file for file in (tmp_path / "exported").iterdir() if file.name != "SHA256SUMS"}
    assert {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()} == sums
    assert_same_weights(weights(model), weights(AutoModelForCausalLM.from_pretrained(tmp_path / "exported")))


@pytest.mark.parametrize("layout", ["shards", "stages"])
def test_what_several_processes_wrote_is_one_model(tmp_path, capsys, layout):
    run_ranks(2, part, tmp_path / "out", layout, (), {"load_best_model_at_end": False}, None, timeout=90)
    newest = max((tmp_path / "out").glob("checkpoint-*"), key=lambda folder: int(folder.name.rpartition("-")[2]))
    assert 0 == main(["ckpt", "export", str(newest), str(tmp_path / "exported")])
    assert 0 == main(["ckpt", "verify", str(newest)])
    assert_same_files(
        {name: content for name, content in held(tmp_path / "out").items() if name.startswith("model.safetensors")},
        {
            name: content
            for name, content in held(tmp_path / "exported").items()
            if name.startswith("model.safetensors")
        },
    )


def test_the_weights_can_be_of_another_type(checkpoint, tmp_path, capsys):
    model, folder = checkpoint(tiny_llama())
    assert 0 == main(["ckpt", "export", str(folder.parent), str(tmp_path / "half"), "--dtype", "bfloat16", "--json"])
    told = json.loads(capsys.readouterr().out)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert torch.bfloat16 == loaded.dtype and "checkpoint-2" in told["checkpoint"]
    assert_same_weights({name: value.bfloat16() for name, value in weights(model).items()}, weights(loaded))


def test_a_plain_model_is_exported_by_its_names(checkpoint, tmp_path):
    model, folder = checkpoint(Regression(), regression_rows())
    assert 0 == main(["ckpt", "export", str(folder), str(tmp_path / "plain")])
    assert {"model.safetensors", "SHA256SUMS", "export.json"} == {file.name for file in (tmp_path / "plain").iterdir()}
    assert_same_weights(weights(model), held(tmp_path / "plain")["model.safetensors {'format': 'pt'}"])


def test_a_model_is_whole_also_where_the_state_of_the_optimizer_is_damaged_or_lost(checkpoint, tmp_path, capsys):
    _, folder = checkpoint(tiny_llama())
    (folder / "custom").mkdir()
    (folder / "custom/own.bin").touch()
    forge(folder, "custom/own.bin", b"of a save_function")
    (folder / "optimizer.safetensors").write_bytes(b"cut")
    assert 0 == main(["ckpt", "export", str(folder), str(tmp_path / "saved")])
    assert not (tmp_path / "saved/custom").exists()
    (folder / "optimizer.json").unlink()
    assert 0 == main(["ckpt", "export", str(folder), str(tmp_path / "saved without")])
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    assert 1 == main(["ckpt", "export", str(folder), str(tmp_path / "broken")])
    assert "FG603" in capsys.readouterr().err and not (tmp_path / "broken").exists()


@pytest.mark.parametrize(
    ("into", "more"),
    [
        ("file", []),
        ("full", []),
        ("inside", []),
        ("new", ["--max-shard-size", "huge"]),
        ("new", ["--max-shard-size", "0GB"]),
        ("new", ["--max-shard-size", f"1{18 * '0'}GB"]),
    ],
)
def test_a_place_that_cannot_be_meant_is_refused(checkpoint, tmp_path, capsys, into, more):
    _, folder = checkpoint(tiny_llama())
    (tmp_path / "file").touch()
    (tmp_path / "full/x").mkdir(parents=True)
    place = folder / "model" if into == "inside" else tmp_path / into
    before = sorted(tmp_path.rglob("*"))
    assert 1 == main(["ckpt", "export", str(folder), str(place), *more])
    said = capsys.readouterr().err
    assert "error[FG677]" in said
    assert not more or f"'{more[1]}' is not a file size" in said and "--max-shard-size 5GB" in said
    assert before == sorted(tmp_path.rglob("*"))


def test_a_checkpoint_cannot_bring_code_along(checkpoint, tmp_path):
    """A class that the folder itself defines is not imported: the weights keep the names that they have."""
    model, folder = checkpoint(tiny_llama())
    facts = json.loads((folder / "config.json").read_text())
    evil = f"import pathlib; pathlib.Path({str(tmp_path / 'CANARY')!r}).touch()\n"
    forge(folder, "evil.py", evil.encode())
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    forge(folder, "config.json", json.dumps({**facts, "auto_map": auto, "architectures": ["Model"]}).encode())
    assert 0 == main(["ckpt", "export", str(folder), str(tmp_path / "exported")])
    assert not (tmp_path / "CANARY").exists()


def test_an_export_says_that_averaged_weights_are_left_out(settings, tmp_path, caplog):
    trained = {}
    for name, decay in (("plain", None), ("averaged", 0.9)):
        args = settings(
            output_dir=str(tmp_path / name), save_strategy="steps", save_steps=2, max_steps=2, ema_decay=decay
        )
        model = tiny_llama()
        Trainer(model, args, train_dataset=rows(length=12)).train()
        trained[name] = weights(model)
        caplog.clear()
        assert 0 == main(["ckpt", "export", str(tmp_path / name / "checkpoint-2"), str(tmp_path / f"{name} exported")])
        assert (decay is not None) == ("also has averaged weights (ema_decay)" in caplog.text)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "averaged exported")
    assert_same_weights(trained["plain"], weights(exported))
