"""Runs of a tiny model, by one process and by a pipeline, over the same rows: what the pipeline tests compare."""

import functools

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from forgather.ml.distributed.env import DistributedEnvironment
from forgather.ml.distributed.layout import Layout
from forgather.ml.losses import loss_rule
from forgather.ml.strategy.base import Recipe
from forgather.ml.strategy.pipeline.strategy import Pipeline
from forgather.ml.strategy.single import SingleDevice
from forgather.ml.types import Window
from tests.patience import patience

VOCAB = 32
SCHEDULES = (
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)


def make_llama(layers=4, dtype=torch.float64, **settings):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"vocab_size": VOCAB, "num_hidden_layers": layers, "max_position_embeddings": 64}
    config = LlamaConfig(**{**sizes, **settings})
    return LlamaForCausalLM(config).to(dtype)


def make_gpt2(layers=4, dtype=torch.float64, dropout=0.0, **settings):
    torch.manual_seed(0)
    drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    config = GPT2Config(vocab_size=VOCAB, n_layer=layers, n_embd=16, n_head=2, n_positions=64, **drops, **settings)
    return GPT2LMHeadModel(config).to(dtype)


def make_tied_llama(layers=4):
    """A Llama that two ranks can slice."""
    return make_llama(layers, num_key_value_heads=2, tie_word_embeddings=True)


MODELS = {"llama": make_llama, "gpt2": make_gpt2}


def recipe(make_model, *, optimizer=None, loss_fn=None, prepare=(), autocast=None):
    return Recipe(
        make_model=make_model,
        make_rule=functools.partial(loss_rule, loss_fn=loss_fn),
        make_optimizer=optimizer or adamw,
        prepare=prepare,
        autocast=autocast,
        model_is_made_anew=True,
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def rows_of(step, count, length=10, packed=False):
    """Rows with uneven numbers of valid labels; packed ones hold two documents each."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (count, length), generator=generator)
    labels = ids.clone()
    for row in range(count):
        labels[row, length - (row * 3 + step) % (length - 2) :] = -100
    batch = {"input_ids": ids, "labels": labels}
    if packed:
        border = torch.randint(2, length - 2, (count, 1), generator=generator)
        positions = torch.arange(length).expand(count, length)
        batch["position_ids"] = torch.where(positions < border, positions, positions - border)
    return batch


def windows(steps, accumulation, rows, *, packed=False, tail=None, lengths=(10,)):
    """Micro-batches of all replicas; the last row of the last one is filled up where `tail` says so."""
    made = []
    for step in range(steps):
        window = []
        for part in range(accumulation):
            number = step * accumulation + part
            batch = rows_of(number, rows, lengths[number % len(lengths)], packed)
            if tail is not None and step == steps - 1 and part == accumulation - 1:
                batch["labels"][tail:] = -100
            window.append(batch)
        made.append(window)
    return made


def train(strategy, all_windows, *, dp_rank=0, dp_size=1, max_norm=0.5):
    """Returns losses and norms of the updates, and the weights at the end where this rank writes."""
    losses, norms = [], []
    for batches in all_windows:
        own = [share(strategy.rule.prepared(batch), dp_rank, dp_size) for batch in batches]
        valid = sum(strategy.rule.count(batch) for batch in own)
        denom = strategy.reduce(valid)
        window = Window(batches=own, num_valid=valid, num_tokens=0, num_rows=0)
        losses.append(float(strategy.reduce(strategy.forward_backward(window, denom=denom))))
        found = strategy.update(
            max_norm=max_norm, want_norm=True, before_step=lambda norm: None, after_step=lambda: None
        )
        norms.append(float(found.grad_norm))
    return losses, norms


def share(batch, rank, size):
    rows = next(iter(batch.values())).shape[0] // size
    return {name: value if value is None else value[rank * rows : (rank + 1) * rows] for name, value in batch.items()}


def weights_of(strategy):
    return {name: value.detach().cpu().clone() for name, value in strategy.export()}


def single_run(the_recipe, all_windows, **settings):
    strategy = SingleDevice(DistributedEnvironment(), use_cpu=True)
    strategy.build(the_recipe)
    strategy.build_optimizer()
    before = weights_of(strategy)
    losses, norms = train(strategy, all_windows, **settings)
    return losses, norms, before, weights_of(strategy), strategy


def environment():
    return DistributedEnvironment(timeout_seconds=patience(20), start_timeout_seconds=patience(20))


def pipeline(the_recipe, *, world, data=1, tensor=1, rows=4, **settings):
    shard = None if settings.get("sharding") else 1
    layout = Layout.for_world(world, data=data, pipeline=None, tensor=tensor, shard=shard)
    strategy = Pipeline(environment(), layout, rows=rows, use_cpu=True, **settings)
    strategy.build(the_recipe)
    strategy.build_optimizer()
    return strategy


def differences(reference, found):
    """Returns relative differences of losses and norms, and updrel: the error of the update over the update."""
    losses, norms, before, after, *_ = reference
    other_losses, other_norms, weights = found
    assert sorted(after) == sorted(weights)
    off = sum(float((after[name] - weights[name]).square().sum()) for name in after)
    moved = sum(float((after[name] - before[name]).square().sum()) for name in after)
    return {
        "loss": max(abs(a - b) / abs(a) for a, b in zip(losses, other_losses, strict=True)),
        "grad_norm": max(abs(a - b) / abs(a) for a, b in zip(norms, other_norms, strict=True)),
        "updrel": (off / moved) ** 0.5,
    }
