"""The choice between two ways to compute the token loss: from logits, or from hidden states and the head.

`LossPath` takes the setting `linear_cross_entropy`. It examines the model once, with tokens of the first batch, and
says in one line of the log which way is taken and why. For each batch it then decides by the number of tokens: logits
that fit in one chunk are computed as they are, with the same operations as without the setting.

Shapes:
    B rows, T positions, N flattened positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.deferred_head import DeferredHead
from forgather.ml.distributed import collectives
from forgather.ml.linear_loss import chunk_size_for
from forgather.ml.log import get_logger
from forgather.ml.loss_kernels import SETTING, has_map, kernel_named
from forgather.ml.loss_terms import LogitMap, LossTerms
from forgather.ml.types import PaddingBatch
from forgather.ml.vocabulary_slice import VocabularySlice

_log = get_logger(__name__)

SMALLEST_VOCABULARY = 8192
"""The number of tokens in a vocabulary below which "auto" takes the logits: they are no larger than hidden states."""


@dataclass(frozen=True, slots=True)
class PathSettings:
    """The settings of a loss path.

    Args:
        kernel: "auto" to compute the loss without logits where it saves memory and is exact, True to require it, False
            to compute logits, "torch" or "liger" to require it with the kernel of that name.
        chunk_size: the number of tokens in a chunk; None to derive it from the vocabulary.
    """

    kernel: str | bool = False
    chunk_size: int | None = None


LOGITS = PathSettings()
"""The settings of rules that always compute logits."""


class LossPath:
    """How the token loss of one model is computed.

    Args:
        model: the model, of which only the configuration is read.
        settings: the settings.
        terms: what the loss of a token consists of.

    Raises:
        TrainingError: FG717 or FG718 if the kernel cannot be used.
    """

    def __init__(self, model: nn.Module, settings: PathSettings, terms: LossTerms) -> None:
        config: Any = getattr(model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        vocabulary = getattr(config, "vocab_size", None)
        self._vocabulary = vocabulary if isinstance(vocabulary, int) else 0
        self._settings, self._terms = settings, terms
        self._kernel = kernel_named(settings.kernel, terms)
        self._head = DeferredHead()
        # The same on every rank: the examination is collective where the forward pass is.
        self.is_undecided = bool(settings.kernel) and (self._is_required or self._vocabulary >= SMALLEST_VOCABULARY)
        """True if the model must be examined before the first step."""
        self.runs_backward_twice = False
        """True if a pipeline schedule splits the backward pass."""

    @property
    def _is_required(self) -> bool:
        return self._settings.kernel not in ("auto", False)

    @property
    def chunk_size(self) -> int:
        """The number of tokens in a chunk.

        Units:
            tokens.
        """
        return self._settings.chunk_size or chunk_size_for(max(1, self._vocabulary))

    @property
    def logit_map(self) -> LogitMap:
        """What the model does with the output of its head, after `examine`."""
        return self._head.logit_map

    def examine(self, model: nn.Module, batch: Any, outputs: Callable[[Any], Any]) -> None:
        """Decides whether the loss of a model can be computed without logits. Every rank must call it.

        Args:
            model: the model, or the module that holds the stages on this rank.
            batch: a real batch, of which some tokens are used.
            outputs: a function that returns the output of the model for a batch, without gradients.

        Raises:
            TrainingError: FG716, on every rank, if the setting requires it and it is not possible.
        """
        self.is_undecided = False
        batch = batch.batch if isinstance(batch, PaddingBatch) else batch
        tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            self._head.examine(model, tokens[0], lambda row_1T: outputs({"input_ids": row_1T}))
            if self._head.is_ready and not has_map(self._kernel, self._head.logit_map, slices=self._head.is_sliced):
                self._head.reason = f"{self._settings.kernel} has neither {self._head.logit_map} nor slices"
        else:
            self._head.reason = "the batch has no token ids"
        collectives.run_collectively(self._say_or_raise)

    def _say_or_raise(self) -> None:
        reason = self._head.reason
        if reason is None:
            _log.info("the loss of batches of more than %d tokens is computed without logits", self._smallest)
        elif self._is_required and not self._head.is_elsewhere:
            raise TrainingError(
                f"linear_cross_entropy is {self._settings.kernel!r}, and the loss of this model is computed from its "
                f"logits: {reason}",
                code="FG716",
                hint="set linear_cross_entropy: auto, which computes logits where they are needed",
            ).about(f"args.{SETTING}")
        elif not self._head.is_elsewhere:
            _log.info("the loss is computed from logits: %s", reason)

    @property
    def _smallest(self) -> int:
        return 0 if self._is_required else self.chunk_size

    def takes(self, targets: Tensor) -> bool:
        """Returns whether the loss of a batch in training is computed without logits.

        Args:
            targets: the targets of the batch.

        Shapes:
            targets: (B, T).
        """
        return self._head.is_ready and torch.is_grad_enabled() and targets.numel() > self._smallest

    def total(self, call: Callable[[], Any], targets_BT: Tensor) -> tuple[Tensor | None, Any]:
        """Returns the sum of the losses, and the output of the model with zeros in place of logits.

        The sum is None if the model was not called. The output then has its logits.

        Args:
            call: a function that calls the model and returns its output.
            targets_BT: the target of each position.

        Shapes:
            targets_BT: (B, T). The sum is a scalar.
        """

        def loss(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, words: VocabularySlice | None) -> Tensor:
            return self._kernel(
                hidden_ND,
                weight_VD,
                bias_V,
                targets_BT.reshape(-1),
                terms=self._terms,
                logit_map=self._head.logit_map,
                chunk_size=self.chunk_size,
                runs_backward_twice=self.runs_backward_twice,
                words=words,
            )

        with self._head.computing(loss) as found:
            output = call()
        return (None if found.total is None else found.joined(output)), output
