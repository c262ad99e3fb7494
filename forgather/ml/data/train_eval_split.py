"""Random split of a data set into a training part and an evaluation part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict

from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.row_stream import RowStream, refuse_stream
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)


def split(
    dataset: Dataset | DatasetDict | Mapping[str, Any], eval_fraction: float = 0.05, seed: int = 42
) -> DatasetDict | Mapping[str, Any]:
    """Returns a random split of a data set into a training part and an evaluation part without common rows.

    Args:
        dataset: the data set to split. One that is divided into "train" and "eval" already is returned itself. If rows
            are repeated, as `mix` may do, all copies of a row are in one part, and the evaluation part has one of each.
            Copies are known as long as no other function, such as `map`, has made new rows of them.
        eval_fraction: the fraction of the rows for evaluation, between 0 and 1. Each part gets at least one row.
        seed: the seed of the random split. Equal seeds give equal parts.

    Returns:
        A `DatasetDict` with the splits "train" and "eval".

    Raises:
        DataError: FG835 if the fraction is not between 0 and 1, or if there are fewer than two rows; FG982 if the rows
            are streamed, and none for evaluation are given.
    """
    refuse_wrong_values("data:split", locals())
    refuse_stream(dataset, "split")
    if isinstance(dataset, Mapping) and isinstance(dataset.get("train"), RowStream):
        return dataset
    if isinstance(dataset, DatasetDict) and {"train", "eval"} <= dataset.keys():
        logger.info("the evaluation set is given: eval_fraction is not used (%s)", _sizes(dataset))
        return dataset
    if isinstance(dataset, Mapping):
        raise DataError(
            f"the data set is divided into {', '.join(dataset)}, and not into train and eval",
            code="FG835",
            hint="give split one of its parts, as !call:getitem [*raw_dataset, train]",
        )
    if len(dataset) < 2:
        raise _too_few(len(dataset))
    places = repeated_places(dataset)
    if places is not None:
        return _split_repeated(dataset, places, eval_fraction, seed)
    num_eval = _num_eval(len(dataset), eval_fraction)
    parts = dataset.train_test_split(test_size=num_eval, seed=seed)
    return _reported(DatasetDict({"train": parts["train"], "eval": parts["test"]}))


def repeated_places(dataset: Dataset) -> np.ndarray | None:
    """Returns the place in the table of each row, or None if no row of the table is repeated."""
    indices = getattr(dataset, "_indices", None)
    places = None if indices is None else np.asarray(indices.column(0))
    return places if places is not None and len(np.unique(places)) < len(places) else None


def _num_eval(num_rows: int, eval_fraction: float) -> int:
    # Rounding could leave one part of a small data set empty.
    return min(max(round(num_rows * eval_fraction), 1), num_rows - 1)


def _split_repeated(dataset: Dataset, places: np.ndarray, eval_fraction: float, seed: int) -> DatasetDict:
    """Splits by distinct rows: a copy in the training part would show the model what it is evaluated on.

    Shapes:
        places: (B,), the place in the table of each row.
    """
    distinct, firsts = np.unique(places, return_index=True)
    if len(distinct) < 2:
        raise _too_few(1)
    chosen = np.random.Generator(np.random.PCG64(seed)).permutation(len(distinct))
    chosen = chosen[: _num_eval(len(distinct), eval_fraction)]
    is_train_B = ~np.isin(places, distinct[chosen])
    parts = {"train": np.flatnonzero(is_train_B), "eval": np.sort(firsts[chosen])}
    return _reported(DatasetDict({name: dataset.select(rows) for name, rows in parts.items()}))


def _reported(parts: DatasetDict) -> DatasetDict:
    logger.info("split: %s", _sizes(parts))
    return parts


def _sizes(parts: DatasetDict) -> str:
    return f"{plural(len(parts['train']), 'row')} for training, {len(parts['eval']):,} for evaluation"


def _too_few(num_rows: int) -> DataError:
    return DataError(
        f"a data set of {num_rows} row cannot be split into two",
        code="FG835",
        hint="more rows (text_files with sample_by: paragraph), or no eval set",
    )
