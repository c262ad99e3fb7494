"""The choice between two ways to compute the token loss: from logits, or from hidden states and the head.

`LossPath` takes the setting `linear_cross_entropy`. It examines the model once, with tokens of the first batch, and
says in one line of the log which way is taken and why. For each batch it then decides by the number of tokens: logits
that fit in one chunk are computed as they are, with the same operations as without the setting.

Shapes:
    B rows, T positions, N flattened positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
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
        self._is_taken = False
        self._drops_logits = False

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
        # Not every rank of a pipeline has the head.
        self._is_taken = collectives.all_max(float(self._head.is_ready)) > 0

    def state_dict(self) -> dict[str, str]:
        """Returns the path that was chosen: "chunks", "logits", or "undecided" before the first step."""
        chosen = "undecided" if self.is_undecided else "chunks" if self._is_taken else "logits"
        return {"path": chosen}

    def load_state_dict(self, state: Mapping[str, str] | None) -> None:
        """Keeps the path of the run that wrote a checkpoint, so that a resumed run computes the same last digits.

        A path that the settings require is not changed.

        Args:
            state: the state; None if the checkpoint has none, because its release computed logits.

        Raises:
            ValueError: if the state names no path.
        """
        chosen = "logits" if state is None else state["path"]
        if chosen not in ("chunks", "logits", "undecided"):
            raise ValueError(f"{chosen!r} is no path of a loss")
        if chosen == "logits" and self.is_undecided and not self._is_required:
            self.is_undecided = False
            _log.info("the loss is computed from logits, as in the run that wrote the checkpoint")

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
        """Returns whether the loss of a batch is computed without logits.

        Args:
            targets: the targets of the batch.

        Shapes:
            targets: (B, T).
        """
        is_wanted = torch.is_grad_enabled() or self._drops_logits
        return self._head.is_ready and is_wanted and targets.numel() > self._smallest

    @contextlib.contextmanager
    def dropping_logits(self) -> Iterator[None]:
        """Context manager in which nobody reads the logits of an evaluation either."""
        self._drops_logits = True
        try:
            yield
        finally:
            self._drops_logits = False

    def total(self, call: Callable[[], Any], targets_BT: Tensor) -> tuple[Tensor | None, Any]:
        """Returns the sum of the losses, and the output of the model with zeros in place of logits.

        The sum is None if the model was not called. The output then has its logits.

        Args:
            call: a function that calls the model and returns its output.
            targets_BT: the target of each position.

        Shapes:
            targets_BT: (B, T). The sum is a scalar.

        Raises:
            TrainingError: FG712 if the model computes another number of positions than the batch has targets.
        """

        # As with logits, a z-loss is not part of an evaluation.
        terms = self._terms if torch.is_grad_enabled() else replace(self._terms, z_loss=0.0)

        def loss(hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, words: VocabularySlice | None) -> Tensor:
            if hidden_ND.shape[0] != targets_BT.numel():
                raise TrainingError(
                    f"the head of the model got {hidden_ND.shape[0]} positions, and the batch has "
                    f"{targets_BT.numel()} targets",
                    code="FG712",
                    hint="take an adapter that adds no positions, or give one label for each position that the model "
                    "computes",
                ).about("model")
            return self._kernel(
                hidden_ND,
                weight_VD,
                bias_V,
                targets_BT.reshape(-1),
                terms=terms,
                logit_map=self._head.logit_map,
                chunk_size=self.chunk_size,
                runs_backward_twice=self.runs_backward_twice,
                words=words,
            )

        with self._head.computing(loss) as found:
            output = call()
        return (None if found.total is None else found.joined(output)), output
