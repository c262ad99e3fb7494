"""The number of processes that read rows, where the user gives none.

Takes a data set, its collator and the device; gives a number. Worker processes draw random numbers from seeds of their
own, so workers that nobody asked for are started only for rows and collators that are known to draw none: then a run
has the same numbers with and without them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers.data.data_collator import DataCollatorForSeq2Seq, DataCollatorWithPadding, default_data_collator

from forgather.ml.data.padding import CausalLMCollator, PaddingCollator

USUAL_WORKERS = 2
_DRAW_NOTHING = (CausalLMCollator, PaddingCollator, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def usual_workers(dataset: Any, collate: Any, device: torch.device) -> int:
    """Returns the number of worker processes of a training that gives none: 0 on the CPU, whose cores train.

    Args:
        dataset: the data set.
        collate: the collator.
        device: the device that trains.
    """
    is_known = _stores_rows(dataset) and (collate is default_data_collator or type(collate) in _DRAW_NOTHING)
    return USUAL_WORKERS if device.type != "cpu" and is_known else 0


def _stores_rows(dataset: Any) -> bool:
    # Looked up, and not imported: rows of these classes exist only if their modules are imported.
    library, ours = sys.modules.get("datasets"), sys.modules.get("forgather.ml.data.prepared_rows")
    if ours is not None and type(dataset) is ours.PreparedRows:
        return True
    # A transform of the user may draw random numbers.
    return library is not None and type(dataset) is library.Dataset and dataset.format["type"] != "custom"
