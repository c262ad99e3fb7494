"""Prepares tokens: tokenizes texts in parallel processes, and writes them as memory-mapped shards with a manifest.

Takes rows of text and a tokenizer; gives a folder. Each shard is the documents of a range of rows, which does not
depend on the number of processes. Shards are written into a draft beside the folder: a run that is killed keeps those
that are finished, and the same call goes on with the others. The folder appears in one step, with all of them.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

from forgather.errors import first_line
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.data_errors import DataError, DataFileError, refuse_no_text
from forgather.ml.data.packing import check_inputs, encode_texts
from forgather.ml.data.prepared_manifest import FILE, Manifest, Shard, draft_of, file_digest, read_manifest
from forgather.ml.data.prepared_rows import COLUMN
from forgather.ml.data.progress_bar import show_progress
from forgather.ml.data.tokenizer import tokenizer_digest
from forgather.ml.log import get_logger
from forgather.ml.number_format import plural
from forgather.replaced_file import replace_file

logger = get_logger(__name__)

_PLAN, _LOCK = "plan.json", "lock"
_BATCH_ROWS = 256
_SAMPLED_ROWS = 256
_TOKENS_PER_SHARD = 2**25  # 64 MiB of 16-bit ids: what one process holds while it writes
_FEWEST_SHARDS = 64  # so that processes, ranks and streams all have some, of data that is not tiny
_ROWS_PER_SHARD = 4
_SPARE = 1.1  # of the estimated size


@dataclass(frozen=True, slots=True)
class Prepared:
    """What `prepare_tokens` did.

    Args:
        manifest: the manifest of the folder.
        written: the number of shards that were written now; the others were there.
        tokens: the number of tokens of these.
        seconds: the time for these.
    """

    manifest: Manifest
    written: int
    tokens: int
    seconds: float


def prepare_tokens(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike[str],
    *,
    text_column: str = "text",
    num_proc: int = 1,
    num_shards: int | None = None,
) -> Prepared:
    """Writes the tokens of all texts, each with the end-of-text token after it, into a folder of shards.

    Args:
        dataset: the rows of text.
        tokenizer: a tokenizer with an end-of-text token.
        folder: the folder to write.
        text_column: the name of the column with the text.
        num_proc: the number of processes that tokenize and write.
        num_shards: the number of shards; None for 32 million tokens each, and 64 shards if there are rows for them.

    Raises:
        DataError: FG831 or FG837 from `check_inputs`, FG832 if there are no rows; FG833 if the column holds no text, or
            a text that the tokenizer cannot encode; FG784 if it gives an id that its vocabulary cannot have.
        DataFileError: FG786 if the disk has no room for the tokens; FG787 if the folder holds other data, or another
            process prepares it; FG747 if it cannot be written; FG589 if a process ended before its shard was written.
    """
    refuse_wrong_values("data:prepare_tokens", locals())
    check_inputs(dataset, tokenizer, {"text_column": text_column})
    refuse_no_text(dataset, text_column)
    if not len(dataset):
        raise DataError("there are no rows to prepare", code="FG832", hint="a data set needs at least one row")
    # Of a link to a folder that is still to be made, the folder is made.
    place = Path(os.path.realpath(Path(folder).expanduser()))
    largest = len(tokenizer)
    # A vocabulary may have gaps, so that ids are larger than its size.
    top = max(largest - 1, tokenizer.eos_token_id, *tokenizer.get_vocab().values())
    wanted = Manifest(
        source=dataset._fingerprint,
        text_column=text_column,
        tokenizer=tokenizer_digest(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        vocab_size=largest,
        dtype="uint16" if top < 2**16 else "int32",
    )
    if place.exists() and not place.is_dir():
        raise _refused(f"{str(place)!r} is a file", "FG747", "name a folder")
    if _has_content(place):
        return _there(place, wanted)
    try:
        return _prepared_in(place, dataset.select_columns([text_column]), tokenizer, wanted, (num_proc, num_shards))
    except OSError as error:
        # A failed read of the texts, or of a full, read-only or foreign disk: the words are the system's.
        if isinstance(error, DataFileError):
            raise
        raise _refused(
            f"{str(place)!r} cannot be prepared: {error}",
            "FG747",
            "make room, or name a folder that can be written; finished shards are kept",
        ) from error


def _prepared_in(
    place: Path,
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    wanted: Manifest,
    counts: tuple[int, int | None],
) -> Prepared:
    """Writes the shards of a folder into its draft, and renames it; `counts` are of processes and of shards."""
    draft = draft_of(place)
    draft.mkdir(parents=True, exist_ok=True)
    lock = FileLock(draft / _LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise _refused(f"another process is preparing {str(place)!r}", "FG787", "wait until it has ended") from error
    try:
        if _has_content(place):
            # Another process made the folder before this one had the lock.
            shutil.rmtree(draft)
            return _there(place, wanted)
        prepared = _write_missing(_Job(dataset, tokenizer, draft, wanted), *counts)
        (draft / _LOCK).unlink()
        os.rename(draft, place)
        _sync(place.parent)
    finally:
        lock.release()
    return prepared


def _has_content(place: Path) -> bool:
    return place.is_dir() and any(place.iterdir())


def _there(place: Path, wanted: Manifest) -> Prepared:
    found = read_manifest(place)
    _refuse_other(place, found, wanted)
    return Prepared(found, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class _Job:
    """What each process needs to write a shard."""

    dataset: Dataset
    tokenizer: PreTrainedTokenizerBase
    draft: Path
    wanted: Manifest

    def rows(self, number: int, of: int) -> range:
        """Returns the rows of a shard."""
        rows = len(self.dataset)
        return range(number * rows // of, (number + 1) * rows // of)

    def sampled_tokens(self) -> int:
        """Returns the number of tokens that all rows have if they are as those of a sample."""
        rows = len(self.dataset)
        sample = [number * rows // _SAMPLED_ROWS for number in range(_SAMPLED_ROWS)] if rows > _SAMPLED_ROWS else None
        part = self.dataset.select(sample) if sample else self.dataset
        encoded = self.encoded(part[:], sample or range(rows))
        return math.ceil(sum(len(ids) + 1 for ids in encoded) / len(encoded) * rows)

    def encoded(self, batch: dict[str, list[Any]], rows: Sequence[int]) -> list[list[int]]:
        """Returns the token ids of each text of a batch.

        Args:
            batch: the values of the rows, by column.
            rows: the numbers of the rows, for messages.
        """
        try:
            ids: list[list[int]] = encode_texts(self.tokenizer, self.wanted.text_column, batch)["input_ids"]
        except Exception as whole:
            # One by one, to name the row: anything may be a tokenizer, and each has errors of its own.
            for row, text in zip(rows, batch[self.wanted.text_column], strict=False):
                try:
                    encode_texts(self.tokenizer, self.wanted.text_column, {self.wanted.text_column: [text]})
                except DataError as error:
                    error.message = f"row {row}: {error.message}"
                    raise error from None
                except Exception as error:  # noqa: BLE001 - anything may be a tokenizer of a user
                    raise DataError(
                        f"row {row}: the tokenizer cannot encode the text: {type(error).__name__}: {first_line(error)}",
                        code="FG833",
                        hint="correct or remove the row; finished shards are kept",
                    ).about("text_column") from whole
            raise
        limit = np.iinfo(self.wanted.dtype).max
        for row, one in zip(rows, ids, strict=False):
            if one and not 0 <= min(one) <= max(one) <= limit:
                wrong = next(number for number in one if not 0 <= number <= limit)
                raise DataError(
                    f"row {row}: the tokenizer gives the id {wrong}, and its vocabulary has "
                    f"{plural(self.wanted.vocab_size, 'token')}",
                    code="FG784",
                    hint="take a tokenizer whose ids are those of its vocabulary",
                ).about("tokenizer")
        return ids


def _write_missing(job: _Job, num_proc: int, num_shards: int | None) -> Prepared:
    tokens = job.sampled_tokens()
    count = _planned_shards(job, tokens, num_shards)
    records = [job.draft / f"shard-{number:05d}.json" for number in range(count)]
    missing = [number for number, record in enumerate(records) if not _is_finished(record)]
    if len(missing) < count:
        logger.warning("%d of %d shards are finished already", count - len(missing), count)
    _check_room(job, math.ceil(tokens * len(missing) / count))
    began = time.monotonic()
    done = (job.rows(number, count) for number in _written(job, missing, count, num_proc))
    rows = sum(len(job.rows(number, count)) for number in missing)
    for _ in show_progress(done, total=rows, what="tokenizing", logger=logger):
        pass
    seconds = time.monotonic() - began
    shards = [Shard(**json.loads(record.read_text(encoding="utf-8"))) for record in records]
    manifest = replace(job.wanted, shards=tuple(shards))
    replace_file(job.draft / FILE, manifest.text.encode())
    for extra in (*records, job.draft / _PLAN):
        extra.unlink()
    return Prepared(manifest, len(missing), sum(shards[number].tokens for number in missing), seconds)


def _planned_shards(job: _Job, tokens: int, asked: int | None) -> int:
    """Returns the number of shards: that of a draft that was begun, or one that suits the number of tokens."""
    rows = len(job.dataset)
    usual = max(math.ceil(tokens / _TOKENS_PER_SHARD), min(_FEWEST_SHARDS, rows // _ROWS_PER_SHARD), 1)
    count = min(asked or usual, rows)
    plan = job.draft / _PLAN
    if not plan.exists():
        replace_file(plan, json.dumps({**asdict(job.wanted), "num_shards": count}).encode())
        return count
    try:
        begun = json.loads(plan.read_text(encoding="utf-8"))
        number = int(begun.pop("num_shards"))
        before = Manifest(**begun)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        hint = f"remove {str(job.draft)!r}, and run the same command again"
        raise _refused(
            f"{str(plan)!r} is damaged, so it is not known which shards were begun", "FG787", hint
        ) from error
    _refuse_other(job.draft, before, job.wanted)
    if asked and count != number:
        hint = f"leave the number out, or remove {str(job.draft)!r}"
        raise _refused(f"{str(job.draft)!r} was begun with {number} shards, and {count} are asked for", "FG787", hint)
    return number


def _is_finished(record: Path) -> bool:
    if not record.exists():
        return False
    try:
        shard = Shard(**json.loads(record.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        # The record of a machine that lost power: the shard is written again.
        return False
    file = record.with_suffix(".arrow")
    if shard.file != file.name:
        return False
    # The digest, too: a machine that lost power can have kept the name and not the bytes.
    return file.is_file() and file.stat().st_size == shard.bytes and file_digest(file) == shard.xxh3


def _written(job: _Job, missing: Sequence[int], of: int, num_proc: int) -> Iterator[int]:
    """Yields the numbers of the shards, each after it was written."""
    if num_proc <= 1:
        for number in missing:
            _write_shard(job, number, of)
            yield number
        return
    # Forked: the rows are memory-mapped, and the tokenizer need not be sent.
    forked = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(num_proc, max(1, len(missing))), forked, _begin_worker, (job, of)) as pool:
        waiting = {pool.submit(_write_in_worker, number): number for number in missing}
        try:
            for ended in as_completed(waiting):
                ended.result()
                yield waiting[ended]
        except BrokenProcessPool as error:
            raise _refused(
                "a process that tokenizes has ended, as one that needs more memory than there is",
                "FG589",
                "run the same command again, with fewer processes (--num-proc): finished shards are kept",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_of_worker: list[tuple[_Job, int]] = []


def _begin_worker(job: _Job, of: int) -> None:
    # A tokenizer with threads of its own would use all cores in each process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _of_worker[:] = [(job, of)]


def _write_in_worker(number: int) -> None:
    job, of = _of_worker[0]
    _write_shard(job, number, of)


def _write_shard(job: _Job, number: int, of: int) -> None:
    """Writes a shard, and then its record, which says that it is finished."""
    kind, rows = np.dtype(job.wanted.dtype), job.rows(number, of)
    parts, lengths = [np.empty(0, kind)], [np.zeros(1, np.int64)]
    for first in range(rows.start, rows.stop, _BATCH_ROWS):
        texts = job.dataset[first : min(first + _BATCH_ROWS, rows.stop)]
        encoded = job.encoded(texts, range(first, rows.stop))
        lengths.append(np.fromiter((len(ids) + 1 for ids in encoded), np.int64, len(encoded)))
        joined = [one for ids in encoded for one in (*ids, job.wanted.eos_token_id)]
        parts.append(np.array(joined, dtype=kind))
    ids_N, offsets_D = np.concatenate(parts), np.concatenate(lengths).cumsum()
    documents = pa.LargeListArray.from_arrays(pa.array(offsets_D), pa.array(ids_N))
    file = job.draft / f"shard-{number:05d}.arrow"
    batch = pa.record_batch([documents], names=[COLUMN])
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_file(stream, batch.schema) as writer:
        writer.write_batch(batch)
    _sync(file)
    largest = int(ids_N.max()) if len(ids_N) else 0
    shard = Shard(file.name, len(rows), len(ids_N), file.stat().st_size, file_digest(file), largest)
    replace_file(job.draft / f"shard-{number:05d}.json", json.dumps(asdict(shard)).encode())


def _check_room(job: _Job, tokens: int) -> None:
    needed = int(tokens * np.dtype(job.wanted.dtype).itemsize * _SPARE) + 8 * len(job.dataset)
    free = shutil.disk_usage(job.draft).free
    if needed > free:
        raise _refused(
            f"the tokens need about {needed / 1e9:.1f} GB, and {str(job.draft.parent)!r} has {free / 1e9:.1f} GB free",
            "FG786",
            "name a folder on a larger disk; finished shards are kept",
        )


def _refuse_other(place: Path, found: Manifest, wanted: Manifest) -> None:
    if changed := found.differences(wanted):
        raise _refused(
            f"{str(place)!r} was prepared with another {' and another '.join(changed)}",
            "FG787",
            "name another folder, or remove this one",
        )


def _refused(message: str, code: str, hint: str) -> DataFileError:
    error: DataFileError = DataFileError(message, code=code, hint=hint)
    error.argument = "folder"
    return error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
