"""The kind of labels that a model learns, compared with the labels of the first rows that it gets.

Takes a model, or the first batches of a data set; gives a `LabelKind`, or an error if the labels are of another kind.
Labels of another task often have fitting shapes and small numbers, so they would train without an error. What tells
them apart is how often the label of a position is the token at that position: always for a causal language model, and
almost never for every other task.

Shapes:
    B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from forgather.errors import TrainingError

_BATCHES = 16
_MOST = 0.9
_HALF = 0.5


class LabelKind(StrEnum):
    """What the labels of a model are, in words that complete the sentence "the model learns ..."."""

    NEXT_TOKEN = "the next token at each position"
    MASKED_TOKEN = "the tokens that the input hides"
    CLASS_OF_TOKEN = "a class of each token"
    CLASS_OF_ROW = "one class of each row"
    OTHER_TEXT = "the tokens of another text"


_LABELS = 8
# The collator of a masked language model keeps a tenth of the targets in the input: a few may all be kept by chance.
_LABELS_OF_MASKED = 32
_BY_LOSS = {
    "ForMaskedLM": LabelKind.MASKED_TOKEN,
    "ForTokenClassification": LabelKind.CLASS_OF_TOKEN,
    "ForSequenceClassification": LabelKind.CLASS_OF_ROW,
}


def kind_of_labels(model: nn.Module) -> LabelKind | None:
    """Returns what the labels are of a model that is not a causal language model and computes its own loss.

    None for a module of the user, and for a model whose labels cannot be compared with token ids.
    """
    found = _BY_LOSS.get(str(getattr(model, "loss_type", None)))
    writes = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return LabelKind.OTHER_TEXT if found is None and writes else found


class LabelCheck:
    """A check of the labels in the first batches of a data set.

    Args:
        kind: what the labels must be; None if that is not known, so that nothing is checked.
        model: the name of the model's class.
        argument: the argument of the trainer that the rows come from.
    """

    def __init__(self, kind: LabelKind | None, model: str, argument: str) -> None:
        self.kind, self.model, self.argument = kind, model, argument
        self._left = 0 if kind is None else _BATCHES
        self._equal = self._valid = self._next = 0
        self._hides_inputs = False

    def add(self, batch: Any, ignore_index: int | None) -> None:
        """Compares the labels of a batch with its tokens. After some batches, it does nothing.

        Args:
            batch: the batch as the collator returned it. One without token ids, or without labels that are whole
                numbers, says nothing.
            ignore_index: the label of positions that do not contribute to the loss.

        Shapes:
            input_ids: (B, T).

        Raises:
            TrainingError: FG960 if the labels are of another task.
        """
        if not self._left or not isinstance(batch, Mapping):
            return
        tokens, labels = batch.get("input_ids"), batch.get("labels")
        if not isinstance(tokens, Tensor) or not isinstance(labels, Tensor) or labels.is_floating_point():
            return
        self._left -= 1
        if tokens.ndim != 2 or tokens.shape != labels.shape:
            self._refuse_shape(tokens, labels)
            return
        every_BT = torch.ones_like(labels, dtype=torch.bool)
        valid_BT = every_BT if ignore_index is None else labels.ne(ignore_index)
        self._valid += int(valid_BT.sum())
        self._equal += int((valid_BT & (labels == tokens)).sum())
        self._next += int((valid_BT[:, :-1] & (labels[:, :-1] == tokens[:, 1:])).sum())
        mask_BT = batch.get("attention_mask")
        shown_BT = mask_BT.bool() if isinstance(mask_BT, Tensor) and mask_BT.shape == tokens.shape else every_BT
        self._hides_inputs |= bool((~valid_BT & shown_BT).any())
        self._refuse_values()

    def _refuse_shape(self, tokens: Tensor, labels: Tensor) -> None:
        if labels.ndim < 2:
            if self.kind is not LabelKind.CLASS_OF_ROW:
                raise self._another_task("one number for each row")
        elif tokens.ndim == 2 and self.kind not in (LabelKind.CLASS_OF_ROW, LabelKind.OTHER_TEXT):
            raise self._another_task(f"{labels.shape[1]} numbers for a row of {tokens.shape[1]} tokens")

    def _refuse_values(self) -> None:
        if not self._valid:
            return
        if self.kind is LabelKind.CLASS_OF_ROW:
            raise self._another_task("a number for each token")
        # A few labels may differ from their tokens in sound rows, as where inputs are noised.
        if self._valid < (_LABELS_OF_MASKED if self.kind is LabelKind.MASKED_TOKEN else _LABELS):
            return
        share = self._equal / self._valid
        if self.kind is LabelKind.NEXT_TOKEN:
            if share < _HALF:
                if self._next / self._valid > _HALF:
                    raise self._another_task("shifted by one position already, which the loss does again", _SHIFTED)
                raise self._another_task(f"not the tokens of their row ({self._equal} of {self._valid} are)", _OF_TASK)
            return
        # An encoder-decoder may learn to copy; but then no token of its input is without a label.
        if share >= _MOST and (self.kind is not LabelKind.OTHER_TEXT or self._hides_inputs):
            raise self._another_task("the tokens of their own row, as for a causal language model")

    def _another_task(self, found: str, hint: str | None = None) -> TrainingError:
        hint = hint or (_OF_TASK if self.kind is LabelKind.NEXT_TOKEN else _OF_ROWS)
        message = f"the labels are {found}, and {self.model} learns {self.kind}"
        return TrainingError(message, code="FG960", hint=hint).about(self.argument)


_SHIFTED = (
    "give each position the label of its own token: labels equal to input_ids, with -100 where nothing is learned"
)
_OF_TASK = (
    "take the model of the task (forgather.ml.classifiers, or seq2seq_from_config of forgather.ml.models), or your own "
    "loss_fn"
)
_OF_ROWS = (
    "take the rows of the model's task: tokenize_labelled, tokenize_tagged or tokenize_seq2seq of forgather.ml.data, "
    "or a collator that masks tokens"
)
