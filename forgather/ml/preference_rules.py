"""Loss rules for rows of answers: log-probabilities of whole answers, and sums of losses over rows.

A rule takes the batches of `PreferenceCollator`, in which a row holds two answers, and a loss object of
`ml.preference_losses`, which has the formula. It gives the sum of the losses of the rows and their number, so the sums
of micro-batches and ranks can be added. A prepared batch has the answers of a row one after the other, as rows of
their own: a pipeline, which splits a batch by its rows, then splits it between pairs.

Shapes:
    B rows, P pairs, R = 2 * P sequences, T positions, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from forgather.errors import TrainingError
from forgather.ml.data.preference_collator import COMPLETION_MASK, JUDGED, MARGIN, REFERENCE
from forgather.ml.log import get_logger
from forgather.ml.losses import (
    IGNORE_INDEX,
    BaseLossRule,
    at_least_float32,
    flat_logits,
    is_causal_lm,
    logits_of,
    shifted_labels,
)
from forgather.ml.model_inputs import PRIVATE, SHIFTED
from forgather.ml.types import PaddingBatch

_log = get_logger(__name__)

Call = Callable[..., Any]

REFERENCE_KEY, MARGIN_KEY = f"{PRIVATE}{REFERENCE}", f"{PRIVATE}{MARGIN}"
"""The keys of the reference log-probabilities and of margins in a prepared batch."""


@dataclass(frozen=True, slots=True)
class PairScores:
    """What the formula of a pair loss gets. The first column is that of the chosen answers.

    Args:
        logps_P2: the log-probabilities of the answers under the model, summed over their tokens.
        reference_P2: the same under the reference model; None if the loss uses no reference.
        lengths_P2: the numbers of predicted tokens of the answers.
        sequence_nll: a function that returns the mean negative log-likelihood of the tokens of each prompt with its
            chosen answer.

    Shapes:
        logps_P2, reference_P2, lengths_P2: (P, 2). `sequence_nll` returns (P,).
    """

    logps_P2: Tensor
    reference_P2: Tensor | None
    lengths_P2: Tensor
    sequence_nll: Callable[[], Tensor]

    @property
    def ratios_P2(self) -> Tensor:
        """The log-probabilities minus those of the reference.

        Shapes:
            (P, 2).
        """
        assert self.reference_P2 is not None, "the rule has asked for a reference"  # noqa: S101
        return self.logps_P2 - self.reference_P2

    @property
    def chosen_nll_P(self) -> Tensor:
        """The mean negative log-likelihood of the tokens of each chosen answer.

        Shapes:
            (P,).
        """
        return -self.logps_P2[:, 0] / self.lengths_P2[:, 0]


class PairLoss(Protocol):
    """A loss of pairs: a formula over the log-probabilities of the answers."""

    needs_reference: bool

    def pair_losses(self, scores: PairScores) -> tuple[Tensor, Tensor]:
        """Returns the loss of each pair, and the rewards of its answers, without gradients.

        Shapes:
            Returns (P,) and (P, 2).
        """
        ...


class AnswerRule(BaseLossRule):
    """The base class of rules over rows of answers: one loss per row, and rewards as the output of evaluations.

    Args:
        model: the model whose forward is called.
    """

    shifts = True
    needs_reference = False
    """True if batches must have the log-probabilities of a reference model."""
    estimates_divergence = False
    """True if batches must have the divergence from the reference, see `ml.feedback_rule`."""
    judges = False
    """True if rows are single answers that were judged, False if they are pairs."""

    def prepared(self, batch: Any) -> Any:
        """Returns the batch for a strategy: its answers as rows, with shifted targets that ignore the prompts."""
        if isinstance(batch, PaddingBatch):
            return PaddingBatch(self.prepared(batch.batch))
        if isinstance(batch, Mapping) and SHIFTED in batch:
            return batch
        return self._prepared(_checked(batch, self.judges))

    @abstractmethod
    def _prepared(self, batch: Mapping[str, Any]) -> Any: ...

    @abstractmethod
    def _losses(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the loss of each row, and its rewards without gradients.

        Shapes:
            Returns (B,), and (B, 2) or (B,).
        """

    @abstractmethod
    def _valid(self, batch: Any) -> Tensor:
        """Returns whether each row counts; rows that only fill up a batch do not.

        Shapes:
            Returns (B,).
        """

    def _count(self, batch: Any) -> float | Tensor:
        valid = self._valid(self.prepared(batch)).sum()
        return int(valid) if valid.device.type == "cpu" else valid  # on a device, `int` would wait for it

    def _total(self, model: Call, batch: Any, denom: float | Tensor | None) -> Tensor:
        return self._scored(model, batch)[0]

    def total_and_output(self, model: Call, batch: Any) -> tuple[Tensor, Any]:
        """Returns the sum of the losses of the rows, and the rewards of their answers.

        Shapes:
            Returns a scalar tensor, and (B, 2) rewards of pairs, or (B,) of single answers or scores.
        """
        if isinstance(batch, PaddingBatch):
            total, rewards = self.total_and_output(model, batch.batch)
            return total * 0.0, rewards
        return self._scored(model, self.prepared(batch))

    def _scored(self, model: Call, batch: Any) -> tuple[Tensor, Tensor]:
        output = self._inputs.call(model, batch)
        losses_B, rewards = self._losses(output, batch)
        # `where` and not a product: the loss of a row that only fills up the batch may be anything.
        total = torch.where(self._valid(batch), losses_B, torch.zeros_like(losses_B)).sum()
        return self._with_auxiliary(total, output, lambda: self._count(batch)), rewards.detach()

    def _reference(self, batch: Any, logps: Tensor) -> Tensor:
        found = batch.get(REFERENCE_KEY)
        if found is None:
            raise TrainingError(
                f"the batch has no {REFERENCE!r}, and the loss compares the model with a reference",
                code="FG914",
                hint="train with a trainer of Forgather, which computes them before the first step, or give the rows "
                f"a column {REFERENCE!r} with both log-probabilities",
            )
        return found.to(logps)  # type: ignore[no-any-return]


class PairRule(AnswerRule):
    """The rule of losses that compare the log-probabilities of two answers.

    Args:
        model: a causal language model.
        loss: the loss, which has the formula.

    Raises:
        TrainingError: FG916 if the model is not a causal language model.
    """

    def __init__(self, model: nn.Module, loss: PairLoss) -> None:
        require_causal(model, loss)
        super().__init__(model)
        self._loss = loss
        self.needs_reference = loss.needs_reference
        if self.needs_reference:
            warn_of_dropout(model)

    def _prepared(self, batch: Mapping[str, Any]) -> Any:
        return self._inputs.prepared(as_sequences(batch))

    def _valid(self, batch: Any) -> Tensor:
        return has_targets(batch[SHIFTED]).view(-1, 2).all(dim=1)

    def answer_logps(self, predict: Callable[[Any], Any], batch: Any) -> Tensor | None:
        """Returns the log-probabilities of both answers of each row, or None if `predict` returns None.

        Args:
            predict: a function that returns the model's output for a prepared batch, or None on a rank without one.
            batch: the prepared batch.

        Shapes:
            Returns (P, 2).
        """
        output = predict(batch)
        return None if output is None else sequence_logps(logits_of(output), batch[SHIFTED]).view(-1, 2)

    def _losses(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        logits_RTV, targets_RT = logits_of(output), batch[SHIFTED]
        logps_P2 = sequence_logps(logits_RTV, targets_RT).view(-1, 2)
        lengths_P2 = (targets_RT != IGNORE_INDEX).sum(dim=1).clamp(min=1).view(-1, 2)
        reference_P2 = self._reference(batch, logps_P2).view(-1, 2) if self.needs_reference else None

        def sequence_nll() -> Tensor:
            ids_RT = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORE_INDEX)
            chosen_PT = shifted_labels(ids_RT[::2])
            return -sequence_logps(logits_RTV[::2], chosen_PT) / (chosen_PT != IGNORE_INDEX).sum(dim=1).clamp(min=1)

        return self._loss.pair_losses(PairScores(logps_P2, reference_P2, lengths_P2, sequence_nll))


def _checked(batch: Any, judges: bool) -> Mapping[str, Any]:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(batch, Mapping) and isinstance(ids, Tensor) and ids.ndim == 3 and COMPLETION_MASK in batch:
        # Both have two answers, and the labels of pairs would be the judgment "bad" of their answers.
        if (JUDGED in batch) != judges:
            raise _other_rows(judges)
        return batch
    found = f"the entries {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise TrainingError(
        f"the batch is {found}, and the loss needs rows of two answers",
        code="FG914",
        hint="set data_collator to forgather.ml.data:PreferenceCollator, and tokenize with tokenize_preferences",
    ).about("data_collator")


def _other_rows(judges: bool) -> TrainingError:
    found, needed = ("pairs of answers", "single answers that were judged")[:: 1 if judges else -1]
    return TrainingError(
        f"the batch has {found}, and the loss needs {needed}",
        code="FG914",
        hint=f"read the rows with datasets/{'feedback' if judges else 'preferences'}.yaml, or give a loss of {found}",
    ).about("train_dataset")


def as_sequences(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch whose rows are the answers: of row 0 both, of row 1 both, and so on.

    Args:
        batch: the batch of a `PreferenceCollator`.

    Shapes:
        entries of the batch: (P, 2, ...) or (P,). Each entry of the result: (R, ...).
    """
    targets = batch["input_ids"].masked_fill(batch[COMPLETION_MASK] == 0, IGNORE_INDEX)
    targets = targets.masked_fill((batch["labels"] == IGNORE_INDEX)[:, None, None], IGNORE_INDEX)
    flat = {
        name: item.flatten(0, 1) if item.ndim > 1 else item.repeat_interleave(2)
        for name, item in batch.items()
        if name not in (COMPLETION_MASK, JUDGED, "labels")
    }
    for name, private in ((REFERENCE, REFERENCE_KEY), (MARGIN, MARGIN_KEY)):
        if name in flat:
            flat[private] = flat.pop(name)
    return {**flat, SHIFTED: shifted_labels(targets.flatten(0, 1))}


def has_targets(targets_RT: Tensor) -> Tensor:
    """Returns whether each row has a target that is not ignored.

    Shapes:
        targets_RT: (R, T). Returns (R,).
    """
    return (targets_RT != IGNORE_INDEX).any(dim=1)


def sequence_logps(logits_RTV: Tensor, targets_RT: Tensor) -> Tensor:
    """Returns the log-probability of the targets of each row, summed over positions that are not ignored.

    Args:
        logits_RTV: the logits.
        targets_RT: the shifted labels: at each position the token that the logits of this position predict.

    Shapes:
        logits_RTV: (R, T, V), targets_RT: (R, T). Returns (R,).

    Example:
        >>> sequence_logps(torch.zeros(1, 2, 4), torch.tensor([[3, -100]])).exp()
        tensor([0.2500])
    """
    losses_N = F.cross_entropy(
        at_least_float32(flat_logits(logits_RTV)), targets_RT.reshape(-1), ignore_index=IGNORE_INDEX, reduction="none"
    )
    return -losses_N.view(targets_RT.shape).sum(dim=1)


def require_causal(model: nn.Module, loss: object) -> None:
    """Raises the FG916 error if a model does not predict the next token.

    Args:
        model: the model to train.
        loss: the loss, whose class is named.

    Raises:
        TrainingError: FG916.
    """
    if not is_causal_lm(model):
        raise TrainingError(
            f"{type(loss).__name__} needs a causal language model, and the model is {type(model).__name__}",
            code="FG916",
            hint="take a model such as LlamaForCausalLM; the loss of a reward model is RewardLoss",
        ).about("loss_fn")


def warn_of_dropout(model: nn.Module) -> None:
    """Warns if a model drops activations at random: the reference is computed without that.

    Args:
        model: the model to train.
    """
    inner: Any = getattr(model, "get_base_model", None)
    config: Any = getattr(inner() if callable(inner) else model, "config", None)
    fields = config.to_dict() if hasattr(config, "to_dict") else {}
    adapters = getattr(model, "peft_config", {}).values()
    fields |= {"lora_dropout": max((getattr(one, "lora_dropout", 0.0) for one in adapters), default=0.0)}
    # Fields of other heads, such as `summary_first_dropout` of GPT-2, have no effect on a model without that head.
    in_use = {layer.p for layer in model.modules() if isinstance(layer, _DropoutNd)} | {
        value
        for layer in model.modules()
        for name, value in vars(layer).items()
        if "dropout" in name and isinstance(value, float)
    }
    found = [
        name
        for name, value in fields.items()
        if ("dropout" in name or "pdrop" in name) and isinstance(value, float) and value > 0 and value in in_use
    ]
    if found:
        _log.warning(
            "the model drops activations at random (%s), and its reference does not: the first loss differs from that "
            "of equal models; set %s to 0 in the configuration of the %s",
            ", ".join(f"{name} {fields[name]}" for name in found),
            "it" if len(found) == 1 else "them",
            "adapter" if found == ["lora_dropout"] else "model",
        )
