"""Tiny real things: a two-layer Llama, a plain module, eight rows with uneven padding."""

import random

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_callback import TrainerCallback

VOCAB = 64


def tiny_llama(seed=0, **config):
    torch.manual_seed(seed)
    settings = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**{**settings, "num_attention_heads": 4, **config}))


def rows(count=8, length=12, seed=0):
    """Rows whose labels are padded unevenly, so that a mean of means is not the mean."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[length - (number * 3) % (length - 2) :] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


class Regression(nn.Module):
    """A plain module that returns its loss."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x).squeeze(-1), y)


def regression_rows(count=8):
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, generator=generator), "y": torch.randn((), generator=generator)} for _ in range(count)]


class Noisy(torch.utils.data.Dataset):
    """Rows that draw from all three sources of randomness, so that a resume must restore them all."""

    def __init__(self, count=8):
        self.base = rows(count)

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        ids = self.base[index]["input_ids"].clone()
        ids[0], ids[1] = random.randrange(VOCAB), int(np.random.randint(VOCAB))
        ids[2] = int(torch.randint(0, VOCAB, ()))
        return {"input_ids": ids, "labels": ids.clone()}


class StopAt(TrainerCallback):
    """Ends the run after a step, in good order."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step == self.step


class Recorder(TrainerCallback):
    """Keeps the events it hears, with the step, and the lines that were logged."""

    def __init__(self):
        self.events = []
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append(("on_log", state.global_step))
        self.lines.append(dict(logs))


def _hear(event):
    def method(self, args, state, control, **kwargs):
        self.events.append((event, state.global_step))

    return method


for _event in [name for name in dir(TrainerCallback) if name.startswith("on_") and name != "on_log"]:
    setattr(Recorder, _event, _hear(_event))


def weights(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_weights(expected, actual):
    assert sorted(expected) == sorted(actual)
    different = [name for name in expected if not torch.equal(expected[name], actual[name])]
    assert [] == different


def largest_difference(expected, actual):
    return max(float((expected[name] - actual[name]).abs().max()) for name in expected)
