"""Splits a data set into a part to train on and a part to evaluate on."""

from __future__ import annotations

from datasets import Dataset, DatasetDict

from forgather.ml.data.data_errors import DataError


def split(dataset: Dataset, eval_fraction: float = 0.05, seed: int = 42) -> DatasetDict:
    """Splits rows at random; no row lands in both parts.

    Args:
        dataset: the rows.
        eval_fraction: share of the rows to evaluate on, above 0 and below 1; each part gets at least one row.
        seed: the same seed gives the same parts.

    Returns:
        A `DatasetDict` with "train" and "eval".

    Raises:
        DataError: if the fraction is out of range or there are fewer than two rows.
    """
    if not 0 < eval_fraction < 1:
        raise DataError(
            f"eval_fraction must lie between 0 and 1; got {eval_fraction!r}", code="FG835", hint="as in 0.05"
        )
    if len(dataset) < 2:
        raise DataError(
            f"a data set of {len(dataset)} row cannot be split into two",
            code="FG835",
            hint="more rows (text_files with sample_by: paragraph), or no eval set",
        )
    num_eval = min(max(round(len(dataset) * eval_fraction), 1), len(dataset) - 1)
    parts = dataset.train_test_split(test_size=num_eval, seed=seed)
    return DatasetDict({"train": parts["train"], "eval": parts["test"]})
