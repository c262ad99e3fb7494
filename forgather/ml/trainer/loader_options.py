"""The options of the `DataLoader`, and the number of processes that read rows where the user gives none.

Takes the training arguments, a data set, its collator and the device; gives options. Worker processes draw random
numbers from seeds of their own, so workers that nobody asked for are started only for rows and collators that are known
to draw none: then a run has the same numbers with and without them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import default_collate
from transformers.data.data_collator import DataCollatorForSeq2Seq, DataCollatorWithPadding, default_data_collator

from forgather.interrupt import leave_to_parent
from forgather.ml.data.padding import CausalLMCollator, PaddingCollator
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.collation import KnownColumns, is_default_collate
from forgather.ml.types import Topology

USUAL_WORKERS = 2
_DRAW_NOTHING = (CausalLMCollator, PaddingCollator, DataCollatorForSeq2Seq, DataCollatorWithPadding)


def loader_options(args: TrainingArguments, topology: Topology, usual: int = 0) -> dict[str, Any]:
    """Returns the `DataLoader` options, and those of `RankBatches`, that training and evaluation have in common.

    Args:
        args: the training arguments, whose `dataloader_*` settings are read.
        topology: the topology of this process. Batches are copied to page-locked memory only if its device is CUDA.
        usual: the number of worker processes if the arguments give none.
    """
    workers = usual if args.dataloader_num_workers is None else args.dataloader_num_workers
    options: dict[str, Any] = {
        "retries": args.data_retries,
        "bad_rows": args.bad_rows,
        "dispatch_rows": args.dispatch_rows,
        # Launchers give consecutive ranks to the processes of a machine.
        "host": topology.rank - topology.local_rank,
        "num_workers": workers,
        "pin_memory": args.dataloader_pin_memory and topology.device.type == "cuda",
    }
    if workers:
        # Workers that nobody asked for must not cost a start in each epoch.
        options["persistent_workers"] = args.dataloader_persistent_workers or args.dataloader_num_workers is None
        options["prefetch_factor"] = args.dataloader_prefetch_factor
        options["worker_init_fn"] = _leave_interrupts_to_the_parent
    return options


def _leave_interrupts_to_the_parent(worker: int) -> None:
    # Ctrl-C reaches the whole process group: a worker that stopped by itself would look like a crash.
    leave_to_parent()


def usual_workers(dataset: Any, collate: Any, device: torch.device) -> int:
    """Returns the number of worker processes of a training that gives none: 0 on the CPU, whose cores train.

    Args:
        dataset: the data set.
        collate: the collator.
        device: the device that trains.
    """
    is_known = _stores_rows(dataset) and _draws_nothing(collate)
    return USUAL_WORKERS if device.type != "cpu" and is_known else 0


def reading_draws_nothing(dataset: Any, collate: Any) -> bool:
    """Returns whether reading a batch is known to draw no random number.

    Args:
        dataset: the data set.
        collate: the collator.
    """
    return (_stores_rows(dataset) or type(dataset) in (list, tuple)) and _draws_nothing(collate)


def _draws_nothing(collate: Any) -> bool:
    # It only leaves out columns that the model does not take.
    collate = collate.collate if type(collate) is KnownColumns else collate
    is_known = collate in (default_data_collator, default_collate) or type(collate) in _DRAW_NOTHING
    return is_known or is_default_collate(collate)


def _stores_rows(dataset: Any) -> bool:
    # Looked up, and not imported: rows of these classes exist only if their modules are imported.
    library, ours = sys.modules.get("datasets"), sys.modules.get("forgather.ml.data.prepared_rows")
    if ours is not None and type(dataset) is ours.PreparedRows:
        return True
    # A transform of the user may draw random numbers.
    return library is not None and type(dataset) is library.Dataset and dataset.format["type"] != "custom"
