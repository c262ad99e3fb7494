"""Settings that save memory or time, with adapters and losses of preferences: equal to the run without the setting.

That a run without them equals a loop of torch and peft is shown in test_preference_adapters.py and in the cells. What
is not compared here is refused by name.
"""

import functools
import os

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import TrainerCallback
from transformers.models.llama.modeling_llama import LlamaMLP

from forgather.ml import (
    AccelTrainer,
    AccelTrainingArguments,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
    TrainingArguments,
)
from forgather.ml.data import PreferenceCollator
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.kernels import register_custom_kernel
from forgather.ml.preference_losses import DPOLoss, KTOLoss, ORPOLoss
from forgather.ml.strategy.state import on_host
from tests.matrix import thinned
from tests.ml import preference_cases as cases
from tests.ml.distributed.gang import RankFailed, run_ranks
from tests.ml.fixtures import StopAt, tiny_llama
from tests.ml.moved_activations import moved_to_host
from tests.patience import patience

LIMIT = 1e-10
ADAPTERS = {"LoRA": {"r": 4, "lora_alpha": 16}, "DoRA": {"r": 4, "lora_alpha": 16, "use_dora": True}, "none": None}
LOSSES = {"tokens": None, "dpo": DPOLoss(beta=0.3), "kto": KTOLoss(beta=0.3), "orpo": ORPOLoss(beta=0.3)}
TOKENS = [{"input_ids": ids, "labels": ids} for ids in ([3, 9, 4, 7, 12, 5], [21, 6, 30, 2, 8, 1], [5] * 6, [9, 8] * 3)]
LAYOUTS = {
    "one": (1, Trainer, TrainingArguments, {}),
    "DDP": (2, AccelTrainer, AccelTrainingArguments, {}),
    "FSDP2": (2, AccelTrainer, AccelTrainingArguments, {"fsdp": "full_shard"}),
    "1F1B": (2, PipelineTrainer, PipelineTrainingArguments, {"pipeline_chunks": 2}),
}
SETTINGS = {
    "kernel": {},
    "budgeted": {"torch_compile": True, "torch_compile_backend": "aot_eager", "activation_memory_budget": 0.3},
    "offloaded": {"activation_offloading": True},
    "recomputed and offloaded": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}},
    "in backward": {"optimizer_in_backward": True},
    "share": {"communication_share": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "chunked": {"linear_cross_entropy": True, "linear_cross_entropy_chunk_size": 5},
}


def _cells():
    for layout in LAYOUTS:
        for loss in LOSSES:
            for adapter in ADAPTERS:
                for setting in SETTINGS:
                    if setting == "chunked" and loss != "tokens":
                        continue
                    if setting == "in backward" and layout not in ("one", "FSDP2"):
                        continue
                    # Graphs of a DoRA take a minute; what differs between layouts is no part of a graph.
                    if setting in ("compiled", "budgeted") and (layout != "one" and (loss, adapter) != ("dpo", "LoRA")):
                        continue
                    yield layout, loss, adapter, setting


QUICK = {
    ("one", "tokens", "DoRA", "chunked"),
    ("one", "dpo", "LoRA", "in backward"),
    ("one", "kto", "DoRA", "offloaded"),
    ("one", "dpo", "LoRA", "kernel"),
    ("FSDP2", "dpo", "DoRA", "in backward"),
}


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) * up


@register_custom_kernel("gated_in_setting_pairs", reference=gated, device_types=("cpu",))
def kernel(gate, up):
    return torch.nn.functional.silu(gate) * up


@kernel.backward
def kernel_backward(grads, gate, up):
    share = torch.sigmoid(gate)
    return grads[0] * up * share * (1 + gate * (1 - share)), grads[0] * gate * share


class WithKernel(LlamaMLP):
    """The feed-forward part of a Llama with a custom kernel."""

    def forward(self, x):
        return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))


def model_of(setting):
    model = cases.language_model(1).double()
    for module in model.modules():
        if setting == "kernel" and type(module) is LlamaMLP:
            module.__class__ = WithKernel
    return model


class Lines(TrainerCallback):
    """Keeps the lines that were logged; it has no event before the step of the optimizer."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def trained(folder, layout, loss, adapter, setting):
    """Returns the losses, the weights, and whether the run had norms, graphs, moved activations and the kernel."""
    settings = {} if setting is None else SETTINGS[setting]
    kernel.verdicts.clear()
    ranks, trainer, arguments, given = LAYOUTS[layout]
    lines = Lines()
    plain = {
        "per_device_train_batch_size": 2 if trainer is AccelTrainer else 4,
        "max_steps": 3,
        "learning_rate": 5e-2,
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    several = {"timeout_seconds": patience(60), "start_timeout_seconds": patience(60)}
    torch._dynamo.reset()
    counters.clear()
    run = trainer(
        model_of(setting),
        arguments(str(folder), use_cpu=True, **{**plain, **given, **settings}),
        train_dataset={"tokens": TOKENS, "kto": cases.FEEDBACK[:4]}.get(loss, cases.PAIRS),
        data_collator=None if loss == "tokens" else PreferenceCollator(),
        loss_fn=LOSSES[loss],
        adapter=ADAPTERS[adapter],
        callbacks=[lines],
        **({"distributed_env": DistributedEnvironment(**several)} if ranks > 1 else {}),
    )
    with moved_to_host() as moved:
        run.train()
    losses = [line["loss"] for line in lines.lines if "loss" in line]
    state = {name: value.detach() for name, value in on_host(run.strategy.export(), keep=True).items()}
    has_norms = any("grad_norm" in line for line in lines.lines)
    graphs = counters["stats"].get("unique_graphs", 0)
    # A verdict of None says that the kernel was used.
    computes = {*kernel.verdicts.values()} == {None}
    return losses, state, {"norms": has_norms, "is compiled": graphs > 0, "moves": bool(moved), "kernel": computes}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("layout", "loss", "adapter", "setting"), thinned(list(_cells()), lambda *case: case in QUICK), ids=str
)
def test_a_setting_changes_no_loss_and_no_weight(tmp_path, layout, loss, adapter, setting):
    ranks = LAYOUTS[layout][0]
    runs = [
        run_ranks(ranks, trained, tmp_path / str(number), layout, loss, adapter, one, timeout=300)
        for number, one in enumerate((None, setting))
    ]
    for (plain, expected, _), (losses, state, facts) in zip(*runs, strict=True):
        assert losses == pytest.approx(plain, rel=0, abs=LIMIT)
        assert abs(losses[0] - losses[-1]) > 1e-4
        assert state.keys() == expected.keys()
        assert max(float((state[name] - expected[name]).abs().max()) for name in state) <= LIMIT
        assert facts == {
            "norms": setting != "in backward",
            "is compiled": setting in ("compiled", "budgeted"),
            "moves": "offloaded" in setting,
            "kernel": setting == "kernel",
        }


CONTEXT = {
    "DDP": (2, AccelTrainer, AccelTrainingArguments, {"context_parallel_size": 2, "per_device_train_batch_size": 4}),
}
CONTEXT["FSDP2"] = (*CONTEXT["DDP"][:3], {**CONTEXT["DDP"][3], "fsdp": "full_shard"})
for name in ("DDP", "FSDP2"):
    ring = {"context_parallel_method": "ring", "context_parallel_rotate_method": "alltoall"}
    CONTEXT[f"{name}, ring"] = (*CONTEXT[name][:3], CONTEXT[name][3] | ring)


@pytest.mark.parametrize(
    ("layout", "adapter"),
    thinned([(one, two) for one in CONTEXT for two in ("LoRA", "DoRA")], lambda *case: case == ("FSDP2", "LoRA")),
)
def test_an_adapter_trains_with_divided_rows_as_in_one_process(tmp_path, monkeypatch, layout, adapter):
    monkeypatch.setitem(LAYOUTS, "context", CONTEXT[layout])
    ((plain, expected, _),) = run_ranks(1, trained, tmp_path / "one", "one", "tokens", adapter, None)
    for losses, state, _ in run_ranks(2, trained, tmp_path / "two", "context", "tokens", adapter, None, timeout=300):
        assert losses == pytest.approx(plain, rel=0, abs=LIMIT)
        assert max(float((state[name] - expected[name]).abs().max()) for name in state) <= LIMIT


def test_preferences_are_refused_with_divided_rows(tmp_path, monkeypatch):
    monkeypatch.setitem(LAYOUTS, "context", CONTEXT["DDP"])
    with pytest.raises(RankFailed, match="FG757"):
        run_ranks(2, trained, tmp_path, "context", "orpo", "none", None)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "settings",
    [{}, {"fsdp": "full_shard"}, {"fsdp": "full_shard", "initial_weights": "counter"}],
    ids=str,
)
def test_a_resumed_run_scores_rows_by_the_first_weights_although_it_makes_none(tmp_path, settings):
    expected = run_ranks(2, with_a_reference, tmp_path / "x", tmp_path / "1", None, settings)
    run_ranks(2, with_a_reference, tmp_path / "y", tmp_path / "1", 2, settings)
    # Another cache: the scores of the first run are not found.
    settings = {**settings, "resume_from_checkpoint": True}
    assert expected == run_ranks(2, with_a_reference, tmp_path / "y", tmp_path / "2", None, settings)


def with_a_reference(folder, cache, stop, settings):
    """Returns the losses of a run whose reference is the model with its first weights."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    args = AccelTrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=1,
        **settings,
    )
    run = AccelTrainer(
        model_init=functools.partial(tiny_llama, vocab_size=32),
        args=args,
        train_dataset=cases.PAIRS,
        data_collator=PreferenceCollator(),
        loss_fn=LOSSES["dpo"],
        callbacks=[] if stop is None else [StopAt(stop)],
    )
    run.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return [line["loss"] for line in run.state.log_history if "loss" in line]
