"""Settings of our own as words of Lightning's `Trainer`: equal to a plain loop, or refused by name."""

import os

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

import forgather.lightning as L
from forgather.lightning.module_settings import REFUSED
from forgather.lightning.trainer_words import KNOWN
from forgather.ml.strategy.state import on_host
from forgather.ml.trainer.argument_checks import SettingError
from forgather.ml.trainer.parallel_arguments import AccelTrainingArguments
from tests.lightning import scripts
from tests.lightning.test_config import findings
from tests.matrix import thinned
from tests.ml.distributed.gang import run_ranks
from tests.ml.moved_activations import moved_to_host

STEPS, RATE = 6, 0.05
TAKEN = {
    "activation_offloading": {"activation_offloading": True},
    "communication_share": {"communication_share": True, "logging_steps": 1},
    "gradient_checkpointing": {"gradient_checkpointing": True},
    "recomputed and offloaded": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
}
STRATEGIES = {"ddp": L.DDPStrategy(), "fsdp": L.FSDPStrategy()}
GENERIC = {
    *("accelerate_config", "accelerator_args", "accumulate_grad_batches", "allow_changed", "allow_missing"),
    *("async_save", "bad_step_policy", "bf16", "control", "data_parallel_size", "deepspeed", "fp16", "fsdp"),
    *("fsdp_config", "gradient_accumulation_steps", "greater_is_better", "keep_every_n_steps", "logging_dir"),
    *("load_best_model_at_end", "logging_first_step", "logging_steps", "logging_strategy", "max_bad_steps"),
    *("max_grad_norm", "max_steps", "metric_for_best_model", "num_train_epochs", "output_dir", "profile", "project"),
    *("report_to", "restore_callback_states_from_checkpoint", "run_name", "save_minutes", "save_on_best"),
    *("save_only_model", "save_steps", "save_strategy", "save_top_k", "save_total_limit", "seed", "spike_threshold"),
    *("spike_window", "strict", "tensor_parallel_size", "tf32", "tp_plan", "use_cpu", "push_to_hub"),
    *(name for name in KNOWN if name.startswith(("ddp_", "hub_"))),
}
"""What our loop does around a module as around any other model: the length of a run, strategies, logs, checkpoints."""
VALUES = {"fp8": "rowwise", "optim": "adamw_torch", "context_parallel_size": 2}


class Counted(nn.Linear):
    """A layer that counts how often it is computed, also inside of a recomputation."""

    num_forwards = 0

    def forward(self, inputs):
        self.num_forwards += 1
        return super().forward(inputs)


class Deep(scripts.regression(L)):
    """Blocks that are recomputed one by one, wide enough for activations that are moved."""

    def __init__(self):
        super().__init__(dropout=0.0)
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 128), nn.Tanh(), Counted(128, 128), nn.Tanh(), nn.Linear(128, 1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)


def batches(rows=8, sampler=None):
    return torch.utils.data.DataLoader(scripts.rows(8 * STEPS), batch_size=rows, sampler=sampler)


def plain_loop():
    model = Deep()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9), []
    for inputs, targets in batches():
        loss = nn.functional.mse_loss(model.net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def fitted(folder, setting, strategy=None):
    """Returns the losses and the weights, how often the layer was computed, and whether activations were moved."""
    ranks = 1 if strategy is None else 2
    model = Deep()
    words, sampler = {}, None
    if strategy is not None:
        # In place of one that shuffles, so that the ranks read the rows of the plain loop.
        words = {"strategy": STRATEGIES[strategy], "devices": 2, "use_distributed_sampler": False}
        sampler = DistributedSampler(scripts.rows(8 * STEPS), 2, int(os.environ["RANK"]), shuffle=False)
    trainer = scripts.trainer(L, folder, max_epochs=1, accelerator="cpu", **words, **TAKEN[setting])
    with moved_to_host() as moved:
        trainer.fit(model, batches(8 // ranks, sampler))
    found = trainer._loop
    state = {name: value.detach() for name, value in on_host(found.strategy.export(), keep=True).items()}
    shares = [line["communication_share"] for line in found.state.log_history if "communication_share" in line]
    return model.losses, state, {"computed": model.net[2].num_forwards, "moves": bool(moved), "shares": bool(shares)}


CASES = [(setting, strategy) for setting in TAKEN for strategy in (None, *STRATEGIES)]
QUICK = (
    ("activation_offloading", None),
    ("recomputed and offloaded", None),
    ("communication_share", "ddp"),
    ("recomputed and offloaded", "fsdp"),
)


@pytest.mark.parametrize(("setting", "strategy"), thinned(CASES, lambda *case: case in QUICK))
def test_a_setting_that_is_taken_has_its_effect_and_the_numbers_of_a_plain_loop(tmp_path, setting, strategy):
    losses, weights = plain_loop()
    for own, state, facts in run_ranks(1 if strategy is None else 2, fitted, tmp_path, setting, strategy):
        # A rank has the losses of its own rows.
        assert strategy is not None or losses == pytest.approx(own, rel=1e-6)
        for name, value in state.items():
            torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-7)
        assert facts == {
            "computed": (2 if "gradient_checkpointing" in TAKEN[setting] else 1) * STEPS,
            "moves": "offload" in setting,
            "shares": setting == "communication_share" and strategy is not None,
        }


def test_every_setting_is_taken_or_refused():
    compared = {name for given in TAKEN.values() for name in given}
    assert REFUSED.keys() | GENERIC | compared == KNOWN
    assert not REFUSED.keys() & (GENERIC | compared)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_setting_that_a_module_does_not_read_is_refused_by_name(name):
    value = VALUES.get(name, AccelTrainingArguments().to_dict()[name])
    with pytest.raises(SettingError, match=f"FG865.*'{name}' is a setting of our trainers") as caught:
        L.Trainer(max_epochs=1, **{name: True if value is None else value})
    assert REFUSED[name] in str(caught.value)


def test_the_check_finds_it_at_its_line(tmp_path):
    assert [("FG865", 22, "trainer.data_streams")] == findings(tmp_path, "data_streams: 4")


def test_a_word_of_lightning_that_becomes_such_a_setting_is_no_mistake(tmp_path):
    assert [] == findings(tmp_path, "log_every_n_steps: 1", "accelerator: cpu", "gradient_clip_val: 0.5")
