"""Mixtures of data sets: several data sets joined into one, with shares by weight and at most some rows of each.

Takes data sets with equal columns; gives one data set in a random order that a seed decides. The same data sets and
settings give the same rows, order and fingerprint. How many rows each data set gives is logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from datasets import Dataset, DatasetDict, concatenate_datasets

from forgather.errors import nearest
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import content_key
from forgather.ml.data.data_errors import DataError
from forgather.ml.data.row_stream import refuse_stream
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural

logger = get_logger(__name__)

_FORMAT = 1  # raised when the same settings give other rows
STOPPING = ("first_exhausted", "all_exhausted")


def mix(
    datasets: Mapping[str, Dataset | DatasetDict],
    *,
    weights: Mapping[str, float] | None = None,
    max_samples: int | Mapping[str, int] | None = None,
    stopping_strategy: str = "first_exhausted",
    seed: int = 42,
) -> Dataset | DatasetDict:
    """Returns the rows of several data sets as one data set, in a random order.

    Args:
        datasets: the data sets, by a name that the other arguments and the log use. If some of them are divided into
            "train" and "eval", the training parts are mixed, the evaluation parts are joined, and so is the result.
        weights: the share of each data set in the mixture, relative to the sum of all; None to take all rows of each.
        max_samples: the largest number of rows of each data set, or of those that it names; these are chosen at random.
        stopping_strategy: with weights, "first_exhausted" takes no row twice, so that the mixture ends with the data
            set that has too few rows for its weight; "all_exhausted" takes each row at least once, and repeats rows of
            the other data sets, evenly.
        seed: the seed of the order and of the choice of rows.

    Raises:
        DataError: FG945 if a name is unknown, a weight or a number is not usable, or the data sets differ in their
            columns; FG982 if one of them is streamed.

    Example:
        >>> long, short = (Dataset.from_dict({"text": [name] * size}) for name, size in (("long", 9), ("short", 2)))
        >>> mixed = mix({"long": long, "short": short}, weights={"long": 0.75, "short": 0.25})
        >>> sorted(mixed["text"])
        ['long', 'long', 'long', 'long', 'long', 'long', 'short', 'short']
    """
    refuse_wrong_values("data:mix", locals())
    if stopping_strategy not in STOPPING:
        hint = nearest(str(stopping_strategy), STOPPING) or f"one of {', '.join(STOPPING)}"
        raise _refused(f"stopping_strategy is {stopping_strategy!r}", hint, "stopping_strategy")
    train = _train_parts(datasets)
    _check_rows(train)
    held = {f"eval of {name}": rows["eval"] for name, rows in datasets.items() if "eval" in _parts(rows)}
    _check_columns(held)
    shares = _shares(train, weights)
    limits = _limits(train, max_samples)
    sizes = {name: min(len(rows), limits.get(name, len(rows))) for name, rows in train.items()}
    counts = sizes if shares is None else _counts(sizes, shares, stopping_strategy)
    mixed = _joined(train, sizes, counts, seed)
    every = sum(counts.values())
    listed = (
        f"{counts[name]:,} of {plural(len(train[name]), 'row')} of {name} ({counts[name] / every:.1%})"
        for name in train
    )
    # A warning, as other facts that the beginning of a run shows.
    logger.warning("mixture of %s: %s", plural(every, "row"), ", ".join(listed))
    return DatasetDict({"train": mixed, "eval": concatenate_datasets(list(held.values()))}) if held else mixed


def _joined(train: Mapping[str, Dataset], sizes: Mapping[str, int], counts: Mapping[str, int], seed: int) -> Dataset:
    # A generator of its own: the mixture must not depend on, or change, the global random state.
    draw = np.random.Generator(np.random.PCG64(seed))
    first, chosen = 0, []
    for name, rows in train.items():
        kept = np.sort(draw.permutation(len(rows))[: sizes[name]])
        # Whole rounds, and some rows of a last one: no row is repeated twice more often than another one.
        rounds, rest = divmod(counts[name], sizes[name])
        chosen += [first + np.tile(kept, rounds), first + draw.permutation(kept)[:rest]]
        first += len(rows)
    order = draw.permutation(np.concatenate(chosen))
    mixed = concatenate_datasets(list(train.values())).select(order)
    of_each = {name: [rows._fingerprint, sizes[name], counts[name]] for name, rows in train.items()}
    key = content_key(format=_FORMAT, of_each=list(of_each.items()), seed=seed)
    return Dataset(mixed.data, info=mixed.info, indices_table=mixed._indices, fingerprint=key)


def _parts(rows: Dataset | DatasetDict) -> Mapping[str, Dataset]:
    return rows if isinstance(rows, DatasetDict) else {"train": rows}


def _train_parts(datasets: Any) -> dict[str, Dataset]:
    if not isinstance(datasets, Mapping):
        found = f"datasets is a {type(datasets).__name__}"
        raise _refused(found, "a mapping of names to data sets, as {news: *news}", "datasets")
    for name, rows in datasets.items():
        refuse_stream(rows["train"] if isinstance(rows, dict) and "train" in rows else rows, "mix")
        if not isinstance(rows, Dataset | DatasetDict):
            hint = "read it first, as in !call:forgather.ml.data:chats [general.jsonl]"
            raise _refused(f"{name} is a {type(rows).__name__}, which is no data set of rows", hint, "datasets")
        if "train" not in _parts(rows):
            found = f"{name} is divided into {', '.join(rows) or 'no parts'}, and has no part train"
            raise _refused(found, "give one of its parts, as !call:getitem [*rows, test]", "datasets")
    return {name: _parts(rows)["train"] for name, rows in datasets.items()}


def _check_rows(train: Mapping[str, Dataset]) -> None:
    if not train:
        raise _refused("there are no data sets", "name at least one", "datasets")
    _check_columns(train)
    if empty := [name for name, rows in train.items() if not len(rows)]:
        raise _refused(f"{empty[0]} has no rows", "leave it out", "datasets")


def _check_columns(parts: Mapping[str, Dataset]) -> None:
    if not parts:
        return
    (first, rows), *others = parts.items()
    for name, other in others:
        if other.features != rows.features:
            told = [f"{one} has {', '.join(sorted(part.column_names))}" for one, part in ((first, rows), (name, other))]
            hint = "read them with the same function, such as forgather.ml.data:chats"
            raise _refused(f"the data sets differ in their columns: {'; '.join(told)}", hint, "datasets")


def _shares(train: Mapping[str, Dataset], weights: Mapping[str, float] | None) -> dict[str, float] | None:
    if weights is None:
        return None
    _check_names(train, weights, "weights")
    if missing := [name for name in train if name not in weights]:
        raise _refused(f"{missing[0]} has no weight", "give each data set a weight", "weights")
    total = math.fsum(weights.values())
    return {name: weights[name] / total for name in train}


def _limits(train: Mapping[str, Dataset], max_samples: int | Mapping[str, int] | None) -> Mapping[str, int]:
    if max_samples is None:
        return {}
    limits = dict(max_samples) if isinstance(max_samples, Mapping) else dict.fromkeys(train, max_samples)
    _check_names(train, limits, "max_samples")
    return limits


def _check_names(train: Mapping[str, Dataset], given: Mapping[str, Any], argument: str) -> None:
    for name in given:
        if name not in train:
            hint = nearest(str(name), list(train)) or f"there are {', '.join(train)}"
            raise _refused(f"{argument} names {name!r}, which is no data set of the mixture", hint, argument)


def _counts(sizes: Mapping[str, int], shares: Mapping[str, float], stopping_strategy: str) -> dict[str, int]:
    """Returns the number of rows of each data set, for the largest or the smallest total that the strategy allows."""
    totals = [sizes[name] / share for name, share in shares.items()]
    if stopping_strategy == "first_exhausted":
        total = min(totals)
        counts = {name: min(round(total * share), sizes[name]) for name, share in shares.items()}
    else:
        total = max(totals)
        counts = {name: max(round(total * share), sizes[name]) for name, share in shares.items()}
    if none := [name for name, count in counts.items() if not count]:
        hint = "raise its weight, set stopping_strategy: all_exhausted, or leave it out"
        raise _refused(f"no row of {none[0]} is left by its weight", hint, "weights")
    return counts


def _refused(what: str, hint: str, argument: str) -> DataError:
    return DataError(f"the data sets cannot be mixed: {what}", code="FG945", hint=hint).about(argument)
