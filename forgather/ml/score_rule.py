"""The rule of losses of reward models, which give each sequence one score.

Takes the batches of `PreferenceCollator` for pairs; gives the sum of losses over pairs, and the scores.

Shapes:
    P pairs, N padding tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from forgather.errors import TrainingError
from forgather.ml.losses import at_least_float32, is_causal_lm, logits_of
from forgather.ml.model_inputs import SHIFTED
from forgather.ml.preference_rules import MARGIN_KEY, AnswerRule, as_sequences, has_targets


class ScoreLoss(Protocol):
    """A loss of the scores that a reward model gives two answers."""

    def score_losses(self, scores_P2: Tensor, margins_P: Tensor | None) -> Tensor:
        """Returns the loss of each pair.

        Args:
            scores_P2: the scores of the chosen and the rejected answers.
            margins_P: the least difference between them that is asked for; None for none.

        Shapes:
            scores_P2: (P, 2), margins_P: (P,). Returns (P,).
        """
        ...


class ScoreRule(AnswerRule):
    """The rule of losses of reward models, which give each sequence one score.

    Args:
        model: a model with one output per sequence, such as LlamaForSequenceClassification with `num_labels: 1`.
        loss: the loss, which has the formula.

    Raises:
        TrainingError: FG916 if the model does not give each sequence one score, or does not know the padding token.
            `prepared` raises it if a batch is padded with another token.
    """

    def __init__(self, model: nn.Module, loss: ScoreLoss) -> None:
        config = getattr(model, "config", None)
        outputs = getattr(config, "num_labels", 1)
        if is_causal_lm(model) or outputs != 1:
            found = "a language model" if is_causal_lm(model) else f"a model with {outputs} outputs"
            raise _unfit(f"{type(loss).__name__} needs a model with one score, and {type(model).__name__} is {found}")
        self._pad_id = getattr(config, "pad_token_id", None)
        if config is not None and self._pad_id is None:
            raise _unfit(f"{type(model).__name__} finds the last token by its padding token, and has no pad_token_id")
        super().__init__(model)
        self._loss = loss

    def _prepared(self, batch: Mapping[str, Any]) -> Any:
        padding_N = batch["input_ids"][batch["attention_mask"] == 0]
        # The model would take another padding token for the last token of the text, without an error.
        if self._pad_id is not None and padding_N.numel() and bool((padding_N != self._pad_id).any()):
            raise _unfit(
                f"the batch is padded with token {int(padding_N[0])}, and pad_token_id of the model is {self._pad_id}"
            )
        return self._inputs.prepared(as_sequences(batch))

    def _valid(self, batch: Any) -> Tensor:
        return has_targets(batch[SHIFTED]).view(-1, 2).all(dim=1)

    def _losses(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        scores = at_least_float32(logits_of(output))
        if scores.numel() != batch[SHIFTED].shape[0]:
            raise _unfit(
                f"the model returned scores of shape {tuple(scores.shape)} for {len(batch[SHIFTED])} sequences"
            )
        scores_P2 = scores.view(-1, 2)
        margins = batch.get(MARGIN_KEY)
        return self._loss.score_losses(scores_P2, None if margins is None else margins[::2].to(scores_P2)), scores_P2


def _unfit(message: str) -> TrainingError:
    return TrainingError(
        message,
        code="FG916",
        hint="take forgather.ml.classifiers:classifier_from_pretrained with task: regression and the tokenizer",
    ).about("model")
