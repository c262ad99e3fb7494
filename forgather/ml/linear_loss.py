"""The token cross entropy of hidden states and a head, computed without holding the logits of all tokens.

`linear_cross_entropy` takes hidden states, the weight and bias of the head, and targets, and returns the sum of the
losses of the valid targets. It computes the logits of one chunk of tokens at a time, and the gradients together with
them, so that a chunk of logits is freed before the next one is computed. What is kept for the backward pass is the
gradient of the hidden states and of the head.

`chunk_size_for` gives the default number of tokens in a chunk, which depends on the vocabulary only.

Shapes:
    N tokens, C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forgather.ml.loss_terms import UNCHANGED, LogitMap, LossTerms
from forgather.ml.vocabulary_slice import VocabularySlice

CHUNK_BYTES = 2**28
"""The size of the float32 logits of one chunk, which determines the default number of tokens in a chunk."""
_HALF = (torch.float16, torch.bfloat16)


def chunk_size_for(vocabulary: int) -> int:
    """Returns the default number of tokens in a chunk: as many as `CHUNK_BYTES` of float32 logits have.

    Args:
        vocabulary: the number of logits of a token.

    Units:
        tokens; a multiple of 64, if it is larger than that.
    """
    tokens = max(1, CHUNK_BYTES // (4 * vocabulary))
    return tokens // 64 * 64 if tokens > 64 else tokens


def linear_cross_entropy(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    *,
    terms: LossTerms,
    logit_map: LogitMap = UNCHANGED,
    chunk_size: int | None = None,
    runs_backward_twice: bool = False,
    words: VocabularySlice | None = None,
) -> Tensor:
    """Returns the sum of the losses of the valid targets, in float32 or float64.

    Logits have the dtype that `torch.nn.functional.linear` would give them, also under autocast; losses of
    half-precision logits are computed in float32. The gradient of the head is added up over chunks in float32.

    Args:
        hidden_ND: the hidden states.
        weight_VD: the weight of the head.
        bias_V: the bias of the head; None if it has none.
        targets_N: the target of each token.
        terms: what the loss of a token consists of.
        logit_map: what the model does with the output of its head.
        chunk_size: the number of tokens in a chunk; None takes `chunk_size_for` the vocabulary.
        runs_backward_twice: whether the backward pass runs in two parts, first for the input and then for the weights.
            The gradients are then kept until the graph is freed.
        words: the slice of the vocabulary that weight and bias are; None if they are whole. Every rank then gets the
            sum of the losses over the whole vocabulary, and its part of the gradients. Collective if it is given.

    Shapes:
        hidden_ND: (N, D); weight_VD: (V, D); bias_V: (V,); targets_N: (N,). Returns a scalar.

    Raises:
        IndexError: if a target is not below V, on a CPU.
    """
    chunk_size = chunk_size or chunk_size_for(weight_VD.shape[0])
    compute = _compute_dtype(hidden_ND, weight_VD)
    chunks = _Chunks(terms, logit_map, chunk_size, compute, runs_backward_twice, words)
    with torch.amp.autocast(hidden_ND.device.type, enabled=False):
        if compute is torch.float16:
            # Its gradients are too small for float16 unless they are scaled, by a factor that is known in the backward
            # pass only.
            return _Recomputed.apply(hidden_ND, weight_VD, bias_V, targets_N, chunks)  # type: ignore[no-any-return, no-untyped-call]
        return _Precomputed.apply(hidden_ND, weight_VD, bias_V, targets_N, chunks)  # type: ignore[no-any-return, no-untyped-call]


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(hidden.dtype, weight.dtype)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """How the loss is computed, and the computation of all chunks."""

    terms: LossTerms
    logit_map: LogitMap
    size: int
    compute: torch.dtype
    runs_backward_twice: bool
    words: VocabularySlice | None

    @property
    def precise(self) -> torch.dtype:
        """The dtype of losses and of the sums of gradients."""
        return torch.float32 if self.compute in _HALF else self.compute

    def spans(self, tokens: int) -> Iterator[slice]:
        for start in range(0, tokens, self.size):
            yield slice(start, min(start + self.size, tokens))

    def total(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor) -> Tensor:
        """Returns the sum of the losses, without gradients."""
        weight, bias = self._cast(weight_VD, bias_V)
        total = hidden_ND.new_zeros((), dtype=self.precise)
        for span in self.spans(targets_N.shape[0]):
            hidden_CD = hidden_ND[span].to(self.compute)
            total += _Softmax(F.linear(hidden_CD, weight, bias), targets_N[span], self).loss()
        return total

    def total_and_gradients(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        *,
        needed: tuple[bool, bool, bool],
        upstream: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Returns the sum of the losses and its gradients by hidden states, weight and bias, where they are needed.

        Args:
            hidden_ND: the hidden states.
            weight_VD: the weight of the head.
            bias_V: the bias of the head.
            targets_N: the targets.
            needed: whether each of the three gradients is needed.
            upstream: the gradient of the sum, if it is known; None for 1.

        Shapes:
            The sum is a scalar. Gradients have the shapes of their tensors.
        """
        weight, bias = self._cast(weight_VD, bias_V)
        total = hidden_ND.new_zeros((), dtype=self.precise)
        of_hidden = torch.empty_like(hidden_ND) if needed[0] else None
        of_weight = torch.zeros_like(weight_VD, dtype=self.precise) if needed[1] else None
        of_bias = torch.zeros_like(bias_V, dtype=self.precise) if needed[2] and bias_V is not None else None
        for span in self.spans(targets_N.shape[0]):
            hidden_CD = hidden_ND[span].to(self.compute)
            softmax = _Softmax(F.linear(hidden_CD, weight, bias), targets_N[span], self)
            total += softmax.loss()
            gradient_CV = softmax.gradient(upstream)
            del softmax
            if of_bias is not None:
                of_bias += gradient_CV.sum(dim=0)
            gradient_CV = gradient_CV.to(self.compute)
            if of_hidden is not None:
                of_hidden[span] = gradient_CV @ weight
            if of_weight is not None:
                _add_product(of_weight, gradient_CV.t(), hidden_CD)
            del gradient_CV
        return total, of_hidden, of_weight, of_bias

    def _cast(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return weight.to(self.compute), None if bias is None else bias.to(self.compute)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


class _Softmax:
    """The losses of one chunk and their gradient by the head's output, in one buffer of the chunk's size.

    `loss` comes first, and `gradient` overwrites the buffer.
    """

    def __init__(self, output_CV: Tensor, targets_C: Tensor, chunks: _Chunks) -> None:
        terms, self._map, words = chunks.terms, chunks.logit_map, chunks.words
        self._terms, self._words = terms, output_CV.shape[1] if words is None else words.total
        values = output_CV.to(chunks.precise)
        # Nobody else has the output of the head, so that the factor and the exponential may overwrite it.
        if self._map.factor != 1.0:
            values *= self._map.factor
        self._tanh: Tensor | None = None
        if self._map.cap is not None:
            self._tanh = torch.tanh_(values / self._map.cap)
            torch.mul(self._tanh, self._map.cap, out=values)
        self._valid_C1 = (targets_C != terms.ignore_index).unsqueeze(1)
        index_C1 = torch.where(self._valid_C1, targets_C.unsqueeze(1), 0)
        # Of a slice of the vocabulary, other ranks have the logits of some targets.
        index_C1 = index_C1 if words is None else index_C1 - words.start
        self._is_here_C1 = (
            None if words is None else ((index_C1 >= 0) & (index_C1 < output_CV.shape[1])).to(values.dtype)
        )
        self._index_C1 = index_C1 if words is None else index_C1.clamp(0, output_CV.shape[1] - 1)
        try:
            target_C1 = values.gather(1, self._index_C1)
        except RuntimeError as error:
            # The error of torch's cross entropy, which strategies explain.
            raise IndexError(f"a target is out of bounds for {self._words} logits") from error
        sum_C1 = values.sum(dim=1, keepdim=True) if terms.label_smoothing else torch.zeros_like(target_C1)
        largest_C1 = values.amax(dim=1, keepdim=True)
        largest_C1 = largest_C1 if words is None else words.largest(largest_C1)
        self._exponentials = values.sub_(largest_C1).exp_()
        denominator_C1 = values.sum(dim=1, keepdim=True)
        if words is not None and self._is_here_C1 is not None:
            target_C1, found_C1, sum_C1, denominator_C1 = words.summed(
                target_C1 * self._is_here_C1, self._is_here_C1, sum_C1, denominator_C1
            )
            # A target that no rank has makes the loss NaN, which stops the run: no host reads it here.
            target_C1 = target_C1 / found_C1
        self._target_C1, self._mean_C1, self._sum_C1 = target_C1, sum_C1 / self._words, denominator_C1
        self._log_sum_C1 = largest_C1 + self._sum_C1.log()

    def loss(self) -> Tensor:
        """Returns the sum of the losses of the chunk's valid targets."""
        smoothing, z_loss = self._terms.label_smoothing, self._terms.z_loss
        loss_C1 = self._log_sum_C1 - self._target_C1
        if smoothing:
            loss_C1 = (1.0 - smoothing) * loss_C1 + smoothing * (self._log_sum_C1 - self._mean_C1)
        if z_loss:
            loss_C1 = loss_C1 + z_loss * self._log_sum_C1**2
        return torch.where(self._valid_C1, loss_C1, torch.zeros_like(loss_C1)).sum()

    def gradient(self, upstream: Tensor | None) -> Tensor:
        """Returns the gradient of the sum of the losses by the output of the head, times the upstream gradient.

        Shapes:
            Returns (C, V).
        """
        smoothing, z_loss = self._terms.label_smoothing, self._terms.z_loss
        weight_C1 = self._valid_C1.to(self._sum_C1.dtype)
        if upstream is not None:
            weight_C1 = weight_C1 * upstream
        share_C1 = weight_C1 / self._sum_C1
        if z_loss:
            share_C1 = share_C1 * (1.0 + 2.0 * z_loss * self._log_sum_C1)
        gradient = self._exponentials.mul_(share_C1)
        of_target_C1 = weight_C1 * (smoothing - 1.0)
        if self._is_here_C1 is not None:
            of_target_C1 = of_target_C1 * self._is_here_C1
        gradient.scatter_add_(1, self._index_C1, of_target_C1)
        if smoothing:
            gradient.sub_(weight_C1 * (smoothing / self._words))
        if self._tanh is not None:
            gradient.mul_(self._tanh.square_().neg_().add_(1.0))
        return gradient.mul_(self._map.factor) if self._map.factor != 1.0 else gradient


class _Precomputed(torch.autograd.Function):
    """The loss whose gradients are computed together with it, and kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunks: _Chunks
    ) -> Tensor:
        """Returns the sum of the losses; see `linear_cross_entropy` for the arguments.

        Shapes:
            Returns a scalar.
        """
        needed = ctx.needs_input_grad[:3]
        if not any(needed):
            return chunks.total(hidden_ND, weight_VD, bias_V, targets_N)
        total, *ctx.gradients = chunks.total_and_gradients(hidden_ND, weight_VD, bias_V, targets_N, needed=needed)
        ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype)
        ctx.is_reused = chunks.runs_backward_twice
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Returns the gradients by the hidden states, the weight and the bias, and None for each other argument.

        Shapes:
            upstream: a scalar. Gradients have the shapes of their tensors.

        Raises:
            RuntimeError: if it is called a second time and the gradients were not kept.
        """
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss were given away by an earlier backward pass")
        kept = ctx.gradients
        if not ctx.is_reused:
            # In place, and not kept: the gradient of a head is as large as the head.
            ctx.gradients = None
        found: list[Tensor | None] = []
        for gradient, dtype in zip(kept, ctx.dtypes, strict=True):
            if gradient is None:
                found.append(None)
            else:
                scaled = gradient * upstream if ctx.is_reused else gradient.mul_(upstream)
                found.append(scaled.to(dtype))
        return (*found, None, None)


class _Recomputed(torch.autograd.Function):
    """The loss whose gradients are computed in the backward pass, where the factor of the loss is known."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, chunks: _Chunks
    ) -> Tensor:
        """Returns the sum of the losses; see `linear_cross_entropy` for the arguments.

        Shapes:
            Returns a scalar.
        """
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, targets_N)
        ctx.chunks = chunks
        return chunks.total(hidden_ND, weight_VD, bias_V, targets_N)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        """Returns the gradients by the hidden states, the weight and the bias, and None for each other argument.

        Shapes:
            upstream: a scalar. Gradients have the shapes of their tensors.
        """
        hidden_ND, weight_VD, bias_V, targets_N = ctx.saved_tensors
        with torch.amp.autocast(hidden_ND.device.type, enabled=False):
            _, of_hidden, of_weight, of_bias = ctx.chunks.total_and_gradients(
                hidden_ND, weight_VD, bias_V, targets_N, needed=ctx.needs_input_grad[:3], upstream=upstream
            )
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight_VD.dtype),
            None if of_bias is None else of_bias.to(bias_V.dtype),
            None,
            None,
        )
