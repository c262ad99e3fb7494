"""A checkpoint file of Lightning that is damaged or hostile is one error that names it, and none of it is run."""

import os
import pickle
from pathlib import Path

import pytest
import torch

import forgather.lightning as L
from forgather.errors import CheckpointError


class Module(L.LightningModule):
    def __init__(self, size=2):
        super().__init__()
        self.layer = torch.nn.Linear(size, 2)


class Runs:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def saved(**parts):
    weights = {"layer.weight": torch.ones(2, 2), "layer.bias": torch.zeros(2)}
    torch.save({"state_dict": weights, "hyper_parameters": {"size": 2}, **parts}, "a.ckpt")


def error_of(path="a.ckpt"):
    with pytest.raises(CheckpointError) as caught:
        L.load_from_checkpoint(Module, path)
    return caught.value


def test_an_intact_file_is_read():
    saved()
    assert 2 == L.load_from_checkpoint(Module, "a.ckpt").layer.in_features


@pytest.mark.parametrize("parts", [{"hyper_parameters": Runs()}, {"extra": Runs()}], ids=["parameters", "beside"])
def test_code_in_a_file_is_not_run(parts):
    saved(**parts)
    assert "FG615" == error_of().code
    assert not os.path.exists("ran")


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({"state_dict": 3}, "FG611"),
        ({"state_dict": {"layer.weight": torch.ones(3, 3)}}, "FG605"),
        ({"state_dict": {"layer.weight": "text", "layer.bias": None}}, "FG605"),
        ({"state_dict": {1: torch.ones(2)}}, "FG611"),
        ({"hyper_parameters": [1]}, "FG611"),
        ({"hyper_parameters": {3: 4}}, "FG611"),
    ],
)
def test_a_file_with_other_content_is_an_error(parts, code):
    saved(**parts)
    assert code == error_of().code


def test_every_damage_of_a_file_is_an_error():
    saved()
    whole = Path("a.ckpt").read_bytes()
    kept = {}
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        for name, data in (
            ("cut", whole[:place]),
            ("bit", whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :]),
        ):
            with open("a.ckpt", "wb") as stream:
                stream.write(data)
            try:
                L.load_from_checkpoint(Module, "a.ckpt")
            except CheckpointError as error:
                assert "a.ckpt" in error.message
            else:
                kept[name, place] = True
    assert not [place for name, place in kept if name == "cut"]


@pytest.mark.parametrize("data", [pickle.dumps(Runs()), pickle.dumps([1]), b"", b"\x80\x05.", b"{}"], ids=str)
def test_a_file_of_another_program_is_an_error(data):
    with open("a.ckpt", "wb") as stream:
        stream.write(data)
    assert error_of().code in ("FG611", "FG615")
    assert not os.path.exists("ran")


@pytest.mark.parametrize("path", [None, 3, "", "a\0b", "x" * 5000, "missing.ckpt", b"a.ckpt"])
def test_a_path_that_does_not_exist_is_an_error(path):
    assert "FG601" == error_of(path).code


def test_hyper_parameters_that_are_no_json_are_an_error():
    os.makedirs("folder/custom")
    with open("folder/custom/module.json", "w", encoding="utf-8") as stream:
        stream.write("[" * 100_000)
    assert "FG611" == error_of("folder").code
