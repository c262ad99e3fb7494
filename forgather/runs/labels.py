"""The group, tags and note that a user gives a run: `labels.json`, the only file of a run folder that readers write."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from forgather.bounded import read_bytes
from forgather.errors import ProjectError
from forgather.folder_lock import folder_lock
from forgather.replaced_file import replace_file
from forgather.runs.run_folders import LABELS

_MAX_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels of a run.

    Args:
        group: the name of a group of runs, or None.
        tags: the tags, sorted and without repetitions.
        note: a text about the run, or None.
    """

    group: str | None = None
    tags: tuple[str, ...] = ()
    note: str | None = None


def parse_labels(content: bytes) -> Labels:
    """Returns the labels in the content of a file.

    Raises:
        ValueError: if the content is not that of labels; the text says why.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    is_object = isinstance(found, dict)
    group, note, tags = (found.get(name) if is_object else None for name in ("group", "note", "tags"))
    is_sound = all(value is None or isinstance(value, str) for value in (group, note))
    tags = [] if tags is None else tags
    if not (is_object and is_sound and isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        raise ValueError("it is not an object with the texts 'group' and 'note', and a list of texts 'tags'")
    return Labels(group=group, tags=tuple(sorted(set(tags))), note=note)


def read_labels(run_dir: str) -> Labels:
    """Returns the labels of a run; empty ones if it has none.

    Raises:
        ProjectError: FG504 if the file is damaged or cannot be read.
    """
    try:
        return parse_labels(read_bytes(os.path.join(run_dir, LABELS), _MAX_BYTES))
    except FileNotFoundError:
        return Labels()
    except (OSError, ValueError) as error:
        raise ProjectError(
            f"{os.path.join(run_dir, LABELS)!r} cannot be read: {getattr(error, 'strerror', None) or error}",
            code="FG504",
            hint="repair it, or remove it and label the run again",
        ) from error


def change_labels(run_dir: str, change: Callable[[Labels], Labels]) -> Labels:
    """Changes the labels of a run, and returns the new ones; the file is removed if there are none.

    No other process changes them meanwhile. What another version of Forgather has written beside the labels stays.

    Args:
        run_dir: the run folder.
        change: a function that returns the new labels.

    Raises:
        ProjectError: FG504 if the file is damaged, or cannot be read or written.
    """
    file = os.path.join(run_dir, LABELS)
    try:
        with folder_lock(run_dir):
            labels = change(read_labels(run_dir))
            content = asdict(labels) | _others(file)
            if content == asdict(Labels()):
                with suppress(FileNotFoundError):
                    os.remove(file)
            else:
                _replace(file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            return labels
    except OSError as error:
        raise ProjectError(
            f"the labels of {run_dir!r} cannot be written: {error.strerror or error}",
            code="FG504",
            hint="make room, or change the permissions of the folder",
        ) from error


def _others(file: str) -> dict[str, Any]:
    """Returns what a file with labels has besides them."""
    try:
        found = json.loads(read_bytes(file, _MAX_BYTES))
    except FileNotFoundError:
        return {}
    return {name: value for name, value in found.items() if name not in Labels.__dataclass_fields__}


def _replace(file: str, text: str) -> None:
    content = text.encode("utf-8", "backslashreplace")
    if len(content) > _MAX_BYTES:
        # Nobody would read it again.
        raise OSError(errno.EFBIG, f"they would take more than {_MAX_BYTES:,} bytes", file)
    replace_file(file, content)
