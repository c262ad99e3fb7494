"""The manifest of prepared tokens: what is in a folder of shards, of which sources, and how it is checked.

Takes a folder; gives a `Manifest`, or one sentence that says what is wrong with it. A folder is whole or it is not
there: shards are written into a draft beside it, the manifest last, and one rename makes the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from forgather.ml.data.data_errors import DataError, DataFileError

FORMAT = 1
KIND = "forgather tokens"
FILE = "manifest.json"
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of documents.

    Args:
        file: the name of the file in the folder.
        documents: the number of documents.
        tokens: the number of tokens, with the end-of-text token of each document.
        bytes: the size of the file.
        xxh3: the digest of the file.
        largest_id: the largest token id.
    """

    file: str
    documents: int
    tokens: int
    bytes: int
    xxh3: str
    largest_id: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder of prepared tokens holds.

    Args:
        source: the fingerprint of the rows of text.
        text_column: the column of the text.
        tokenizer: the digest of the tokenizer.
        eos_token_id: the token after each document.
        vocab_size: the number of tokens of the tokenizer.
        dtype: the name of numpy's type of a token id.
        shards: the shards, in the order of their documents.
        format: the version of the format.
        kind: what the folder holds, so that a manifest of another tool is not taken for one.
    """

    source: str
    text_column: str
    tokenizer: str
    eos_token_id: int
    vocab_size: int
    dtype: str
    shards: tuple[Shard, ...] = ()
    format: int = FORMAT
    kind: str = KIND

    @property
    def num_documents(self) -> int:
        """The number of documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        """The size of all shards."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def largest_id(self) -> int:
        """The largest token id of all shards."""
        return max((shard.largest_id for shard in self.shards), default=0)

    @property
    def text(self) -> str:
        """The manifest as the text of its file."""
        counts = {"num_documents": self.num_documents, "num_tokens": self.num_tokens, "num_bytes": self.num_bytes}
        return json.dumps({**asdict(self), **counts}, indent=1) + "\n"

    def differences(self, other: Manifest) -> list[str]:
        """Returns what the tokens of another manifest were made from in another way, in words."""
        facts = {"source": "texts", "text_column": "text column", "tokenizer": "tokenizer"}
        return [words for name, words in facts.items() if getattr(self, name) != getattr(other, name)]


def draft_of(folder: Path) -> Path:
    """Returns the folder in which the shards of a folder are prepared."""
    return folder.parent / f".{folder.name}.preparing"


def read_manifest(folder: Path) -> Manifest:
    """Returns the manifest of a folder whose shards have the sizes that it names.

    Args:
        folder: the folder of `fgcli data prepare`.

    Raises:
        DataFileError: FG779 if there is no such folder, or it is still prepared; FG780 if the manifest is damaged or of
            another version; FG781 if a shard is missing or has another size.
    """
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise _absent(folder) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(folder, f"is no JSON: {error}") from error
    manifest = _parsed(folder, found)
    for shard in manifest.shards:
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            what = "is missing" if size is None else f"has {size:,} bytes, and the manifest says {shard.bytes:,}"
            raise _file_error(f"{str(file)!r} {what}", "FG781", _AGAIN)
    return manifest


def damaged_shards(folder: Path, manifest: Manifest) -> Iterator[Shard]:
    """Yields the shards whose content is not that of their digest; every byte is read.

    Args:
        folder: the folder.
        manifest: its manifest.
    """
    return (shard for shard in manifest.shards if file_digest(folder / shard.file) != shard.xxh3)


def damaged(folder: Path, shard: Shard) -> DataFileError:
    """Returns the FG782 error for a shard whose content has changed.

    Args:
        folder: the folder.
        shard: the shard.
    """
    return _file_error(f"{str(folder / shard.file)!r} is not what was written: its digest differs", "FG782", _AGAIN)


def file_digest(file: Path) -> str:
    """Returns the xxh3 digest of the bytes of a file."""
    digest = xxhash.xxh3_64()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


_AGAIN = "copy the folder again, or remove it and run 'fgcli data prepare' again"
_TYPES = {"source": str, "text_column": str, "tokenizer": str, "eos_token_id": int, "vocab_size": int, "dtype": str}


def _parsed(folder: Path, found: Any) -> Manifest:
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise _damaged(folder, f"is not one of {KIND!r}")
    if found.get("format") != FORMAT:
        raise _file_error(
            f"the manifest of {str(folder)!r} has the format {found.get('format')!r}, and this release reads {FORMAT}",
            "FG780",
            "prepare the data with this release, or train with the one that prepared it",
        )
    try:
        given = {name: found[name] for name in _TYPES}
        shards = tuple(Shard(**shard) for shard in found["shards"])
    except (KeyError, TypeError) as error:
        raise _damaged(folder, f"is not complete: {error}") from error
    manifest = Manifest(**given, shards=shards)
    wrong = [name for name, kind in _TYPES.items() if type(given[name]) is not kind]
    numbers = [value for one in shards for value in (one.documents, one.tokens, one.bytes, one.largest_id)]
    outside = [repr(one.file) for one in shards if not isinstance(one.file, str) or Path(one.file).name != one.file]
    if wrong or outside or any(type(value) is not int or value < 0 for value in numbers):
        raise _damaged(folder, f"has a value of another kind ({', '.join([*wrong, *outside]) or 'a count of a shard'})")
    if manifest.dtype not in ("uint16", "int32") or found.get("num_tokens") != manifest.num_tokens:
        raise _damaged(folder, "contradicts itself")
    return manifest


def _absent(folder: Path) -> DataFileError:
    if draft_of(folder).is_dir():
        what, hint = "is not ready: its shards are being prepared", "wait, or run the same 'fgcli data prepare' again"
    elif folder.is_dir():
        what, hint = f"has no {FILE}", "name the folder that 'fgcli data prepare FOLDER' wrote"
    else:
        what, hint = "does not exist", f"write it first: fgcli -t CONFIG data prepare {folder}"
    return _file_error(f"the folder of prepared tokens {str(folder)!r} {what}", "FG779", hint)


def _damaged(folder: Path, what: str) -> DataFileError:
    return _file_error(f"{str(folder / FILE)!r} {what}", "FG780", _AGAIN)


def _file_error(message: str, code: str, hint: str) -> DataFileError:
    error: DataFileError = DataFileError(message, code=code, hint=hint)
    error.argument = "folder"
    return error


def other_tokenizer(folder: Path) -> DataError:
    """Returns the FG783 error, for tokens of another tokenizer than that of the config.

    Args:
        folder: the folder of prepared tokens.
    """
    return DataError(
        f"the tokens in {str(folder)!r} are those of another tokenizer",
        code="FG783",
        hint="take the tokenizer with which they were prepared, or prepare the data again",
    ).about("tokenizer")
