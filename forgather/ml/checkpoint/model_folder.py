"""Writes a model into a folder that may already contain an older model and unrelated files.

All files are written to a hidden draft folder and synced, and then renamed to their final names. The older model can be
loaded until one rename makes the new weights visible. Weight files of the older model that have other names are removed
after that.

There is one exception: if new weight files have the same names as older ones, the older index file is removed before
the first file is replaced, and the new index file is put in place after the last one. In between, `from_pretrained`
fails instead of loading a mixture of both models.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from forgather.ml.checkpoint.checkpoint_dir import Draft, discard_draft, is_abandoned, process_mark
from forgather.ml.checkpoint.files import ADAPTER, ADAPTER_CONFIG, CONFIG, REFERENCE_MODEL, WEIGHTS, WEIGHTS_INDEX
from forgather.ml.checkpoint.manifest import FileFact
from forgather.ml.checkpoint.storage import Storage, make_folders, remove_tree

_PREFIX = ".saving-model-"
_CLAIMS = frozenset({CONFIG, ADAPTER_CONFIG, ADAPTER, REFERENCE_MODEL})
"""The files that say how the weights in a folder are read, and what they were compared with."""
_LAYOUT = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?\Z")


def write_model(storage: Storage, folder: Path, fill: Callable[[Draft], None]) -> Mapping[str, FileFact]:
    """Writes the files of a model into a folder, and returns the size and digest of each file, by name.

    Args:
        storage: the object through which files are written and removed.
        folder: the folder of the model, which is created if needed.
        fill: a function that writes all files into the draft that it gets.

    Raises:
        OSError: if a file cannot be written or renamed.
    """
    make_folders(storage, folder)
    # A process that was killed could not remove its draft; a large model would otherwise be on the disk twice for ever.
    for leftover in sorted(folder.glob(f"{_PREFIX}*")):
        if is_abandoned(leftover, leftover.name.removeprefix(_PREFIX)):
            with suppress(OSError):
                remove_tree(storage, leftover)
    draft = Draft(storage, folder / f"{_PREFIX}{process_mark()}")
    storage.make_folder(draft.folder)
    try:
        fill(draft)
        _put_in_place(storage, draft, folder)
    finally:
        discard_draft(draft)
    return draft.files


def _put_in_place(storage: Storage, draft: Draft, folder: Path) -> None:
    names = sorted(draft.files, key=_turn)
    for name in names:
        # Checked before the first rename: `os.replace` of a file over a folder would fail halfway through.
        if (folder / name).is_dir():
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(folder / name))
    older = {entry.name for entry in folder.iterdir() if _LAYOUT.match(entry.name)}
    has_weights = any(_LAYOUT.match(name) for name in names)
    # A configuration or adapter of the older model must not be applied to the new weights.
    claims = [name for name in sorted(_CLAIMS - set(names)) if (folder / name).is_file()]
    if claims and (has_weights or ADAPTER in names):
        for name in claims:
            storage.remove_file(folder / name)
        storage.sync_folder(folder)
    shards = {name for name in names if _LAYOUT.match(name)} - {WEIGHTS, WEIGHTS_INDEX}
    # Shards are replaced one by one. Without the index, `from_pretrained` finds no model instead of a mixture.
    if WEIGHTS_INDEX in older and shards & older and WEIGHTS not in older:
        storage.remove_file(folder / WEIGHTS_INDEX)
        storage.sync_folder(folder)
    # Each group is synced before the next one is renamed: after a loss of power no index names shards that are missing.
    for _, together in itertools.groupby(names, key=lambda name: _turn(name)[0]):
        parents = set()
        for name in together:
            make_folders(storage, (folder / name).parent)
            storage.rename(draft.folder / name, folder / name)
            parents.add((folder / name).parent)
        for parent in sorted(parents):
            storage.sync_folder(parent)
    stale = sorted(older - set(names) - ({WEIGHTS_INDEX} if shards & older else set())) if has_weights else []
    # The single weights file goes first, since `from_pretrained` prefers it to an index.
    for name in sorted(stale, key=lambda name: name != WEIGHTS):
        with suppress(FileNotFoundError):
            storage.remove_file(folder / name)
    if stale:
        storage.sync_folder(folder)


def _turn(name: str) -> tuple[int, str]:
    """Returns the sort key for renaming files: weights first, then other files, the index, and the configuration.

    A folder with an older model describes that model until the index or the configuration is replaced.
    """
    return (3 if name == CONFIG else 2 if name == WEIGHTS_INDEX else 0 if _LAYOUT.match(name) else 1, name)
