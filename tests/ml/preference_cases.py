"""Models and rows that are the same on every machine: weights and ids come from a formula, and no generator is asked.

The script that records the figures of TRL and the tests that compare ours use the same ones.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

VOCAB = 32
PAIRS = [
    {"prompt_ids": [3, 9, 4], "chosen_ids": [7, 12, 5, 2], "rejected_ids": [8, 2]},
    {"prompt_ids": [21, 6], "chosen_ids": [30, 2], "rejected_ids": [14, 14, 19, 25, 2]},
    {"prompt_ids": [11, 17, 5, 28, 16], "chosen_ids": [10, 13, 2], "rejected_ids": [13, 10, 2]},
    {"prompt_ids": [29, 4, 18], "chosen_ids": [22, 23, 24, 26, 2], "rejected_ids": [27, 2]},
]
EVEN_PAIRS = [
    {"prompt_ids": [3, 9, 4], "chosen_ids": [7, 12, 5, 2], "rejected_ids": [8, 2]},
    {"prompt_ids": [21, 6, 8], "chosen_ids": [30, 31, 20, 2], "rejected_ids": [14, 14, 19, 25, 2]},
]
"""Pairs whose chosen answers and prompts have one length: a mean over tokens is the mean over rows of such means."""
FEEDBACK = [
    {"prompt_ids": [3, 9, 4], "completion_ids": [7, 12, 5, 2], "kl_ids": [30, 2], "label": 1},
    {"prompt_ids": [21, 6], "completion_ids": [30, 2], "kl_ids": [10, 13, 2], "label": 0},
    {"prompt_ids": [11, 17, 5, 28, 16], "completion_ids": [10, 13, 2], "kl_ids": [22, 23, 24, 26, 2], "label": 1},
    {"prompt_ids": [29, 4, 18], "completion_ids": [22, 23, 24, 26, 2], "kl_ids": [15, 2], "label": 0},
    {"prompt_ids": [12], "completion_ids": [15, 2], "kl_ids": [7, 12, 5, 2], "label": 0},
]
DPO = {
    "sigmoid": {"beta": 0.3},
    "hinge": {"beta": 0.3, "loss_type": "hinge"},
    "ipo": {"beta": 0.3, "loss_type": "ipo"},
    "robust": {"beta": 0.3, "loss_type": "robust", "label_smoothing": 0.1},
}


def filled(kind, seed, **sizes):
    """Returns a small model whose weights are a formula of the seed."""
    settings = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = kind(LlamaConfig(**{**settings, "num_attention_heads": 2, "pad_token_id": 0, **sizes}))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.sin(count * (1.7 + 0.13 * number + 0.31 * seed) + seed) * 0.35 + (parameter.ndim == 1)
            parameter.copy_(values.view(parameter.shape))
    return model


def language_model(seed=1, **sizes):
    return filled(LlamaForCausalLM, seed, **sizes)


def reward_model(seed=1):
    return filled(LlamaForSequenceClassification, seed, num_labels=1)


def probes(model):
    """Returns, for each weight, one number that depends on each element of its gradient."""
    return {
        name: float((parameter.grad.double() * torch.cos(torch.arange(parameter.numel()).view(parameter.shape))).sum())
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


KTO = {
    "kto": {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5},
    "apo_zero_unpaired": {"beta": 0.3, "loss_type": "apo_zero_unpaired"},
}
REWARD = {"plain": {}, "centered": {"center_weight": 0.05}, "margin": {}}
TEMPERATURES = (1.0, 2.0)
TOKENS = [[3, 9, 4, 7, 12, 5], [21, 6, 30, 2, 0, 0]]
TOKEN_LABELS = [[-100, -100, 4, 7, 12, 5], [-100, 6, 30, 2, -100, -100]]
