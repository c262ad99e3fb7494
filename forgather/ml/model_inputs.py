"""What a model is called with.

Takes a batch, and perhaps its labels; calls a model. Keeps true: every loss, strategy and evaluation calls models
through `ModelInputs`, so what is decided here holds for all of them. A training step fills no cache of keys and values;
where rows hold several documents, what keeps them apart reaches the model, and nothing with it that would undo that.

A prepared batch holds, under `DOCUMENTS`, what the host knows of its rows; it is an input of no model.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedModel

from forgather.errors import TrainingError
from forgather.ml.documents import Documents, builds_masks, takes, tell_mixed, tell_too_long, why_mixed

DOCUMENTS = "forgather.documents"
"""Key of the `Documents` of a prepared batch."""
SHIFTED = "shift_labels"
"""Key of labels that lie where the logits lie which predict them."""
_NO_INPUTS = frozenset({"labels", "label", SHIFTED, DOCUMENTS})
_NOTHING_TO_DO = contextlib.nullcontext()


def inputs_of(batch: Any) -> Any:
    """Returns a batch without its labels: what a model that gives logits is called with."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in _NO_INPUTS}
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1])
    return batch


def with_labels(batch: Any) -> Any:
    """Returns a batch as a model, or a method of the user, is called with it that computes the loss itself."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != DOCUMENTS}
    return batch


class NoCache:
    """Lets a model fill no cache of keys and values: with one, transformers takes packed rows for one document.

    A keyword says so where the forward takes it; the configuration, while a call lasts, for models inside that it
    does not reach.

    Args:
        model: what is called.
    """

    def __init__(self, model: nn.Module) -> None:
        reaches = takes(model, "use_cache") and ("use_cache" in _named(model) or hasattr(_config(model), "use_cache"))
        self.keywords = {"use_cache": False} if reaches else {}
        configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
        self._configs = [config for config in configs.values() if getattr(config, "use_cache", False)]

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Turns caches off in the configurations, and on again."""
        return self._turned_off() if self._configs else _NOTHING_TO_DO

    @contextlib.contextmanager
    def _turned_off(self) -> Iterator[None]:
        for config in self._configs:
            config.use_cache = False
        try:
            yield
        finally:
            for config in self._configs:
                config.use_cache = True


class ModelInputs:
    """How batches are handed to one model.

    Args:
        model: the model, before anything is wrapped around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mixed = why_mixed(model)
        self._reads_masks = builds_masks(model)
        self._is_transformers = any(isinstance(part, PreTrainedModel) for part in model.modules())
        self._no_cache = NoCache(model)
        self._most_positions = _most_positions(model)

    def prepared(self, batch: Any) -> Any:
        """Returns a batch on the host with what is known of its rows, and without what would mix their documents.

        Raises:
            TrainingError: FG845 for a mask that divides a document, FG857 for attention that mixes documents.
        """
        if not isinstance(batch, Mapping) or DOCUMENTS in batch:
            return batch
        main = batch.get("input_ids", batch.get("inputs_embeds"))
        if not isinstance(main, Tensor) or main.ndim < 2:
            return batch
        positions_BT, mask_BT = batch.get("position_ids"), batch.get("attention_mask")
        if not isinstance(positions_BT, Tensor) or positions_BT.ndim != 2:
            positions_BT = None
        elif isinstance(mask_BT, Tensor) and mask_BT.ndim == 2 and self._is_transformers and self._mixed is None:
            batch = _without_mask(batch, mask_BT, positions_BT)
            positions_BT = batch["position_ids"] if batch["attention_mask"] is None else None
        documents = Documents(positions_BT, (main.shape[0], main.shape[1]))
        if (self._mixed is not None or not self._reads_masks) and documents.are_packed:
            self._tell_or_refuse(documents)
        if self._most_positions is not None and main.shape[1] > self._most_positions:
            self._tell_too_long(documents, mask_BT, self._most_positions)
        return {**batch, DOCUMENTS: documents}

    def keywords(self, batch: Any) -> Any:
        """Returns what somebody else calls the model with: the batch, or one whose documents stay apart.

        Raises:
            TrainingError: as `prepared`.
        """
        prepared = self.prepared(batch)
        if prepared is batch or not prepared[DOCUMENTS].are_packed:
            return batch
        hidden = {DOCUMENTS} if prepared.get("attention_mask") is not None else {DOCUMENTS, "attention_mask"}
        return {**{name: value for name, value in prepared.items() if name not in hidden}, **self._no_cache.keywords}

    def _tell_or_refuse(self, documents: Documents) -> None:
        if self._mixed is not None:
            tell_mixed(self._model, self._mixed)
        elif documents.rows > 1:
            raise TrainingError(
                f"{documents.rows} rows hold {int(documents.lengths.numel())} documents, and the attention of "
                f"{type(self._model).__name__} keeps documents apart in batches of one row alone",
                code="FG857",
                hint="set attn_implementation: sdpa, per_device_train_batch_size: 1, or document_boundaries: false",
            )

    def _tell_too_long(self, documents: Documents, mask_BT: Any, limit: int) -> None:
        longest = documents.longest
        if isinstance(mask_BT, Tensor) and mask_BT.ndim == 2:
            # Padding lies behind the last token of the longest row.
            longest = min(longest, int((mask_BT != 0).sum(dim=1).max()))
        if longest > limit:
            tell_too_long(self._model, longest, limit)

    def call(self, model: Callable[..., Any], batch: Any, *, labels: bool = False) -> Any:
        """Calls the model, or what is wrapped around it, with a batch.

        A mapping gives keywords, a tuple positions, and a tensor is the only argument.

        Args:
            model: the model, or a callable in its place.
            batch: as the collator gave it, or prepared.
            labels: hand on the labels, to a model that computes its own loss.
        """
        inputs = with_labels(batch) if labels else inputs_of(batch)
        with self._no_cache.in_force():
            if isinstance(inputs, Mapping):
                return model(**{**inputs, **self._no_cache.keywords})
            if isinstance(inputs, tuple | list):
                return model(*inputs, **self._no_cache.keywords)
            return model(inputs, **self._no_cache.keywords)


def _without_mask(batch: Mapping[str, Any], mask_BT: Tensor, positions_BT: Tensor) -> Mapping[str, Any]:
    """Returns a batch of packed rows without its mask, beside which transformers does not look at positions.

    What the mask hides is set to position 0: each such token is a document of its own.

    Raises:
        TrainingError: FG845 where a document is hidden in part.
    """
    hidden_BT = mask_BT == 0
    breaks_BT = positions_BT.diff(dim=1) != 1
    if not bool((breaks_BT & ~hidden_BT[:, 1:] & ~hidden_BT[:, :-1]).any()):
        return batch
    positions_BT = positions_BT.masked_fill(hidden_BT, 0)
    if bool(((hidden_BT[:, 1:] != hidden_BT[:, :-1]) & (positions_BT.diff(dim=1) == 1)).any()):
        raise TrainingError(
            "the batch has several documents in a row, and an attention_mask that hides a part of one: the two cannot "
            "hold together",
            code="FG845",
            hint="let positions of a document begin at 0 after what is masked, or leave attention_mask out",
        )
    return {**batch, "attention_mask": None, "position_ids": positions_BT}


def _named(model: nn.Module) -> Mapping[str, Any]:
    return inspect.signature(model.forward).parameters


def _most_positions(model: nn.Module) -> int | None:
    """Returns beyond how many positions a model was not made to work; None where nothing says so for certain.

    A table of positions ends there. Rotary positions do where nothing stretches them (`rope_type: yarn` and others).
    """
    # Adapters of peft change no position.
    inner: Any = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else model
    config = _config(model)
    said = getattr(config, "max_position_embeddings", None)
    if not isinstance(model, PreTrainedModel) or not isinstance(said, int) or said <= 0:
        return None
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "alibi", False):
        return None
    rotary = getattr(config, "rope_parameters", None)
    if isinstance(rotary, Mapping) and rotary:
        return said if rotary.get("rope_type") == "default" else None
    tables = (part.num_embeddings for name, part in model.named_modules() if _is_table_of_positions(name, part))
    return said if said in tables else None


def _is_table_of_positions(name: str, part: nn.Module) -> TypeGuard[nn.Embedding]:
    return isinstance(part, nn.Embedding) and ("position" in name or name.endswith("wpe"))


def _config(model: nn.Module) -> Any:
    return getattr(model, "config", None)
