"""Whether training rows are read by virtual streams, and by how many of them."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from torch.utils.data import IterableDataset

from forgather.errors import TrainingError
from forgather.ml.data.row_stream import stream_of
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.ml.trainer.arguments import TrainingArguments
from forgather.ml.trainer.bad_rows import STOP

_log = get_logger(__name__)


def warn_of_whole_reads(dataset: Any, replicas: int) -> None:
    """Warns that every process reads all rows of a data set.

    Args:
        dataset: the data set, which is not read by virtual streams.
        replicas: the number of data-parallel ranks.
    """
    has_shards = stream_of(dataset) is not None
    _log.warning(
        "each of %s reads all training rows, and uses one of %d: %s",
        plural(replicas, "replica"),
        replicas,
        "the run was started with data_streams: 0. In a new run without it, each replica or machine reads its own rows"
        if has_shards
        else f"{type(dataset).__name__} has no shards. Where this is slow, give a datasets.IterableDataset, which each "
        "machine reads once, or shards (forgather.ml.data.shards:ShardedRows, 'fgcli data prepare'), of which each "
        "replica reads its own",
    )


def is_iterable(dataset: Any) -> bool:
    """Returns whether a data set is iterable only: rows cannot be read by number."""
    # The `IterableDataset` of `datasets` is another class; it has no length, so the last line finds it.
    if isinstance(dataset, IterableDataset):
        return True
    return not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__"))


def chosen_streams(dataset: Any, args: TrainingArguments, replicas: int) -> int:
    """Returns the number of virtual streams by which a new run reads a data set; 0 if every process reads all rows.

    Args:
        dataset: the data set.
        args: the training arguments, whose `data_streams` is taken, if it is given, and `bad_rows` needs streams.
        replicas: the number of data-parallel ranks.

    Raises:
        TrainingError: FG909 if the data set has no shards and virtual streams are asked for; FG919 if there are more
            streams than shards; FG976 if bad rows are to be left out of rows that are not read by virtual streams.
    """
    data_streams = args.data_streams
    stream = stream_of(dataset) if is_iterable(dataset) and data_streams != 0 else None
    if stream is None and args.bad_rows != STOP:
        raise TrainingError(
            f"bad_rows is {args.bad_rows!r}, and the training rows are not read by virtual streams",
            code="FG976",
            hint="give streamed rows with shards (streaming: true), without data_streams: 0, or set bad_rows: stop",
        ).about("args.bad_rows")
    if stream is None:
        if not data_streams or not is_iterable(dataset):
            return 0
        raise TrainingError(
            f"data_streams is {data_streams}, and the rows of {type(dataset).__name__} can only be read as a whole",
            code="FG909",
            hint="give a data set with shards (forgather.ml.data.shards:ShardedRows), or set data_streams: 0",
        ).about("args.data_streams")
    if data_streams is None:
        return 1 if args.train_sampling_strategy == "sequential" else stream.usual_streams(replicas)
    most = stream.most_streams
    if most is not None and data_streams > most:
        raise TrainingError(
            f"data_streams is {data_streams}, and the data has {plural(most, 'shard')}",
            code="FG919",
            hint=f"set data_streams to {most} or less, or write more shards, as 'fgcli data prepare' does",
        ).about("args.data_streams")
    return data_streams
