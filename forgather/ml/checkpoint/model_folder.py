"""A model in a folder that may hold an older one, and much else.

Takes a folder, and what fills a draft; gives the folder with the new files in their places. Keeps true: every file is
whole and synced before the first of them gets its name; the older model can be loaded until the new weights are named
by one act, and weights of an older layout go only then. The one exception: shards that take the names of older shards.
Between the first and the last of them no index is there, so that nobody loads a mixture.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from forgather.ml.checkpoint.checkpoint_dir import Draft, drop_draft, is_left, own_mark
from forgather.ml.checkpoint.files import ADAPTER, ADAPTER_CONFIG, CONFIG, WEIGHTS, WEIGHTS_INDEX
from forgather.ml.checkpoint.manifest import FileFact
from forgather.ml.checkpoint.storage import Storage, make_folders, remove_tree

_PREFIX = ".saving-model-"
_CLAIMS = frozenset({CONFIG, ADAPTER_CONFIG, ADAPTER})
"""What says how the weights of a folder are to be read."""
_LAYOUT = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z")


def write_model(storage: Storage, folder: Path, fill: Callable[[Draft], None]) -> Mapping[str, FileFact]:
    """Writes the files of a model and returns what they are.

    Args:
        storage: makes the changes.
        folder: of the model; it is made where it is missing.
        fill: writes the files into a draft.

    Raises:
        OSError: the disk refuses.
    """
    make_folders(storage, folder)
    for leftover in sorted(folder.glob(f"{_PREFIX}*")):
        if is_left(leftover, leftover.name.removeprefix(_PREFIX)):
            with suppress(OSError):
                remove_tree(storage, leftover)
    draft = Draft(storage, folder / f"{_PREFIX}{own_mark()}")
    storage.make_folder(draft.folder)
    try:
        fill(draft)
        _put_in_place(storage, draft, folder)
    finally:
        drop_draft(draft)
    return draft.files


def _put_in_place(storage: Storage, draft: Draft, folder: Path) -> None:
    names = sorted(draft.files, key=_turn)
    for name in names:
        if (folder / name).is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
    older = {entry.name for entry in folder.iterdir() if _LAYOUT.match(entry.name)}
    has_weights = any(_LAYOUT.match(name) for name in names)
    # What an older model said of its weights must not be read of new ones.
    claims = [name for name in sorted(_CLAIMS - set(names)) if (folder / name).is_file()]
    if claims and (has_weights or ADAPTER in names):
        for name in claims:
            storage.remove_file(folder / name)
        storage.sync_folder(folder)
    shards = {name for name in names if _LAYOUT.match(name)} - {WEIGHTS, WEIGHTS_INDEX}
    if WEIGHTS_INDEX in older and shards & older and WEIGHTS not in older:
        storage.remove_file(folder / WEIGHTS_INDEX)
        storage.sync_folder(folder)
    for _, together in itertools.groupby(names, key=lambda name: _turn(name)[0]):
        parents = set()
        for name in together:
            make_folders(storage, (folder / name).parent)
            storage.rename(draft.folder / name, folder / name)
            parents.add((folder / name).parent)
        for parent in sorted(parents):  # a name that says what others hold must not outlive theirs
            storage.sync_folder(parent)
    stale = sorted(older - set(names) - ({WEIGHTS_INDEX} if shards & older else set())) if has_weights else []
    for name in sorted(stale, key=lambda name: name != WEIGHTS):
        with suppress(FileNotFoundError):
            storage.remove_file(folder / name)
    if stale:
        storage.sync_folder(folder)


def _turn(name: str) -> tuple[int, str]:
    """Weights first, what names them last: until then the older ones count."""
    return (3 if name == CONFIG else 2 if name == WEIGHTS_INDEX else 0 if _LAYOUT.match(name) else 1, name)
