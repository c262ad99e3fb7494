"""Text sources: Python files, plain text, JSON lines, parquet files, and data sets of the Hugging Face Hub.

The input is files, or the name of a data set on the Hub; the output is a `datasets.Dataset`, usually with a column
`text`. The same files give the same rows, order and fingerprint. Only `hub_dataset` opens a network connection.
"""

from __future__ import annotations

import glob
import json
import logging
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from datasets import (
    Dataset,
    DatasetDict,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    load_dataset,
)
from datasets.config import HF_DATASETS_CACHE
from datasets.exceptions import DatasetGenerationError

from forgather.errors import first_line
from forgather.ml.argument_values import refuse_wrong_values
from forgather.ml.data.cache import content_key, files_digest
from forgather.ml.data.data_errors import (
    DataError,
    DataFileError,
    missing_column,
    refuse_no_text,
    row_place,
    unread_column_warning,
)
from forgather.ml.data.row_stream import BUFFER_SIZE, RowStream
from forgather.ml.data.text_streams import json_stream, line_stream, parquet_stream
from forgather.ml.hub import folder_problem, hub_access, lookup_hint
from forgather.ml.log import get_logger
from forgather.rules import is_path

logger = get_logger(__name__)

_ROW = re.compile(r",? in row \d+$")
_AT_LEAST_ONE = "a data set needs at least one row"
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "site-packages"})
# Parts of the standard library that are poor training text: tests, tables, bundled applications.
_SKIPPED_OF_STDLIB = frozenset(
    {"_bundled", "encodings", "idlelib", "lib2to3", "pydoc_data", "test", "tests", "turtledemo"}
)


def python_sources(folder: str | os.PathLike[str] | None = None, max_bytes: int | None = None) -> Dataset:
    """Returns the `.py` files of a folder as rows of text, by default those of Python's standard library.

    Args:
        folder: the folder that is searched recursively, except hidden folders and installed packages. None means the
            standard library without tests, tables and bundled applications.
        max_bytes: the maximum total size of the text in bytes of UTF-8, or None for no limit.

    Returns:
        A data set with the columns `text` and `file` (the path relative to `folder`), sorted by file.

    Raises:
        DataFileError: FG830 if the folder does not exist.
        DataError: FG832 if the folder has no source file with text within `max_bytes`.
    """
    refuse_wrong_values("data:python_sources", locals())
    root = Path(folder).expanduser() if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    skipped = _SKIPPED_FOLDERS if folder is not None else _SKIPPED_FOLDERS | _SKIPPED_OF_STDLIB
    if not root.is_dir():
        raise DataFileError(f"no such folder: {str(root)!r}", hint="give an existing folder").about("folder")
    texts, names, used, digest = [], [], 0, xxhash.xxh3_64()
    for name, text in _python_files(root, skipped):
        # A source may contain lone surrogates, which plain UTF-8 cannot encode.
        size = len(text.encode("utf-8", "surrogatepass"))
        # Stops at the first file that does not fit, so that a larger limit only appends files.
        if max_bytes is not None and used + size > max_bytes:
            break
        used += size
        names.append(name)
        texts.append(text)
        digest.update(f"{name}\0{size}\0{text}".encode("utf-8", "surrogatepass"))
    if not texts:
        limit = "" if max_bytes is None else f" within {max_bytes} bytes"
        raise DataError(
            f"folder {str(root)!r} holds no '.py' file with text{limit}",
            code="FG832",
            hint="another folder, or more max_bytes",
        )
    logger.info("read %d Python files, %.1f MB, from %s", len(texts), used / 1e6, root)
    # The fingerprint is a digest of the content, since the caches of tokens and tokenizers are keyed by it.
    table = Dataset.from_dict({"text": texts, "file": names}).data.table
    return Dataset(table, fingerprint=digest.hexdigest())


def text_files(
    paths: Paths,
    sample_by: str = "document",
    *,
    streaming: bool = False,
    buffer_size: int = BUFFER_SIZE,
    seed: int = 42,
) -> Dataset | RowStream:
    """Returns plain text files as rows of text.

    Args:
        paths: a file, a folder (whose `.txt` and `.md` files are read), a glob, or a list of these.
        sample_by: the unit of text in one row: "document" (a whole file), "paragraph" or "line".
        streaming: whether the rows are read while a run trains on them, as in `json_lines`; only with "line".
        buffer_size: the number of streamed rows among which the next one is drawn at random.
        seed: the seed of the order of streamed rows.

    Returns:
        A data set with the column `text`.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a file is not UTF-8.
        DataError: FG832 if the files contain no text; FG982 if documents or paragraphs are to be streamed.
    """
    refuse_wrong_values("data:text_files", locals())
    files = find_files(paths, (".txt", ".md"))
    if streaming and sample_by != "line":
        raise DataError(
            f"the rows are to be streamed, and sample_by is {sample_by!r}: files are read by lines",
            code="FG982",
            hint="set sample_by: line, or write documents as JSON lines (json_lines)",
        ).about("sample_by")
    if streaming:
        return line_stream(files, buffer_size=buffer_size, seed=seed)
    return _usable(_read(files, Dataset.from_text, sample_by=sample_by), "text", files)


def json_lines(
    paths: Paths,
    text_column: str | None = "text",
    *,
    eval_paths: Paths | None = None,
    streaming: bool = False,
    buffer_size: int = BUFFER_SIZE,
    seed: int = 42,
) -> Dataset | DatasetDict | RowStream | dict[str, Any]:
    """Returns files with one JSON object per line as a data set.

    Args:
        paths: a file, a folder (whose `.jsonl` and `.json` files are read), a glob, or a list of these.
        text_column: the name of the column with the text, which is renamed to `text` while the other columns are
            dropped, or None to keep all columns under their names.
        eval_paths: the files for evaluation, which `split` keeps and which are never streamed; None to split `paths`.
        streaming: whether the rows of `paths` are read while a run trains on them, instead of before. Memory then holds
            `buffer_size` rows, whatever the size of the files.
        buffer_size: the number of streamed rows among which the next one is drawn at random; 0 for the order of the
            files.
        seed: the seed of the order of streamed rows.

    Returns:
        A data set with the column `text`, or with all columns of the files if `text_column` is None, or a `RowStream`
        of such rows; with `eval_paths`, two of them, "train" and "eval".

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a line is not a JSON object in UTF-8.
        DataError: FG831 if the column is missing, FG832 if there is no text, FG833 if the column is not a text column.
    """
    refuse_wrong_values("data:json_lines", locals())
    options: dict[str, Any] = {"streaming": streaming, "buffer_size": buffer_size, "seed": seed}
    if eval_paths is not None:
        return _with_held_out(json_lines(paths, text_column, **options), json_lines(eval_paths, text_column))
    files = find_files(paths, (".jsonl", ".json"))
    if streaming:
        return json_stream(files, text_column, buffer_size=buffer_size, seed=seed)
    return _usable(_read(files, Dataset.from_json), text_column, files)


def csv_files(paths: Paths, text_column: str | None = "text") -> Dataset:
    """Returns CSV files, whose first line has the names of the columns, as a data set.

    Args:
        paths: a file, a folder (whose `.csv` files are read), a glob, or a list of these.
        text_column: the name of the column with the text, or None to keep all columns, as in `json_lines`.

    Returns:
        A data set with the column `text`, or with all columns of the files if `text_column` is None.

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a file is not CSV in UTF-8.
        DataError: FG831 if the column is missing, FG832 if there is no text, FG833 if the column is not a text column.
    """
    files = find_files(paths, (".csv",))
    return _usable(_read(files, Dataset.from_csv), text_column, files)


def parquet(
    paths: Paths,
    text_column: str | None = "text",
    *,
    eval_paths: Paths | None = None,
    streaming: bool = False,
    buffer_size: int = BUFFER_SIZE,
    seed: int = 42,
) -> Dataset | DatasetDict | RowStream | dict[str, Any]:
    """Returns parquet files as a data set.

    Args:
        paths: a file, a folder (whose `.parquet` files are read), a glob, or a list of these.
        text_column: the name of the column with the text, or None to keep all columns, as in `json_lines`.
        eval_paths: the files for evaluation, as in `json_lines`.
        streaming: whether the rows are read while a run trains on them, as in `json_lines`.
        buffer_size: the number of streamed rows among which the next one is drawn at random.
        seed: the seed of the order of streamed rows.

    Returns:
        A data set with the column `text`, or with all columns of the files if `text_column` is None, or a `RowStream`
        of such rows; with `eval_paths`, two of them, "train" and "eval".

    Raises:
        DataFileError: FG830 if a path matches no file, FG834 if a file is not in the parquet format.
        DataError: FG831 if the column is missing, FG832 if there is no text, FG833 if the column is not a text column.
    """
    refuse_wrong_values("data:parquet", locals())
    options: dict[str, Any] = {"streaming": streaming, "buffer_size": buffer_size, "seed": seed}
    if eval_paths is not None:
        return _with_held_out(parquet(paths, text_column, **options), parquet(eval_paths, text_column))
    files = find_files(paths, (".parquet",))
    if streaming:
        return parquet_stream(files, text_column, buffer_size=buffer_size, seed=seed)
    return _usable(_read(files, Dataset.from_parquet), text_column, files)


def _with_held_out(train: Any, held: Any) -> DatasetDict | dict[str, Any]:
    # A `DatasetDict` holds data sets alone.
    return DatasetDict(train=train, eval=held) if isinstance(train, Dataset) else {"train": train, "eval": held}


def hub_dataset(
    name: str,
    config: str | None = None,
    *,
    split: str = "train",
    text_column: str | None = "text",
    revision: str | None = None,
) -> Dataset:
    """Returns one split of a data set of the Hugging Face Hub, which is read from the local cache if possible.

    Args:
        name: the name of the data set on the Hub, for example "roneneldan/TinyStories".
        config: the name of a configuration of the data set, which is needed if there are several.
        split: the name or slice of a split, for example "train" or "train[:1%]".
        text_column: the name of the column with the text, or None to keep all columns, as in `json_lines`.
        revision: a commit, tag or branch. Only a commit makes the run reproducible.

    Returns:
        A data set with the column `text`, or with all columns of the split if `text_column` is None.

    Raises:
        DataFileError: FG843 if the data set cannot be loaded.
        DataError: FG831 if the column is missing, FG832 if there is no text, FG833 if the column is not a text column.
    """
    if wrong := folder_problem(name):
        raise _not_loaded(name, wrong)
    try:
        with hub_access():
            dataset = load_dataset(name, config, split=split, revision=revision)
    except (OSError, ValueError) as error:
        raise _not_loaded(name, first_line(error)[:200]) from error
    return _usable(dataset, text_column, [name])


def _not_loaded(name: str, reason: str) -> DataFileError:
    hint = lookup_hint(name) if is_path(name) else "check the name, the split and the connection, or use local files"
    found: DataFileError = DataFileError(f"data set {name!r} could not be loaded: {reason}", code="FG843", hint=hint)
    found.argument = "name"
    return found


def find_files(paths: Paths, suffixes: Sequence[str]) -> list[str]:
    """Returns the files that `paths` names, without duplicates; the files of each folder and glob are sorted.

    Args:
        paths: a file, a folder or a glob, or a list of these.
        suffixes: the file name suffixes of the files that are read from a folder, in lower case.

    Raises:
        DataFileError: FG830 if an entry matches no file.
    """
    entries = list(paths) if isinstance(paths, Sequence) and not isinstance(paths, str) else [paths]
    # An empty text, as of an unset variable, would be the working folder.
    if not entries or not all(isinstance(one, str | os.PathLike) and str(one).strip() for one in entries):
        found = f"paths is {paths!r:.80}, which names no data file"
        raise DataFileError(found, code="FG830", hint="name at least one file").about("paths")
    # A file that two entries match would otherwise be read twice.
    return list(dict.fromkeys(file for entry in entries for file in _expand(Path(entry).expanduser(), suffixes)))


def _expand(entry: Path, suffixes: Sequence[str]) -> list[str]:
    if entry.is_file():
        return [str(entry)]
    if entry.is_dir():
        found = sorted(str(file) for file in entry.rglob("*") if file.is_file() and file.suffix.lower() in suffixes)
        expected = "a file ending in " + " or ".join(suffixes)
    else:
        found = sorted(file for file in glob.glob(str(entry), recursive=True) if os.path.isfile(file))
        expected = "an existing file, folder or glob"
    if not found:
        what = "holds no data file" if entry.is_dir() else "matches no file"
        hint = f"expected {expected}; the working folder is {os.getcwd()!r}"
        raise DataFileError(f"{str(entry)!r} {what}", hint=hint).about("paths")
    return found


def _python_files(root: Path, skipped: frozenset[str]) -> Iterator[tuple[str, str]]:
    # `os.walk` returns files in the order of the file system, which differs between machines.
    for name in sorted(_python_names(root, skipped)):
        file = root / name
        try:
            # `tokenize.open` honours the encoding declaration of a source file.
            with tokenize.open(file) as stream:
                text = stream.read()
        # Some packages ship files with a broken encoding on purpose, as test data.
        except (SyntaxError, UnicodeDecodeError) as error:
            logger.warning("left out %s: %s", file, first_line(error)[:200])
            continue
        if text.strip():
            yield name, text


def _python_names(root: Path, skipped: frozenset[str]) -> Iterator[str]:
    for folder, subfolders, files in os.walk(root):
        # In place: `os.walk` descends only into the folders that stay in this list.
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        for file in files:
            if file.endswith(".py"):
                yield Path(folder, file).relative_to(root).as_posix()


def _read(files: list[str], reader: object, **options: object) -> Dataset:
    # The readers of `datasets` fail on an empty file although the others have rows.
    filled = [file for file in files if os.path.getsize(file)]
    if not filled:
        raise DataError(f"{_listed(files)} is empty", code="FG832", hint=_AT_LEAST_ONE).about("paths")
    try:
        content = content_key(files=files_digest(filled), reader=getattr(reader, "__name__", ""), **options)
        # `datasets` knows a file by its path, size and time of change, which an edit can leave as they were.
        cache_dir = os.path.join(HF_DATASETS_CACHE, f"content-{content}")
        with _without_own_output():
            rows = reader(filled, cache_dir=cache_dir, **options)  # type: ignore[operator]
        return Dataset(rows.data, info=rows.info, fingerprint=content)
    except (DatasetGenerationError, OSError, ValueError) as error:
        # `datasets` wraps the error of the parser in one that says only that generation failed.
        reason, where = first_line(error.__cause__ or error)[:200], _listed(files)
        # The parser counts rows from 0, without empty lines, and from the start of the block that it reads.
        if (row := _ROW.search(reason)) and (bad := _first_bad_line(files)):
            where, reason = row_place(bad[1], bad[0], is_line=True), reason[: row.start()]
        raise _unreadable(where, reason) from error


def _unreadable(where: str, reason: str) -> DataFileError:
    error: DataFileError = DataFileError(
        f"{where} cannot be read: {reason}", code="FG834", hint="is it in this format, complete, and in UTF-8?"
    )
    error.argument = "paths"
    return error


def _first_bad_line(files: Sequence[str]) -> tuple[str, int] | None:
    """Returns the first line that is not a JSON object, as its file and its number, counted from 1.

    Returns None if there is no such line, or if a line has no number, because its file is compressed or contains one
    value that spans all lines.
    """
    for file in files:
        with open(file, "rb") as stream:
            for number, line in enumerate(stream, 1):
                try:
                    is_object = not line.strip() or isinstance(json.loads(line), dict)
                # Most likely a compressed file, which `datasets` unpacks: its lines are not those of its content.
                except UnicodeDecodeError:
                    return None
                except ValueError:
                    is_object = False
                # A file that is not JSON lines but one indented value has no line that is wrong by itself.
                if not is_object:
                    return None if line.strip() in (b"[", b"{") else (file, number)
    return None


@contextmanager
def _without_own_output() -> Iterator[None]:
    # The settings are global to `datasets`; a caller's choice has to come back.
    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    # Its readers log an error before they raise it, with the row of a block.
    readers = logging.getLogger("datasets.packaged_modules")
    level = readers.level
    readers.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        readers.setLevel(level)
        if shown:
            enable_progress_bars()


def _usable(dataset: Dataset, text_column: str | None, files: Sequence[str]) -> Dataset:
    """Returns the rows that have text, in which the text column is named `text`; raises FG832 if there are none.

    If `text_column` is None, all rows and columns are returned.
    """
    if text_column is None:
        kept = dataset
    else:
        try:
            rows = text_only(dataset, text_column)
        # JSON and parquet files are decoded only when their texts are read.
        except UnicodeDecodeError as error:
            raise _unreadable(_listed(files), first_line(error)[:200]) from error
        kept = rows.rename_columns({text_column: "text"} if text_column != "text" else {})
    if not len(kept):
        raise DataError(f"{_listed(files)} gives no row with text", code="FG832", hint=_AT_LEAST_ONE).about("paths")
    return kept


def text_only(dataset: Dataset, column: str) -> Dataset:
    """Returns a data set with only the text column and without empty rows; the number of dropped rows is logged.

    Args:
        dataset: the data set.
        column: the name of the column with the text.

    Raises:
        DataError: FG831 if the column is missing, FG833 if the column does not contain strings.
    """
    if column not in dataset.column_names:
        raise missing_column(column, dataset.column_names, "text_column")
    if warning := unread_column_warning(column, dataset.column_names):
        logger.warning("%s", warning)
    refuse_no_text(dataset, column)
    kept = dataset.select_columns([column])
    # Read in batches: the whole column as a Python list would need the memory of all text.
    filled = [row for row, text in enumerate(_column(kept, column)) if text]
    if len(filled) < len(kept):
        logger.warning("%d of %d rows hold no text and were left out", len(kept) - len(filled), len(kept))
        kept = kept.select(filled)
    return kept


def _column(dataset: Dataset, column: str) -> Iterable[str | None]:
    for batch in dataset.iter(batch_size=1000):
        yield from batch[column]


def _listed(files: Sequence[str]) -> str:
    return repr(files[0]) if len(files) == 1 else f"{files[0]!r} and {len(files) - 1} more"
