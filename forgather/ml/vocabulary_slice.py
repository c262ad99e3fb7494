"""The slice of a vocabulary that one rank of tensor parallelism has, and sums over all slices.

A head that is cut by its vocabulary gives each rank the logits of some tokens. The softmax over all of them needs the
largest logit, the sum of the exponentials and the logit of the target, each of which is reduced over the ranks.
`local_head` returns what a rank has of a sliced head, as plain tensors.

Shapes:
    C tokens, D hidden size, V vocabulary, S words of a slice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard


@dataclass(frozen=True, slots=True)
class VocabularySlice:
    """The words of one rank.

    Args:
        group: the process group of the ranks that have the other words.
        start: the first word of this rank.
        total: the number of words of all ranks.
    """

    group: Any
    start: int
    total: int

    def largest(self, values: Tensor) -> Tensor:
        """Returns the largest of the ranks' values, at each position.

        Shapes:
            values: any shape. Returns the same shape.
        """
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def summed(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Returns the sums of the ranks' values, at each position, with one collective for all tensors.

        Shapes:
            values: tensors of the same shape. Returns the same shapes.
        """
        stacked = torch.stack(values)
        dist.all_reduce(stacked, group=self.group)
        return tuple(stacked)


def local_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, VocabularySlice | None]:
    """Returns the hidden states, weight and bias of a head as plain tensors, and the rank's slice of the vocabulary.

    The slice is None if the head is whole. The gradients of the returned tensors become those of the arguments; the
    gradient of the hidden states is the sum of the slices' gradients.

    Args:
        hidden: the hidden states.
        weight: the weight of the head.
        bias: the bias of the head.

    Shapes:
        hidden: (..., D); weight: (V, D), of which a rank has (S, D); bias: (V,).
    """
    if not isinstance(weight, DTensor) or not isinstance(hidden, DTensor):
        return hidden, weight, bias, None
    mesh = weight.device_mesh
    words = VocabularySlice(mesh.get_group(), mesh.get_local_rank() * weight.to_local().shape[0], weight.shape[0])
    return (
        hidden.to_local(grad_placements=[Partial()]),
        weight.to_local(),
        bias.to_local() if isinstance(bias, DTensor) else bias,
        words,
    )


def why_not_sliced(hidden: Tensor, head: nn.Linear) -> str | None:
    """Returns why the slices of a head cannot be used one by one, or None if they can or if the head is whole.

    Args:
        hidden: the hidden states with which the head was called.
        head: the head.

    Shapes:
        hidden: (..., D).
    """
    weight = head.weight
    if not isinstance(weight, DTensor) and not isinstance(hidden, DTensor):
        # A quantized weight may be a tensor of another class. Plans have fake ones.
        is_plain = type(weight) in (nn.Parameter, Tensor) or isinstance(weight, FakeTensor)
        return None if is_plain else f"the weight of its head is a {type(weight).__name__}"
    is_cut = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
    if is_cut and isinstance(hidden, DTensor) and hidden.placements == (Replicate(),):
        return None
    return "its head is cut in another way than by its vocabulary"


def like_output(output: Tensor, values: Tensor) -> Tensor:
    """Returns whole values as the output of a sliced head, if `output` is one.

    Args:
        output: an output of the head, or its input.
        values: the values, equal on all ranks.

    Shapes:
        values: any shape. Returns the same shape.
    """
    if not isinstance(output, DTensor):
        return values
    return DTensor.from_local(values, output.device_mesh, [Replicate()], run_check=False)
