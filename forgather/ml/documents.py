"""Document boundaries in packed rows, and a check whether a model's attention crosses them.

`Documents` computes the boundaries from `position_ids` on the host when they are first used, and never waits for a
device. `why_mixed` returns the reason why a model lets tokens attend across document boundaries. A model family counts
as safe only if a measurement in `packing_models.json` shows that its attention does not cross document boundaries.

Shapes:
    B rows, T positions, D documents.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from forgather.ml.log import get_logger

_log = get_logger(__name__)
MIXED = "FG848"
"""The code of the warning that a model's attention may cross the document boundaries in packed rows."""
TOO_LONG = "FG864"
"""The code of the warning that rows have more tokens than the model has positions."""
_TABLE = Path(__file__).parent / "packing_models.json"
# The attention implementations for which transformers builds masks.
_MASKED = frozenset({"eager", "sdpa", "flex_attention", "varlen"})
# Weak sets: a warning must not keep a model in memory.
_WARNED: dict[str, WeakSet[nn.Module]] = {MIXED: WeakSet(), TOO_LONG: WeakSet()}


class Documents:
    """The documents in the rows of a batch. Without positions, each row is one document.

    Args:
        positions_BT: the position of each token in its document, on the host. Positions grow by one within a document.
            None if each row is one document.
        shape: the shape (B, T) of the batch.
        padded_rows: for each row whether a mask hides one of its tokens. None if that is not known.

    Shapes:
        positions_BT: (B, T), or (1, T) if all rows have the same positions. The attribute `starts_BT`: (B, T). The
            attribute `lengths`: (D,).
    """

    def __init__(
        self,
        positions_BT: Tensor | None,
        shape: tuple[int, int],
        *,
        padded_rows: tuple[bool, ...] | None = None,
    ) -> None:
        self.positions_BT = positions_BT
        self.rows, self.row_length = shape
        self.padded_rows = padded_rows

    def __getitem__(self, rows: slice) -> Documents:
        """Returns the documents in a slice of the rows.

        Args:
            rows: the slice of the rows.
        """
        number = len(range(*rows.indices(self.rows)))
        positions_BT = self.positions_BT
        # One row of positions may stand for all rows.
        if positions_BT is not None and positions_BT.shape[0] == self.rows:
            positions_BT = positions_BT[rows]
        padded = self.padded_rows if self.padded_rows is None else self.padded_rows[rows]
        part = Documents(positions_BT, (number, self.row_length), padded_rows=padded)
        # Known already, if the batch was prepared: a step must not read tensors.
        part.packed_rows = self.packed_rows[rows]
        return part

    @functools.cached_property
    def starts_BT(self) -> Tensor:
        """A mask that is True at the first token of each document; the first token of a row always starts a document.

        Shapes:
            (B, T).
        """
        if self.positions_BT is None:
            starts_BT = torch.zeros(self.rows, self.row_length, dtype=torch.bool)
            starts_BT[:, :1] = True
            return starts_BT
        return F.pad(self.positions_BT.diff(dim=1) != 1, (1, 0), value=True).expand(self.rows, -1)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """The length of each document, including padding, in the order of the rows.

        Shapes:
            (D,).
        """
        # On the host: `nonzero` of a tensor on an accelerator would wait for it.
        starts = self.starts_BT.flatten().nonzero().flatten()
        return torch.diff(starts, append=starts.new_tensor([self.rows * self.row_length]))

    @functools.cached_property
    def borders(self) -> Tensor:
        """The borders of the documents if all rows follow one another, as kernels for variable lengths take them.

        Shapes:
            (D + 1,), int32, on the host.
        """
        return F.pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    @functools.cached_property
    def longest(self) -> int:
        """The length of the longest document, or 0 for an empty batch.

        Units:
            tokens.
        """
        return int(self.lengths.max()) if self.lengths.numel() else 0

    @property
    def num_pairs(self) -> int:
        """The number of pairs of tokens in the same document, each with itself included, in both orders.

        A causal attention to documents needs the scores of half of them.
        """
        if not self.are_packed:
            return self.rows * self.row_length**2
        return int(self.lengths.square().sum())

    @functools.cached_property
    def packed_rows(self) -> tuple[bool, ...]:
        """For each row whether it has several documents."""
        if self.positions_BT is None:
            return (False,) * self.rows
        return tuple((self.starts_BT.sum(dim=1) > 1).tolist())

    @property
    def are_packed(self) -> bool:
        """True if at least one row has several documents."""
        return any(self.packed_rows)

    @property
    def are_padded(self) -> bool | None:
        """True if a mask hides at least one token, False if none is hidden, None if that is not known."""
        return None if self.padded_rows is None else any(self.padded_rows)


@functools.cache
def measured_families() -> dict[str, tuple[str, ...]]:
    """Returns the measured model families of transformers in two groups, "apart" and "mixed".

    Returns:
        Under "apart", the families whose attention does not cross document boundaries; under "mixed", those whose
        attention does.
    """
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {"apart": tuple(table["apart"]), "mixed": tuple(table["mixed"])}


def why_mixed(model: nn.Module) -> str | None:
    """Returns the reason why a model's attention may cross document boundaries, or None if it does not.

    A model of transformers is judged by its family. Any other model is judged by whether its forward takes
    `position_ids`. For a model with a recurrent layer, there is always a reason.
    """
    if not takes_argument(model, "position_ids"):
        return "its forward has no parameter position_ids"
    if (
        name := next((type(part).__name__ for part in model.modules() if isinstance(part, nn.RNNBase)), None)
    ) is not None:
        return f"its {name} carries its state from one document to the next"
    known = measured_families()
    for family, kind in families_of(model):
        if family in known["mixed"]:
            return f"{kind} ignores position_ids"
        if family not in known["apart"]:
            return f"it was not measured that {kind} does"
    return None


def families_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (family, class name) for each submodule that is a model of transformers."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            # The base classes count too: a subclass of the user is in another module.
            modules = (kind.__module__ for kind in type(part).__mro__)
            found = next((name for name in modules if name.startswith("transformers.models.")), None)
            if found is not None:
                yield found.split(".")[2], type(part).__name__


def takes_argument(model: nn.Module, name: str) -> bool:
    """Returns whether a model's forward has a parameter with the given name, or accepts any keyword argument.

    Args:
        model: the model whose forward is inspected.
        name: the name of the parameter.
    """
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def any_packed(positions: Iterable[Any]) -> bool:
    """Returns whether the positions of at least one row restart, which means that the row has several documents.

    Args:
        positions: one sequence of positions for each row.

    Shapes:
        positions: each sequence (T,). Sequences of other shapes are ignored.
    """
    rows = (torch.as_tensor(row) for row in positions)
    return any(row.ndim == 1 and bool((row.diff() != 1).any()) for row in rows)


def builds_masks(model: nn.Module) -> bool:
    """Returns whether every submodule from transformers builds its attention mask from `position_ids`.

    Flash attention does not build masks: it reads document boundaries from positions only in batches with a single row.
    """
    configs = (getattr(part, "config", None) for part in model.modules() if isinstance(part, PreTrainedModel))
    return all(getattr(config, "_attn_implementation", None) in (None, *_MASKED) for config in configs)


def warn_mixed(model: nn.Module, reason: str) -> None:
    """Warns, once per model, that the attention of the model may cross document boundaries.

    Args:
        model: the model that the message names.
        reason: the reason, as returned by `why_mixed`.
    """
    if model not in _WARNED[MIXED]:
        _WARNED[MIXED].add(model)
        _log.warning(
            "[%s] the rows hold several documents, and %s does not keep them apart (%s): a token sees the documents "
            "before its own. Set document_boundaries: false in tokenize to confirm that this is intended, or train a "
            "model that keeps them apart",
            MIXED,
            type(model).__name__,
            reason,
        )


def warn_too_long(model: nn.Module, length: int, limit: int) -> None:
    """Warns, once per model, that a row has more tokens than the model has positions.

    Args:
        model: the model that the message names.
        length: the number of tokens in the row.
        limit: the number of positions of the model.
    """
    if model not in _WARNED[TOO_LONG]:
        _WARNED[TOO_LONG].add(model)
        _log.warning(
            "[%s] a row has %d tokens, and max_position_embeddings of %s is %d: a table of positions ends there, "
            "and pretrained weights may have met no rotary position beyond it. Make rows shorter (max_length of "
            "tokenize_examples, block_size of tokenize), or set max_position_embeddings of a model with new weights",
            TOO_LONG,
            length,
            type(model).__name__,
            limit,
        )
