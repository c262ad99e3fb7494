"""The inputs of a model: how batches become calls.

Every loss, strategy and evaluation calls models through `ModelInputs`. A training step fills no key-value cache. Packed
rows reach the model with the inputs that keep their documents apart, and without those that would mix them.

A prepared batch holds, under `DOCUMENTS`, the document boundaries of its rows; models do not get this entry.

Shapes:
    B rows, T positions.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

from torch import Tensor, nn
from transformers import PreTrainedModel

from forgather.errors import TrainingError
from forgather.ml.documents import Documents, builds_masks, takes_argument, warn_mixed, warn_too_long, why_mixed

DOCUMENTS = "forgather.documents"
"""Key of the `Documents` in a prepared batch."""
SHIFTED = "shift_labels"
"""Key of shifted labels: each at the position of the logits that predict it."""
_NO_INPUTS = frozenset({"labels", "label", SHIFTED, DOCUMENTS})
_NOTHING_TO_DO = contextlib.nullcontext()


def inputs_of(batch: Any) -> Any:
    """Returns a batch without labels: the inputs of a model that returns logits."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in _NO_INPUTS}
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1])
    return batch


def with_labels(batch: Any) -> Any:
    """Returns a batch with labels, as input of a model, or of a user's method, that computes the loss itself."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != DOCUMENTS}
    return batch


class NoCache:
    """Keeps a model from filling a key-value cache; with one, transformers treats packed rows as a single document.

    `use_cache=False` is passed if the forward takes it; for inner models that it does not reach, the configuration is
    changed during a call.

    Args:
        model: to be called.
    """

    def __init__(self, model: nn.Module) -> None:
        reaches = takes_argument(model, "use_cache") and (
            "use_cache" in inspect.signature(model.forward).parameters
            or hasattr(getattr(model, "config", None), "use_cache")
        )
        self.keywords = {"use_cache": False} if reaches else {}
        # Inner models of a wrapper or a composite have configurations of their own; several parts may have the same
        # one.
        configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
        self._configs = [config for config in configs.values() if getattr(config, "use_cache", False)]

    def in_force(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the configurations turn caches off."""
        return self._turned_off() if self._configs else _NOTHING_TO_DO

    @contextlib.contextmanager
    def _turned_off(self) -> Iterator[None]:
        # Restored afterwards: a generation between two steps needs its cache.
        for config in self._configs:
            config.use_cache = False
        try:
            yield
        finally:
            for config in self._configs:
                config.use_cache = True


class ModelInputs:
    """Prepares batches for one model, and calls it.

    Args:
        model: before anything is wrapped around it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mixed = why_mixed(model)
        self._reads_masks = builds_masks(model)
        # Without a mask, models of transformers read document boundaries from positions; others may not.
        self._is_transformers = any(isinstance(part, PreTrainedModel) for part in model.modules())
        self._no_cache = NoCache(model)
        self._max_positions = _max_positions(model)

    def prepared(self, batch: Any) -> Any:
        """Returns a batch on the host with its document boundaries, and without a mask that would mix documents.

        Args:
            batch: as the collator gave it; one that is not a mapping is returned unchanged.

        Shapes:
            input_ids: (B, T); position_ids: (B, T) or (1, T); attention_mask: (B, T).

        Raises:
            TrainingError: FG845 for a mask that hides part of a document, FG857 for attention that mixes documents.
        """
        # A batch may be prepared by several callers in turn.
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
        # On the host, before the batch is moved: finding the boundaries on a device would wait for it.
        documents = Documents(positions_BT, (main.shape[0], main.shape[1]))
        if (self._mixed is not None or not self._reads_masks) and documents.are_packed:
            self._check_documents(documents)
        if self._max_positions is not None and main.shape[1] > self._max_positions:
            self._warn_of_long_rows(documents, mask_BT, self._max_positions)
        return {**batch, DOCUMENTS: documents}

    def keywords(self, batch: Any) -> Any:
        """Returns keyword arguments for a caller that calls the model itself; packed documents stay apart.

        Raises:
            TrainingError: as `prepared`.
        """
        prepared = self.prepared(batch)
        if prepared is batch or not prepared[DOCUMENTS].are_packed:
            return batch
        hidden = {DOCUMENTS} if prepared.get("attention_mask") is not None else {DOCUMENTS, "attention_mask"}
        return {**{name: value for name, value in prepared.items() if name not in hidden}, **self._no_cache.keywords}

    def _check_documents(self, documents: Documents) -> None:
        if self._mixed is not None:
            warn_mixed(self._model, self._mixed)
        elif documents.rows > 1:
            raise TrainingError(
                f"{documents.rows} rows hold {int(documents.lengths.numel())} documents, and the attention of "
                f"{type(self._model).__name__} keeps documents apart only in batches of one row",
                code="FG857",
                hint="set attn_implementation: sdpa, per_device_train_batch_size: 1, or document_boundaries: false",
            )

    def _warn_of_long_rows(self, documents: Documents, mask_BT: Any, limit: int) -> None:
        longest = documents.longest
        if isinstance(mask_BT, Tensor) and mask_BT.ndim == 2:
            # Padding follows the last token of the longest row, and does not need positions.
            longest = min(longest, int((mask_BT != 0).sum(dim=1).max()))
        if longest > limit:
            warn_too_long(self._model, longest, limit)

    def call(self, model: Callable[..., Any], batch: Any, *, labels: bool = False) -> Any:
        """Returns the output of a model, or a wrapper of it, for a batch.

        A mapping is passed as keyword arguments, a tuple as positional arguments, and a tensor as the only argument.

        Args:
            model: the model, or a callable in its place.
            batch: as the collator gave it, or prepared.
            labels: pass the labels too, to a model that computes its own loss.
        """
        inputs = with_labels(batch) if labels else inputs_of(batch)
        with self._no_cache.in_force():
            if isinstance(inputs, Mapping):
                return model(**{**inputs, **self._no_cache.keywords})
            if isinstance(inputs, tuple | list):
                return model(*inputs, **self._no_cache.keywords)
            return model(inputs, **self._no_cache.keywords)


def _without_mask(batch: Mapping[str, Any], mask_BT: Tensor, positions_BT: Tensor) -> Mapping[str, Any]:
    """Returns a batch of packed rows without its mask; with a mask, transformers does not read positions.

    Masked tokens get position 0, which makes each of them a document of its own.

    Shapes:
        mask_BT, positions_BT: (B, T).

    Raises:
        TrainingError: FG845 if a document is masked in part.
    """
    hidden_BT = mask_BT == 0
    # Where the position does not grow by one, another document begins.
    breaks_BT = positions_BT.diff(dim=1) != 1
    if not bool((breaks_BT & ~hidden_BT[:, 1:] & ~hidden_BT[:, :-1]).any()):
        return batch
    positions_BT = positions_BT.masked_fill(hidden_BT, 0)
    if bool(((hidden_BT[:, 1:] != hidden_BT[:, :-1]) & (positions_BT.diff(dim=1) == 1)).any()):
        raise TrainingError(
            "the batch has several documents in a row and an attention_mask that hides part of a document: documents "
            "and masks cannot be combined in this way",
            code="FG845",
            hint="start the positions of a document at 0 after masked tokens, or leave attention_mask out",
        )
    return {**batch, "attention_mask": None, "position_ids": positions_BT}


def _max_positions(model: nn.Module) -> int | None:
    """Returns the largest number of positions that a model was made for; None if that is not certain.

    A table of learned positions ends there. Rotary positions end there if nothing extends them (`rope_type: yarn` and
    others).
    """
    # An adapter of peft has the positions of the model inside it.
    inner: Any = getattr(model, "get_base_model", None)
    model = inner() if callable(inner) else model
    config: Any = getattr(model, "config", None)
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
