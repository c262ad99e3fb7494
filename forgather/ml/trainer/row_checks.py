"""Refuses training data that a run cannot begin with: split among processes already, or with too few rows.

Takes a data set, or what is known of it, and the share of this rank; gives errors that every process raises.
"""

from __future__ import annotations

from typing import Any

from forgather.errors import TrainingError
from forgather.ml.number_format import plural
from forgather.ml.trainer.batch_sampler import RankShare


def refuse_split(dataset: Any) -> None:
    """Raises FG853 if a data set of `datasets` is already split among processes.

    Args:
        dataset: the data set.
    """
    # `datasets` marks the result of `split_dataset_by_node`: each process would drop rows of its part again.
    split = getattr(dataset, "_distributed", None)
    if split is not None:
        raise TrainingError(
            f"the data set is already split: this is part {split.rank} of {split.world_size}",
            code="FG853",
            hint="give every process the whole data set (without split_dataset_by_node): each takes its own rows",
        )


def check_size(rows: int, share: RankShare) -> None:
    """Raises an error if a data set has no rows, or fewer rows than one global micro-batch.

    Args:
        rows: the number of rows of the data set.
        share: the rank's share, from which the rows per rank and the number of data-parallel ranks are read.

    Raises:
        TrainingError: FG803 if there are no rows; FG804 if there are fewer rows than one global micro-batch.
    """
    if rows == 0:
        raise TrainingError(
            "the training data has no rows", code="FG803", hint="check how the data is filtered and split"
        )
    if rows < share.all_rows:
        replicas = f" on each of {share.size} replicas" if share.size > 1 else ""
        possible = rows // share.size
        raise TrainingError(
            f"per_device_train_batch_size is {share.rows}{replicas}, and the training data has {plural(rows, 'row')}",
            code="FG804",
            hint=f"set per_device_train_batch_size to {possible} or less" if possible else "start fewer processes",
        )
