"""A buffer that training changes and no checkpoint holds is named at a save, exactly where a resumed run would differ."""

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from forgather.ml import Trainer
from forgather.ml.trainer.hf import HFTrainer
from forgather.ml.unsaved_buffers import UnsavedBuffers
from tests.ml.fixtures import regression_rows, rows, tiny_llama


class Shifted(nn.Module):
    """Predicts with the running mean of what it has seen, which is a buffer."""

    def __init__(self, *, persistent):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros(4), persistent=persistent)
        self.register_buffer("table", torch.arange(2.0), persistent=False)

    def forward(self, x, y):
        with torch.no_grad():
            self.seen += x.mean(0)
            self.table = torch.arange(2.0 + len(self.table))  # a cache that grows
        return nn.functional.mse_loss(self.layer(x + self.seen).squeeze(-1), y)


def llama(kind):
    positions = {"rope_type": kind, "rope_theta": 10000.0}
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
    extra = {"dynamic": {"factor": 2.0}, "longrope": {"factor": 2.0, **factors}, "default": {}}[kind]
    return tiny_llama(max_position_embeddings=8, rope_parameters={**positions, **extra})


def rows_by_length():
    """Rows longer than the model's 8 positions, the longest in the first step."""
    return [{name: part[: 16 - number // 2] for name, part in row.items()} for number, row in enumerate(rows(8, 16))]


CASES = {
    "persistent": (lambda: Shifted(persistent=True), regression_rows, None),
    "not persistent": (lambda: Shifted(persistent=False), regression_rows, "seen of Shifted"),
    "default positions": (lambda: llama("default"), rows_by_length, None),
    "longrope": (lambda: llama("longrope"), rows_by_length, None),
    "dynamic": (lambda: llama("dynamic"), rows_by_length, "model.rotary_emb.inv_freq of LlamaForCausalLM"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_warning_comes_exactly_where_a_resumed_run_differs(case, settings, caplog, tmp_path):
    make, data, named = CASES[case]

    def run(**more):
        given = {"max_steps": 4, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential", **more}
        trainer = Trainer(model := make(), settings(optim="sgd", **given), train_dataset=data())
        trainer.train()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    whole = run()
    assert "FG797" not in caplog.text
    run(save_strategy="steps", save_steps=2)
    resumed = run(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))

    assert torch.equal(whole, resumed) == (named is None)
    assert caplog.text.count("[FG797]") == (named is not None)
    assert named is None or f"training changes the buffer {named}, and checkpoints do not hold" in caplog.text


def test_checkpoints_of_weights_alone_are_not_warned_of(settings, caplog):
    args = settings(max_steps=2, save_strategy="steps", save_steps=1, save_only_model=True)
    Trainer(Shifted(persistent=False), args, train_dataset=regression_rows()).train()
    assert "FG797" not in caplog.text


def test_the_trainer_of_transformers_warns_too(settings, caplog, tmp_path):
    own = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    args = TrainingArguments(
        output_dir=str(tmp_path / "hf"), use_cpu=True, report_to=[], train_sampling_strategy="sequential", **own
    )
    HFTrainer(llama("dynamic"), args, train_dataset=rows_by_length()).train()
    assert caplog.text.count("[FG797]") == 1


def test_several_buffers_are_named_up_to_three_and_counted(caplog):
    model = nn.ModuleDict({name: nn.Module() for name in "abcd"})
    for part in model.values():
        part.register_buffer("kept", torch.zeros(2), persistent=False)
    buffers = UnsavedBuffers(model)
    buffers.warn()
    assert caplog.text == ""
    for part in model.values():
        part.kept += 1

    buffers.warn()
    buffers.warn()

    assert "training changes the buffers a.kept, b.kept, c.kept and 1 more of ModuleDict" in caplog.text
    assert caplog.text.count("FG797") == 1
