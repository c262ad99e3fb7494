"""A decoder of a few layers, and the settings of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class NetSettings:
    """Sizes of a network."""

    vocab_size: int
    hidden_size: int = 64
    num_layers: int = 2
    max_length: int = 256


@dataclass
class DeepSettings(NetSettings):
    """Sizes of a network whose layers share their weights."""

    repeats: int = 2


class Layer(nn.Module):
    """Causal attention and a feed-forward part."""

    def __init__(self, hidden_size: int, *, num_heads: int = 4, widening: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            hidden_size, num_heads, hidden_size * widening, dropout, batch_first=True, norm_first=True
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the states after this layer."""
        length = states.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=states.device)
        return self.layer(states, src_mask=mask, is_causal=True)


class GatedLayer(Layer):
    """A layer whose change of the states is scaled."""

    def __init__(self, hidden_size: int, *, gate: float = 0.5, **options) -> None:
        super().__init__(hidden_size, **options)
        self.gate = nn.Parameter(torch.tensor(gate))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Returns the states after this layer."""
        return states + self.gate * (super().forward(states) - states)


def build_layer(hidden_size: int, kind: str = "plain", **options) -> nn.Module:
    """Returns a layer of a kind."""
    return {"plain": Layer, "gated": GatedLayer}[kind](hidden_size, **options)


class TicketNet(nn.Module):
    """Predicts the next token of a ticket."""

    def __init__(
        self,
        settings: NetSettings,
        layer_factory: Callable[..., nn.Module],
        norm: nn.Module,
        *,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.settings = settings
        self.embedding = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.positions = nn.Embedding(settings.max_length, settings.hidden_size)
        self.layers = nn.ModuleList(layer_factory(settings.hidden_size) for _ in range(settings.num_layers))
        self.norm = norm
        self.head = nn.Linear(settings.hidden_size, settings.vocab_size, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Returns the logits, and the loss where there are labels."""
        states = self.embedding(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for layer in self.layers:
            states = layer(states)
        logits = self.head(self.norm(states))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}
