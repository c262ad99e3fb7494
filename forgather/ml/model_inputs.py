"""Calls of a model: the conversion of a batch into the arguments of the model's forward.

Every loss, strategy and evaluation calls models through `ModelInputs`. The forward pass of a training step does not
fill a key-value cache. For packed rows, the model gets the inputs that keep attention within document boundaries, and
does not get an attention mask that would let attention cross them.

A prepared batch has the document boundaries of its rows under the key `DOCUMENTS`. This entry is not passed to the
model.

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
from forgather.ml.attention_inputs import AttentionInputs, padded_rows
from forgather.ml.documents import Documents, builds_masks, takes_argument, warn_mixed, warn_too_long, why_mixed
from forgather.ml.types import MAPPINGS

PRIVATE = "forgather."
"""The beginning of the keys of entries that belong to a prepared batch and are not passed to the model."""
DOCUMENTS = f"{PRIVATE}documents"
"""The key of the `Documents` in a prepared batch."""
SHIFTED = "shift_labels"
"""The key of shifted labels: each label is at the position of the logits that predict it."""
_NO_INPUTS = frozenset({"labels", "label", SHIFTED})
_NOTHING_TO_DO = contextlib.nullcontext()


def inputs_of(batch: Any) -> Any:
    """Returns a batch without its labels: the inputs of a model that returns logits."""
    if isinstance(batch, MAPPINGS):
        return {name: value for name, value in batch.items() if name not in _NO_INPUTS and not name.startswith(PRIVATE)}
    if isinstance(batch, tuple | list) and len(batch) > 1:
        return tuple(batch[:-1])
    return batch


def with_labels(batch: Any) -> Any:
    """Returns a batch including its labels, for a model or a user's method that computes the loss itself."""
    if isinstance(batch, MAPPINGS):
        return {name: value for name, value in batch.items() if not name.startswith(PRIVATE)}
    return batch


class NoCache:
    """Switches off a model's key-value cache, with which transformers would treat a packed row as a single document.

    `use_cache=False` is passed to the model's forward if it takes that argument. For inner models that the argument
    does not reach, the configuration is changed during a call.

    Args:
        model: the model whose forward will be called.
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
        """Returns a context manager in which the configurations of inner models switch the cache off."""
        return self._turned_off() if self._configs else _NOTHING_TO_DO

    @contextlib.contextmanager
    def _turned_off(self) -> Iterator[None]:
        # The setting is restored afterwards: text generation between two steps needs the cache.
        for config in self._configs:
            config.use_cache = False
        try:
            yield
        finally:
            for config in self._configs:
                config.use_cache = True


class ModelInputs:
    """Prepares batches for one model, and calls the model.

    Args:
        model: the model, before it is wrapped for distributed training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._mixed = why_mixed(model)
        # Without a mask, models of transformers read document boundaries from positions; others may not.
        self._is_transformers = any(isinstance(part, PreTrainedModel) for part in model.modules())
        self._no_cache = NoCache(model)
        self._attention = AttentionInputs(model)
        self._keeps_rows_apart = self._attention.takes_borders or builds_masks(model)
        self._max_positions = max_positions(model)

    def prepared(self, batch: Any) -> Any:
        """Returns a batch with its document boundaries, and without a mask that would let attention cross them.

        Args:
            batch: the batch on the host, as the collator returned it. A batch that is not a mapping is returned
                unchanged.

        Shapes:
            input_ids: (B, T); position_ids: (B, T) or (1, T); attention_mask: (B, T).

        Raises:
            TrainingError: FG845 if the mask hides part of a document, FG857 if the batch has several rows and the
                model's attention keeps documents apart only in a single row.
        """
        # Several callers may prepare the same batch, one after the other.
        if not isinstance(batch, MAPPINGS) or DOCUMENTS in batch:
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
        documents = Documents(positions_BT, (main.shape[0], main.shape[1]), padded_rows=padded_rows(batch))
        # Read here, so that no step has to: the answer is kept.
        if documents.are_packed and (self._mixed is not None or not self._keeps_rows_apart):
            self._check_documents(documents)
        if self._max_positions is not None and main.shape[1] > self._max_positions:
            self._warn_of_long_rows(documents, mask_BT, self._max_positions)
        return {**batch, DOCUMENTS: documents}

    def keywords(self, batch: Any) -> Any:
        """Returns a batch as keyword arguments for a caller that calls the model itself.

        With these arguments, the model's attention does not cross document boundaries, if the model supports that.

        Raises:
            TrainingError: FG845 or FG857, for the same reasons as in `prepared`.
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
        """Returns the output of a model for a batch.

        A mapping is passed as keyword arguments, a tuple as positional arguments, and a tensor as the only argument.

        Args:
            model: the model, a wrapper around it, or any callable that takes the same inputs.
            batch: the batch, as the collator returned it or as `prepared` returned it.
            labels: True to pass the labels too, to a model that computes its own loss.
        """
        inputs = with_labels(batch) if labels else inputs_of(batch)
        documents = known_documents(batch)
        with self._no_cache.in_force(), self._attention.in_force(documents):
            if isinstance(inputs, MAPPINGS):
                inputs = self._attention.completed(inputs, documents)
                return model(**{**inputs, **self._no_cache.keywords})
            if isinstance(inputs, tuple | list):
                return model(*inputs, **self._no_cache.keywords)
            return model(inputs, **self._no_cache.keywords)


def known_documents(batch: Any) -> Documents | None:
    """Returns the documents of a prepared batch, or None if its positions are not those of one sequence a row.

    Args:
        batch: the batch, as the collator returned it or as `ModelInputs.prepared` returned it.
    """
    if not isinstance(batch, MAPPINGS):
        return None
    positions = batch.get("position_ids")
    # Models of pictures may have three positions for each token, whose restarts are not those of documents.
    is_usual = positions is None or (isinstance(positions, Tensor) and positions.ndim == 2)
    documents: Documents | None = batch.get(DOCUMENTS)
    return documents if is_usual else None


def _without_mask(batch: Mapping[str, Any], mask_BT: Tensor, positions_BT: Tensor) -> Mapping[str, Any]:
    """Returns a batch of packed rows without its mask, because transformers ignores positions if there is a mask.

    Each masked token gets position 0, which makes it a document of its own.

    Shapes:
        mask_BT, positions_BT: (B, T).

    Raises:
        TrainingError: FG845 if the mask hides only part of a document.
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


def max_positions(model: nn.Module) -> int | None:
    """Returns the largest number of positions that a model supports, or None if that number is not certain.

    A table of learned positions ends at this number. Rotary positions end there too, unless a setting such as
    `rope_type: yarn` extends them.
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
