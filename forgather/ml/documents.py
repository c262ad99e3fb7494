"""Where documents begin in the rows of a batch, and which models keep them apart.

Takes positions on the host, and models; gives `Documents`, and why a model mixes the documents of a row. Keeps
true: nothing here waits for a device, and what nobody asks for is not computed; a family of models counts as keeping
documents apart only where that was measured (`packing_models.json`).

Letters of shapes: B rows, T positions, D documents.
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
"""The code of the warning that a model mixes the documents of packed rows."""
TOO_LONG = "FG864"
"""The code of the warning that rows have more tokens than their model has positions."""
_TABLE = Path(__file__).parent / "packing_models.json"
_MASKED = frozenset({"eager", "sdpa", "flex_attention"})
_TOLD: dict[str, WeakSet[nn.Module]] = {MIXED: WeakSet(), TOO_LONG: WeakSet()}


class Documents:
    """The documents in the rows of a batch; a row without positions, or with a mask, is one document.

    Args:
        positions_BT: the position of each token in its document, on the host; they grow by one within a document.
        shape: rows and positions of the batch.
    """

    def __init__(self, positions_BT: Tensor | None, shape: tuple[int, int]) -> None:
        self.positions_BT = positions_BT
        self.rows, self.row_length = shape

    def __getitem__(self, rows: slice) -> Documents:
        """The documents of some of the rows."""
        number = len(range(*rows.indices(self.rows)))
        positions_BT = self.positions_BT
        # One row of positions may stand for all rows.
        if positions_BT is not None and positions_BT.shape[0] == self.rows:
            positions_BT = positions_BT[rows]
        return Documents(positions_BT, (number, self.row_length))

    @functools.cached_property
    def starts_BT(self) -> Tensor:
        """True where a document starts; the first token of a row always starts one."""
        if self.positions_BT is None:
            starts_BT = torch.zeros(self.rows, self.row_length, dtype=torch.bool)
            starts_BT[:, :1] = True
            return starts_BT
        return F.pad(self.positions_BT.diff(dim=1) != 1, (1, 0), value=True).expand(self.rows, -1)

    @functools.cached_property
    def lengths(self) -> Tensor:
        """Tokens of each document (D), row by row; padding counts."""
        starts = self.starts_BT.flatten().nonzero().flatten()
        return torch.diff(starts, append=starts.new_tensor([self.rows * self.row_length]))

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.lengths.max()) if self.lengths.numel() else 0

    @functools.cached_property
    def are_packed(self) -> bool:
        """True where a row holds several documents."""
        return self.positions_BT is not None and int(self.starts_BT.sum()) > self.rows


@functools.cache
def measured_families() -> dict[str, tuple[str, ...]]:
    """Returns the families of transformers whose models keep documents apart, and those that mix them."""
    table = json.loads(_TABLE.read_text(encoding="utf-8"))
    return {"apart": tuple(table["apart"]), "mixed": tuple(table["mixed"])}


def why_mixed(model: nn.Module) -> str | None:
    """Returns why the documents of a packed row are not kept apart by `model`; None where they are.

    A model of transformers is judged by its family, another one by whether it takes `position_ids`.
    """
    if not takes(model, "position_ids"):
        return "its forward has no parameter position_ids"
    if (
        name := next((type(part).__name__ for part in model.modules() if isinstance(part, nn.RNNBase)), None)
    ) is not None:
        return f"its {name} carries a state over their borders"
    known = measured_families()
    for family, kind in _families(model):
        if family in known["mixed"]:
            return f"{kind} takes no notice of position_ids for them"
        if family not in known["apart"]:
            return f"nobody has measured that {kind} does"
    return None


def _families(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields the families of transformers that parts of a model belong to, with the names of their classes."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            modules = (kind.__module__ for kind in type(part).__mro__)
            found = next((name for name in modules if name.startswith("transformers.models.")), None)
            if found is not None:
                yield found.split(".")[2], type(part).__name__


def takes(model: nn.Module, name: str) -> bool:
    """Tells whether the forward of a model names a parameter, or takes everything by `**`."""
    parameters = inspect.signature(model.forward).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def any_packed(positions: Iterable[Any]) -> bool:
    """Tells whether the positions of a row restart: it holds several documents."""
    rows = (torch.as_tensor(row) for row in positions)
    return any(row.ndim == 1 and bool((row.diff() != 1).any()) for row in rows)


def builds_masks(model: nn.Module) -> bool:
    """Tells whether the attention of every part of transformers makes masks for rows of several documents.

    Flash attention reads documents from positions in batches of a single row, and not at all in larger ones.
    """
    configs = (getattr(part, "config", None) for part in model.modules() if isinstance(part, PreTrainedModel))
    return all(getattr(config, "_attn_implementation", None) in (None, *_MASKED) for config in configs)


def tell_mixed(model: nn.Module, reason: str) -> None:
    """Warns, once for a model, that its documents are mixed."""
    if model not in _TOLD[MIXED]:
        _TOLD[MIXED].add(model)
        _log.warning(
            "[%s] the rows hold several documents, and %s does not keep them apart (%s): a token sees the documents "
            "before its own. Set document_boundaries: false in tokenize to say that this is meant, or train a model "
            "that keeps them apart",
            MIXED,
            type(model).__name__,
            reason,
        )


def tell_too_long(model: nn.Module, length: int, limit: int) -> None:
    """Warns, once for a model, of rows with more tokens than it has positions."""
    if model not in _TOLD[TOO_LONG]:
        _TOLD[TOO_LONG].add(model)
        _log.warning(
            "[%s] a row has %d tokens, and max_position_embeddings of %s is %d: a table of positions ends there, "
            "and pretrained weights may have met no rotary position beyond it. Make rows shorter (max_length of "
            "tokenize_examples, block_size of tokenize), or set max_position_embeddings of a model with new weights",
            TOO_LONG,
            length,
            type(model).__name__,
            limit,
        )
