"""The test-bench of strategies: the same training in several processes and in one, compared number by number.

Takes a `Cell` (a trainer and its settings, a model, an accumulation, a precision); gives its `Errors` against the run of
one process over the same global batches. Keeps true: both runs go through the public trainers; the reference knows no
strategy but that of one process; a sabotaged cell must be far off, or the bench measures nothing.
"""

import contextlib
import dataclasses
import functools
import math
import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers import DataCollatorWithFlattening, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import TrainerCallback

import forgather.ml
from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.optim import MuonWithAdamW
from tests.ml.distributed.gang import import_engine, run_ranks
from tests.ml.moved_activations import moved_to_host
from tests.ml.packed_rows import SYMBOLS, VOCAB, packed
from tests.patience import patience

LENGTH, LAYERS, UPDATES = 12, 8, 3
GLOBAL_ROWS = 16
"""Rows of one micro-step over all data-parallel ranks: every cell and its reference see the same ones."""

_ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5}
# Decay makes two groups of parameters: which of them a weight is in must not depend on the strategy.

PRECISIONS = {
    "fp64": {"dtype": torch.float64, **_ADAMW},
    "fp32 sgd": {"dtype": torch.float32, "optim": "sgd", "learning_rate": 5e-2, "max_grad_norm": 0.0},
    "fp32 adamw": {"dtype": torch.float32, **_ADAMW},
}

# Eleven tokens a chunk do not divide the tokens of any micro-batch.
_CHUNKED = {"linear_cross_entropy": True, "linear_cross_entropy_chunk_size": 11}
# Equal to updates after the backward pass bit for bit: see test_backward_update.py.
_IN_BACKWARD = {"optimizer_in_backward": True, "max_grad_norm": 0.0}
_COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
_OFFLOADED = {"settings": {"activation_offloading": True}, "moves": True, "as": ""}
# A ring computes causal attention over whole rows.
_ONE_DOCUMENT = {"packing": {"document_boundaries": False}}
_SAME = {"as": "one document"}
_OF_ONE_DOCUMENT = {
    "": {},
    ", recomputed": {"settings": {"gradient_checkpointing": True}, **_SAME},
    ", selective": {
        "settings": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"mode": "selective"}},
        **_SAME,
    },
    ", chunked loss": {"settings": _CHUNKED, **_SAME},
    ", offloaded": {**_OFFLOADED, **_SAME},
    ", fewer from epoch 1": {"settings": {"accumulate_grad_batches": {0: 3, 1: 2}}},
    ", LoRA": {"adapter": {"r": 4, "lora_alpha": 8}},
    ", averaged": {
        "settings": {"ema_decay": 0.8, "ema_update_after_step": 1, "eval_strategy": "steps", "eval_steps": 2},
        "evaluates": True,
    },
    ", evaluated": {"settings": {"eval_strategy": "steps", "eval_steps": 1}, "evaluates": True},
    ", bf16": {"settings": {"bf16": True}},
    ", fp16": {"settings": {"fp16": True}, **_SAME},
    ", re-entrant": {
        "settings": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        **_SAME,
    },
    ", in backward": {"settings": _IN_BACKWARD},
}
OPTIONS = {
    "": {},
    "offloaded": _OFFLOADED,
    "offloaded, recomputed": {
        **_OFFLOADED,
        "settings": {"activation_offloading": True, "gradient_checkpointing": True},
    },
    "offloaded, compiled": {**_OFFLOADED, "settings": {"activation_offloading": True, **_COMPILED}},
    "offloaded, chunked loss": {**_OFFLOADED, "settings": {"activation_offloading": True, **_CHUNKED}},
    "offloaded, LoRA": {**_OFFLOADED, "adapter": {"r": 4, "lora_alpha": 8}, "as": "LoRA"},
    "bf16, offloaded": {**_OFFLOADED, "settings": {"activation_offloading": True, "bf16": True}, "as": "bf16"},
    "half of the activations": {"settings": {**_COMPILED, "activation_memory_budget": 0.5}, "as": ""},
    "bf16": {"settings": {"bf16": True}},
    "fp16": {"settings": {"fp16": True}, "as": ""},
    "compiled": {"settings": _COMPILED, "as": ""},
    "compiled and recomputed": {"settings": {**_COMPILED, "gradient_checkpointing": True}, "as": ""},
    "recomputed": {"settings": {"gradient_checkpointing": True}, "as": ""},
    "re-entrant": {
        "settings": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        "as": "",
    },
    "chunked loss": {"settings": _CHUNKED, "as": ""},
    "chunked loss, recomputed": {"settings": {**_CHUNKED, "gradient_checkpointing": True}, "as": ""},
    "chunked loss, compiled": {"settings": {**_CHUNKED, **_COMPILED, "torch_compile_regions": True}, "as": ""},
    "fp16, chunked loss": {"settings": {**_CHUNKED, "fp16": True}, "as": ""},
    "bf16, chunked loss": {"settings": {**_CHUNKED, "bf16": True}, "as": "bf16"},
    "chunked loss, LoRA": {"settings": _CHUNKED, "adapter": {"r": 4, "lora_alpha": 8}, "as": "LoRA"},
    "flattened": {"collator": DataCollatorWithFlattening, "packing": {"document_boundaries": False}},
    **{f"one document{name}": {**option, **_ONE_DOCUMENT} for name, option in _OF_ONE_DOCUMENT.items()},
    "frozen stage": {"frozen": True},
    "frozen stage, recomputed": {"frozen": True, "settings": {"gradient_checkpointing": True}, "as": "frozen stage"},
    "bf16, frozen stage": {"frozen": True, "settings": {"bf16": True}},
    "bf16, frozen stage, recomputed": {
        "frozen": True,
        "settings": {"bf16": True, "gradient_checkpointing": True},
        "as": "bf16, frozen stage",
    },
    "bf16, frozen stage, recomputed and compiled": {
        "frozen": True,
        "settings": {"bf16": True, "gradient_checkpointing": True, **_COMPILED},
        "as": "bf16, frozen stage",
    },
    "Adafactor": {"settings": {"optim": "adafactor"}},
    "Muon": {"factory": functools.partial(MuonWithAdamW, lr=1e-2)},
    "LoRA": {"adapter": {"r": 4, "lora_alpha": 8}},
    "LoRA, recomputed": {
        "adapter": {"r": 4, "lora_alpha": 8},
        "settings": {"gradient_checkpointing": True},
        "as": "LoRA",
    },
    "DoRA": {"adapter": {"r": 4, "lora_alpha": 8, "use_dora": True}},
    "PiSSA": {"adapter": {"r": 4, "lora_alpha": 4, "init_lora_weights": "pissa"}},
    "LoRA and a head": {"adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}},
    "fewer from epoch 1": {"settings": {"accumulate_grad_batches": {0: 3, 1: 2}}},
    "more from step 2": {"settings": {"accumulate_grad_batches": {"steps": {0: 1, 2: 3}}}},
    "global batch": {"settings": {"global_batch_size": 3 * GLOBAL_ROWS}, "as": ""},
    "groups": {
        "settings": {
            "parameter_groups": [
                {"pattern": "embed_tokens|wte", "learning_rate": 1e-4, "weight_decay": 0.0},
                {"pattern": "layers.[1-6]|h.[1-6]", "learning_rate": 3e-3},
            ],
            "layer_lr_decay": 0.8,
            "lr_scheduler_type": "cosine",
        }
    },
    "frozen by name": {"settings": {"freeze": ["embed_tokens|wte", "layers.[0-1]|h.[0-1]", "norm.weight|ln_f"]}},
    "frozen at first": {
        "settings": {
            "freeze": [{"pattern": "*embed_tokens|wte|layers.0|h.0", "until": 2}, {"pattern": "*.5", "until": "1ep"}]
        }
    },
    "averaged": {
        "settings": {"ema_decay": 0.8, "ema_update_after_step": 1, "eval_strategy": "steps", "eval_steps": 2},
        "evaluates": True,
    },
    "evaluated": {"settings": {"eval_strategy": "steps", "eval_steps": 1}, "evaluates": True},
    "evaluated, chunked loss": {
        "settings": {**_CHUNKED, "eval_strategy": "steps", "eval_steps": 1},
        "as": "evaluated",
        "evaluates": True,
    },
    "averaged, LoRA": {"settings": {"ema_decay": 0.8}, "adapter": {"r": 4, "lora_alpha": 8}},
    "noise": {"settings": {"neftune_noise_alpha": 5.0}},
    "several": {
        "settings": {
            "ema_decay": 0.8,
            "layer_lr_decay": 0.8,
            "parameter_groups": [{"pattern": "*.2.mlp", "learning_rate": 3e-3, "weight_decay": 0.0}],
            "freeze": ["*.1.self_attn", {"pattern": "*.0", "until": 2}],
            "include_num_input_tokens_seen": "all",
        }
    },
    "several in stages": {
        "settings": {
            "ema_decay": 0.8,
            "layer_lr_decay": 0.8,
            "parameter_groups": [{"pattern": "*.1.mlp", "learning_rate": 3e-3, "weight_decay": 0.0}],
            "freeze": ["*.0.self_attn"],
            "include_num_input_tokens_seen": "all",
        }
    },
    "counter": {"settings": {"initial_weights": "counter"}},
    "counter, LoRA": {"settings": {"initial_weights": "counter"}, "adapter": {"r": 4, "lora_alpha": 8}},
    "in backward": {"settings": _IN_BACKWARD},
    "in backward, recomputed": {"settings": {**_IN_BACKWARD, "gradient_checkpointing": True}, "as": "in backward"},
    "in backward, chunked loss": {"settings": {**_IN_BACKWARD, **_CHUNKED}, "as": "in backward"},
    "in backward, compiled": {"settings": {**_IN_BACKWARD, **_COMPILED}, "as": "in backward"},
    "in backward, offloaded": {
        **_OFFLOADED,
        "settings": {**_IN_BACKWARD, "activation_offloading": True},
        "as": "in backward",
    },
    "bf16, in backward": {"settings": {**_IN_BACKWARD, "bf16": True}},
    "frozen at first, in backward": {
        "settings": {**_IN_BACKWARD, "freeze": [{"pattern": "*embed_tokens|wte|layers.0|h.0", "until": 2}]}
    },
    "LoRA and tokens": {"adapter": {"r": 4, "trainable_token_indices": [1, 3]}},
}
"""What a training has beside its strategy, in one process as well; "as" names the option of the one to compare with.

"moves": activations are moved to the host, as they are on a GPU."""

LIMITS = {
    "half": {"loss": 1e-3, "grad_norm": 1e-2, "updrel": 3e-2},
    # Weights are gathered in bfloat16, where one process keeps those of float32.
    "half, gathered": {"loss": 2e-4, "grad_norm": 5e-3, "updrel": 2e-2},
    "fp64": {"loss": 1e-10, "grad_norm": 1e-10, "updrel": 1e-10},
    "fp32 sgd": {"grad_norm": 5e-6, "updrel": 1e-5},
    "fp32 adamw": {"loss": 2e-6, "grad_norm": 2e-6, "updrel": 2e-5, "max_abs": 1e-2 * 1e-3},
    # A ring adds the keys of a row in another order; AdamW divides by gradients as small as what is rounded.
    "fp32 adamw, ring": {"loss": 2e-6, "grad_norm": 2e-6, "updrel": 2e-5, "max_abs": 5e-2 * 1e-3},
    # Slices add products in another order; AdamW divides by gradients as small as what is rounded.
    "fp32 adamw, slices": {"loss": 2e-6, "grad_norm": 5e-6, "updrel": 6e-5, "max_abs": 1e-1 * 1e-3},
}


@dataclass(frozen=True)
class Cell:
    """One training in several processes.

    Args:
        strategy: its name in the table.
        world_size: number of processes.
        trainer: name of the trainer in `forgather.ml`.
        settings: what its arguments say beside those that all cells share.
        dp_size: data-parallel ranks.
        model: "llama"; "tied llama" and "gpt2" have tied embeddings.
        accumulation: micro-steps of an update.
        precision: a row of `PRECISIONS`.
        option: a row of `OPTIONS`.
        quick: part of the reduced set.
        layers: blocks of the model.
        updates: of each of the two epochs.
    """

    strategy: str
    world_size: int
    trainer: str
    settings: dict = field(default_factory=dict)
    dp_size: int = 1
    model: str = "llama"
    accumulation: int = 1
    precision: str = "fp64"
    option: str = ""
    quick: bool = False
    layers: int = LAYERS
    updates: int = UPDATES

    @property
    def small(self):
        """Returns the cell with as few blocks as its stages allow, and an epoch of one whole update and a short one."""
        return dataclasses.replace(self, layers=least_layers(self.settings), updates=2)

    @property
    def written_accumulation(self):
        """What the arguments say; None where it follows from a schedule or a global batch, which give `accumulation`."""
        others = {"accumulate_grad_batches", "global_batch_size"} & {*OPTIONS[self.option].get("settings", {})}
        return None if others else self.accumulation

    @property
    def limits(self):
        """What its errors may be."""
        if self.option.startswith(("bf16", "fp16")) or self.option.endswith((", bf16", ", fp16")):
            precision = (self.settings.get("fsdp_config") or {}).get("mixed_precision")
            is_gathered = "bf16" in self.option and "fsdp" in self.settings and precision != "autocast"
            return LIMITS["half, gathered" if is_gathered else "half"]
        is_sliced = self.precision == "fp32 adamw" and "tensor_parallel_size" in self.settings
        is_on_a_ring = self.precision == "fp32 adamw" and "context_parallel_method" in self.settings
        return LIMITS[self.precision + (", slices" if is_sliced else ", ring" if is_on_a_ring else "")]

    @property
    def name(self):
        """Names the cell in reports."""
        return f"{self.strategy} x{self.world_size}, {self.model}, accumulation {self.accumulation}, {self.precision}{', ' * bool(self.option)}{self.option}"


@dataclass(frozen=True)
class Curve:
    """What a training gave: a line per update, and weights before and after, by name."""

    losses: list
    norms: list
    before: dict
    after: dict


@dataclass(frozen=True)
class Errors:
    """The distance of a curve from its reference.

    Args:
        loss: largest relative difference of a step's loss.
        grad_norm: largest relative difference of a norm before clipping.
        updrel: |w - w_ref| / |w_ref - w_0|, over all weights.
        max_abs: largest difference of one weight.
    """

    loss: float
    grad_norm: float
    updrel: float
    max_abs: float

    @property
    def digits(self):
        """Decimal digits to which loss, norm and update agree."""
        worst = max(self.loss, self.grad_norm, self.updrel)
        return 16 if worst == 0 else math.floor(-math.log10(worst))


def broken_limits(errors, limits):
    """Returns the values beyond their limits: {name: (found, limit)}."""
    found = dataclasses.asdict(errors)
    return {name: (found[name], limit) for name, limit in limits.items() if not found[name] <= limit}


def least_layers(settings):
    """Returns how few blocks a model may have: one for each stage of a pipeline, two elsewhere."""
    return max(2, settings.get("pipeline_parallel_size", 1) * settings.get("stages_per_rank", 1))


def make_model(kind, dtype, layers=LAYERS, *, half_frozen=False):
    """Returns a tiny model whose weights depend on nothing but its kind and type.

    Args:
        kind: "llama", "tied llama" or "gpt2".
        dtype: of the weights.
        layers: number of blocks.
        half_frozen: do not train the embedding and the first half of the blocks.
    """
    torch.manual_seed(7)
    model = _new_model(kind, layers).to(dtype)
    if half_frozen:
        model.get_input_embeddings().requires_grad_(False)
        for block in model.get_decoder().layers[: layers // 2]:
            block.requires_grad_(False)
    return model


def _new_model(kind, layers):
    if kind == "gpt2":
        sizes = {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": layers,
            "n_head": 4,
            "n_positions": LENGTH,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        config = GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, use_cache=False)
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=kind == "tied llama",
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@functools.cache
def packed_rows(accumulation, updates=UPDATES, **options):
    """Rows that `tokenize` packs, with unevenly many valid targets; the last update of an epoch is short."""
    micro_steps = updates * accumulation - (accumulation > 1)
    count = (micro_steps - 1) * GLOBAL_ROWS + 5
    draw = random.Random(3)
    texts = ["".join(draw.choices(SYMBOLS, k=draw.randint(1, LENGTH - 4))) for _ in range(3 * count)]
    rows = packed(texts, LENGTH, **options)[:count]
    for number, row in enumerate(rows):
        row["labels"][LENGTH - (number * 5) % (LENGTH - 2) :] = -100
    assert count == len(rows)
    return rows


class Recorder(TrainerCallback):
    """Keeps loss and norm of every update."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            if "grad_norm" in logs:
                self.norms.append(logs["grad_norm"])
            if "num_input_tokens_seen" in logs:
                self.losses.append(logs["num_input_tokens_seen"])
        elif "eval_loss" in logs:
            self.losses.append(logs["eval_loss"])


def train(cell, sabotage=None):
    """Trains a cell as the rank that the environment says, and returns its curve."""
    # torch.compile looks at gradients of tensors that have none, and warns of itself.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    option = OPTIONS[cell.option]
    precision = dict(PRECISIONS[cell.precision])
    dtype = precision.pop("dtype")
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(forgather.ml, f"{cell.trainer.removesuffix('Trainer')}TrainingArguments")
        args = arguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=GLOBAL_ROWS // cell.dp_size,
            gradient_accumulation_steps=cell.written_accumulation,
            num_train_epochs=2,
            logging_steps=1,
            save_strategy="no",
            **({"lr_scheduler_type": "constant"} | precision | option.get("settings", {}) | cell.settings),
        )
        trainer = getattr(forgather.ml, cell.trainer)(
            model_init=functools.partial(
                make_model, cell.model, dtype, cell.layers, half_frozen=option.get("frozen", False)
            ),
            args=args,
            train_dataset=packed_rows(cell.accumulation, cell.updates, **option.get("packing", {})),
            eval_dataset=packed_rows(1, 1, **option.get("packing", {})) if option.get("evaluates") else None,
            data_collator=option["collator"]() if "collator" in option else None,
            optimizer_factory=option.get("factory"),
            adapter=option.get("adapter"),
            callbacks=[recorder],
            distributed_env=DistributedEnvironment(timeout_seconds=patience(60), start_timeout_seconds=patience(60)),
        )
        if sabotage is not None:
            sabotage(trainer)
        before = _whole(trainer)
        with moved_to_host() if option.get("moves") else contextlib.nullcontext() as moved:
            trainer.train()
        assert moved is None or moved, "nothing was moved to the host"
        assert len(recorder.norms) == (0 if args.optimizer_in_backward else trainer.state.global_step)
        return Curve(recorder.losses, recorder.norms, before, _whole(trainer))


def _whole(trainer):
    return {name: value.detach().clone() for name, value in trainer.strategy.export()}


@functools.cache
def reference(model, accumulation, precision, option="", **sizes):
    """Returns the curve of one process."""
    what = {"model": model, "accumulation": accumulation, "precision": precision, "option": option, **sizes}
    return train(Cell("one process", 1, "Trainer", **what))


def measure(cell, sabotage: Callable | None = None, timeout=180.0) -> Errors:
    """Trains a cell in its processes and returns the distance of the main process's curve from the reference."""
    option = OPTIONS[cell.option].get("as", cell.option)
    if "deepspeed" in cell.settings:
        import_engine()
    sizes = {"layers": cell.layers, "updates": cell.updates}
    expected = reference(cell.model, cell.accumulation, cell.precision, option, **sizes)
    actual = run_ranks(cell.world_size, train, cell, sabotage, timeout=timeout)[0]
    return compare(expected, actual)


def compare(expected, actual):
    """Returns the errors of a curve.

    Raises:
        AssertionError: the curves differ in their updates, in the names of weights, or in the weights they began with.
    """
    assert len(expected.losses) == len(actual.losses) >= 4
    assert sorted(expected.after) == sorted(actual.after)
    changed = [name for name, value in expected.before.items() if not torch.equal(value, actual.before[name])]
    assert [] == changed, "initial weights differ from those of one process"
    gap = _norm(actual.after[name].double() - value.double() for name, value in expected.after.items())
    way = _norm(expected.before[name].double() - value.double() for name, value in expected.after.items())
    return Errors(
        loss=_relative(expected.losses, actual.losses),
        grad_norm=_relative(expected.norms, actual.norms),
        updrel=gap / way,
        max_abs=max(float((actual.after[name] - value).abs().max()) for name, value in expected.after.items()),
    )


def _norm(tensors):
    return math.sqrt(sum(float(tensor.pow(2).sum()) for tensor in tensors))


def _relative(expected, actual):
    return max((abs(one - other) / abs(one) for one, other in zip(expected, actual, strict=True)), default=0.0)
