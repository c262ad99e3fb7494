"""R10: how much a run will write is known before its first step, and too little room is an error there."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from forgather.errors import CheckpointError
from forgather.ml import Trainer
from forgather.ml.checkpoint import LocalStorage, Retention, list_checkpoints
from forgather.ml.checkpoint.manifest import read_manifest
from forgather.ml.optim import MuonWithAdamW
from forgather.ml.trainer.checkpoint_writer import SpaceNeeded, refuse_lack_of_space
from forgather.ml.trainer.save_policy import CheckpointSaver
from tests.ml.distributed.gang import run_ranks
from tests.ml.distributed.test_several_ranks import make
from tests.ml.fixtures import VOCAB, rows, tiny_llama


def tied_gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_positions=16, n_embd=96, n_layer=2, n_head=2))


class Plain(nn.Module):
    """A model of no library, with buffers and frozen weights."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(VOCAB, 256), nn.Linear(256, 256), nn.BatchNorm1d(256))
        self.head = nn.Linear(256, VOCAB)
        self.layers[1].requires_grad_(False)

    def forward(self, input_ids, labels):
        return nn.functional.cross_entropy(self.head(self.layers(input_ids.flatten())), labels.flatten())


MODELS = {
    "llama": lambda: tiny_llama(hidden_size=96, intermediate_size=128),
    "gpt2": tied_gpt2,
    "plain": Plain,
}
OPTIMIZERS = {
    "adamw": {},
    "sgd": {"optim": "sgd"},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optimizer_factory": MuonWithAdamW},
    "alone": {"save_only_model": True},
    "async": {"async_save": True, "save_total_limit": 1},
}


class Told(LocalStorage):
    """Has as much room as it is told."""

    def __init__(self, free):
        self.free = free

    def free_bytes(self, folder):
        return self.free


def job(settings, folder, model, kind, **more):
    given = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(folder), **OPTIMIZERS[kind], **more}
    objects = {name: given.pop(name) for name in ("optimizer_factory", "storage") if name in given}
    data = rows()
    if model == "plain":
        data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in data]
    return Trainer(MODELS[model](), settings(**given), train_dataset=data, **objects)


def predicted(trainer):
    """Trains; returns what the run said before its first step."""
    found = []
    need = CheckpointSaver.need
    CheckpointSaver.need = lambda *given: found.append(need(*given)) or found[-1]
    try:
        trainer.train()
    finally:
        CheckpointSaver.need = need
    return found[0]


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_the_bytes_of_a_checkpoint_are_known_before_the_first_step(model, kind, settings, tmp_path, figure):
    if model == "plain" and kind == "muon":
        pytest.skip("it has no hidden matrix that Muon could train")
    need = predicted(job(settings, tmp_path, model, kind))
    _, folder = list_checkpoints(tmp_path)[-1]
    actual = read_manifest(folder).size
    assert need.checkpoint == pytest.approx(actual, rel=0.05)
    weights = (tmp_path / "model.safetensors").stat().st_size
    assert need.model == pytest.approx(weights, rel=0.05)
    figure("R10", f"{model}, {kind}: predicted {need.checkpoint}, written {actual}")


def _sizes(folder, given):
    return predicted(make(folder, batch_size=2, ranks=2, save_strategy="steps", save_steps=4, **given)).checkpoint


@pytest.mark.parametrize("given", [{}, {"fsdp": "full_shard"}])
def test_the_bytes_of_all_processes_are_added_up(given, tmp_path):
    first, second = run_ranks(2, _sizes, tmp_path, given)
    assert first == second
    assert first == pytest.approx(read_manifest(tmp_path / "checkpoint-7").size, rel=0.05)


def test_too_little_room_is_an_error_before_the_first_step(settings, tmp_path):
    whole = predicted(job(settings, tmp_path / "free", "gpt2", "adamw"))
    one, model = whole.checkpoint, whole.model
    for free, limit, fits in [
        (2 * one + model - 2000, None, "save_total_limit: 1 would fit"),
        (2 * one + model + 2000, None, "none is needed"),
        (one + 2000, 1, "save_only_model: true"),
        (2 * one + 2000, 1, "none is needed"),
        (model // 2, 1, "more, or give another output_dir, or set save_strategy"),
        (None, None, "none is needed"),
    ]:
        folder = tmp_path / f"{free} {limit}"
        trainer = job(settings, folder, "gpt2", "adamw", save_total_limit=limit, storage=Told(free))
        if fits == "none is needed":
            assert 4 == trainer.train().global_step
            continue
        with pytest.raises(CheckpointError, match="the run will need") as refused:
            trainer.train()
        assert ("FG630", "args.output_dir") == (refused.value.code, refused.value.argument)
        assert fits in refused.value.hint
        assert 0 == trainer.state.global_step
        assert [] == list(folder.iterdir())


def test_a_resumed_run_needs_no_room_for_what_lies_there(settings, tmp_path):
    job(settings, tmp_path, "gpt2", "adamw", max_steps=2).train()
    one = read_manifest(tmp_path / "checkpoint-2").size
    trainer = job(settings, tmp_path, "gpt2", "adamw", max_steps=4, storage=Told(int(1.4 * one)))
    trainer.train(resume_from_checkpoint=True)
    assert [2, 4] == [step for step, _ in list_checkpoints(tmp_path)]


@pytest.mark.parametrize(
    ("retention", "present", "expected"),
    [
        (Retention(), [], (10, 10)),
        (Retention(last=3), [], (4, 3)),
        (Retention(last=3), [1, 2, 3], (1, 0)),
        (Retention(last=1), [], (3, 2)),
        (Retention(last=2, every=50), [], (4, 4)),
        (Retention(last=1, best=4), [], (6, 5)),
    ],
)
def test_the_policy_tells_how_many_lie_there_at_once(retention, present, expected):
    need = SpaceNeeded(checkpoint=100, model=10, steps=range(10, 101, 10), present=present)
    assert expected == need.num_checkpoints(retention)


def test_what_would_fit_is_named():
    need = SpaceNeeded(checkpoint=100, model=10, steps=range(10, 1001, 10))
    with pytest.raises(CheckpointError) as refused:
        refuse_lack_of_space(need, Retention(), Path("out"), 720)
    assert "save_total_limit: 6 would fit" in refused.value.hint


@pytest.mark.parametrize(
    ("limit", "model", "told", "freed"),
    [
        (2, 40, "300 B in 'out', where 90 B are free: 3 checkpoints of 100 B at one time", "free 210 B more"),
        (2, 120, "320 B in 'out', where 90 B are free: 2 checkpoints of 100 B, and the model of 120 B", "230 B more"),
        (None, 10, "310 B in 'out', where 90 B are free: 3 checkpoints of 100 B, and the model of 10 B", "220 B more"),
    ],
)
def test_the_parts_that_are_told_give_the_sum(limit, model, told, freed):
    need = SpaceNeeded(checkpoint=100, model=model, steps=[10, 20, 30])
    with pytest.raises(CheckpointError) as refused:
        refuse_lack_of_space(need, Retention(last=limit), Path("out"), 90)
    assert told in refused.value.message
    assert freed in refused.value.hint


def test_a_run_of_very_many_saves_is_judged_at_once():
    need = SpaceNeeded(checkpoint=100, model=10, steps=range(1, 1_000_001), present=[1, 2])
    assert (999_998, 999_998) == need.num_checkpoints(Retention())
