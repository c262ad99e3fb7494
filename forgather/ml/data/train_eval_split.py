"""Random split of a data set into a training part and an evaluation part."""

from __future__ import annotations

from datasets import Dataset, DatasetDict

from forgather.ml.data.data_errors import DataError


def split(dataset: Dataset, eval_fraction: float = 0.05, seed: int = 42) -> DatasetDict:
    """Returns a random split of a data set into a training part and an evaluation part without common rows.

    Args:
        dataset: the data set to split.
        eval_fraction: the fraction of the rows for evaluation, between 0 and 1. Each part gets at least one row.
        seed: the seed of the random split. Equal seeds give equal parts.

    Returns:
        A `DatasetDict` with the splits "train" and "eval".

    Raises:
        DataError: FG835 if the fraction is not between 0 and 1, or if there are fewer than two rows.
    """
    if not 0 < eval_fraction < 1:
        raise DataError(
            f"eval_fraction must be between 0 and 1; got {eval_fraction!r}", code="FG835", hint="as in 0.05"
        )
    if len(dataset) < 2:
        raise DataError(
            f"a data set of {len(dataset)} row cannot be split into two",
            code="FG835",
            hint="more rows (text_files with sample_by: paragraph), or no eval set",
        )
    # Rounding could leave one part of a small data set empty.
    num_eval = min(max(round(len(dataset) * eval_fraction), 1), len(dataset) - 1)
    parts = dataset.train_test_split(test_size=num_eval, seed=seed)
    return DatasetDict({"train": parts["train"], "eval": parts["test"]})
