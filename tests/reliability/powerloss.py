"""What a disk may hold after a loss of power: every state that pessimistic rules allow, rebuilt from the operations.

Takes the calls of the system that a run makes, with their data; gives states as {path: content}. The rules are those of POSIX and no
better: what was written and not synced is there, gone, cut at any 4 KiB boundary or zeros; a name that was made, changed
or removed, and whose folder was not synced, is there or not, each for itself, in any combination. What was synced stays.
"""

import os
import random
import threading
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from forgather.ml.checkpoint import storage
from tests.reliability.wrapped import Wrapped

BLOCK = 4096


class SystemCalls:
    """What the product asks of the system, in the place of the module `os`: what changes a disk is noted once it is done.

    Args:
        note: called with the name of an operation, the paths, and what was written.
    """

    def __init__(self, note):
        self.note = note
        self.files = {}

    def __getattr__(self, name):
        return getattr(os, name)

    def open(self, path, flags, *mode):
        handle = os.open(path, flags, *mode)
        self.files[handle] = Path(path)
        if flags & os.O_CREAT:
            self.note("create", Path(path))
        return handle

    def write(self, handle, data):
        count = os.write(handle, data)
        self.note("write", self.files[handle], memoryview(data)[:count])
        return count

    def fsync(self, handle):
        os.fsync(handle)
        self.note("sync_folder" if self.files[handle].is_dir() else "sync", self.files[handle])

    def close(self, handle):
        os.close(handle)
        del self.files[handle]

    def mkdir(self, folder):
        os.mkdir(folder)
        self.note("make_folder", Path(folder))

    def replace(self, old, new):
        os.replace(old, new)
        self.note("rename", Path(old), Path(new))

    def unlink(self, file):
        os.unlink(file)
        self.note("remove", Path(file))

    def rmdir(self, folder):
        os.rmdir(folder)
        self.note("remove", Path(folder))


class Logged(Wrapped):
    """The storage of the product, of which every call of the system is noted with its data: not what it says it does."""

    def __init__(self, root, inner=None):
        super().__init__(inner)
        self.root = Path(root)
        self.log = []
        self._system = SystemCalls(self._note)
        self._alone = threading.RLock()  # a thread may write beside the run

    def act(self, name, do, *given):
        with self._alone, mock.patch.object(storage, "os", self._system):
            return do()

    def _note(self, name, *given):
        self.log.append(
            (name, *(str(it.relative_to(self.root)) if isinstance(it, Path) else bytes(it) for it in given))
        )

    def saved(self, step):
        """Notes that the run was told of a save."""
        self.log.append(("saved", step))


class PowerIsGone(BaseException):
    """The machine has stopped."""


class LoggedUntil(Logged):
    """A storage of a machine that stops before operation number `at`: nothing is done or noted from then on."""

    def __init__(self, root, at):
        super().__init__(root)
        self.at = at

    def act(self, name, do, *given):
        if len(self.log) >= self.at:
            raise PowerIsGone
        return super().act(name, do, *given)


class FilesNotSynced(Logged):
    """A storage whose writer trusts the machine with the content of files. A control of the replayer."""

    def act(self, name, do, *given):
        return None if name == "sync" else super().act(name, do, *given)


class FoldersNotSynced(Logged):
    """A storage whose writer trusts the machine with names. A control of the replayer."""

    def act(self, name, do, *given):
        return None if name == "sync_folder" else super().act(name, do, *given)


@dataclass(eq=False)
class File:
    """The content of a file, whatever its names."""

    written: bytes = b""
    synced: int = 0

    def contents(self, dice):
        """Yields what the disk may hold of it: all, then less."""
        yield self.written
        if self.synced == len(self.written):
            return
        loose = [cut for cut in range(0, len(self.written), BLOCK) if cut >= self.synced] or [self.synced]
        yield self.written[: loose[0]]
        cut = dice.choice(loose)
        yield self.written[:cut]
        yield self.written[:cut] + bytes(len(self.written) - cut)


@dataclass(eq=False)
class Folder:
    """The names in a folder."""

    entries: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Change:
    """A change of names that is not synced yet: `removed` and `added` are (folder, name), `what` what has the name."""

    removed: tuple | None
    added: tuple | None
    what: object

    @property
    def folders(self):
        return {id(place[0]) for place in (self.removed, self.added) if place}


class Disk:
    """What is certainly on the disk, and the changes that may be or not, after the first operations of a log."""

    def __init__(self, before):
        self.root = Folder()
        self.loose = []
        self.saved = None
        self._present = {"": self.root}  # what the running machine sees: every change has happened
        for name, content in sorted(before.items()):
            node = Folder() if content is None else File(content, len(content))
            self._place(name)[0].entries[Path(name).name] = node
            self._present[name] = node

    def _place(self, name):
        parent = str(Path(name).parent)
        return self._present["" if parent == "." else parent], Path(name).name

    def play(self, operation):
        name, *arguments = operation
        getattr(self, f"_{name}")(*arguments)

    def _saved(self, step):
        self.saved = step

    def _create(self, name):
        earlier = self._present.get(name)
        node = self._present[name] = File()
        self.loose.append(Change(self._place(name) if earlier else None, self._place(name), node))

    def _write(self, name, data):
        self._present[name].written += data

    def _sync(self, name):
        self._present[name].synced = len(self._present[name].written)

    def _make_folder(self, name):
        node = self._present[name] = Folder()
        self.loose.append(Change(None, self._place(name), node))

    def _rename(self, old, new):
        node = self._present[old]
        self.loose.append(Change(self._place(old), self._place(new), node))
        for name in [name for name in self._present if name == old or name.startswith(f"{old}/")]:
            self._present[new + name[len(old) :]] = self._present.pop(name)

    def _remove(self, name):
        self.loose.append(Change(self._place(name), None, self._present.pop(name)))

    def _sync_folder(self, name):
        folder = self._present["" if name == "." else name]
        for change in [change for change in self.loose if id(folder) in change.folders]:
            self.loose.remove(change)
            apply(change, lambda changed: changed.entries)

    def states(self, dice, count):
        """Yields at most `count` states, the likeliest to be wrong first."""
        loose = self.loose
        choices = [(True,) * len(loose), (False,) * len(loose)]
        if len(loose) > 1:
            only, without = dice.randrange(len(loose)), dice.randrange(len(loose))
            choices.append(tuple(number == only for number in range(len(loose))))
            choices.append(tuple(number != without for number in range(len(loose))))
            choices += [tuple(dice.random() < 0.5 for _ in loose) for _ in range(count)]
        made = 0
        for chosen in choices:
            for fate in range(4):
                if made == count:
                    return
                made += 1
                yield self._state(
                    [change for change, is_kept in zip(loose, chosen, strict=True) if is_kept], fate, dice
                )

    def _state(self, kept, fate, dice):
        entries = {}

        def of(folder):
            return entries.setdefault(id(folder), dict(folder.entries))

        for change in kept:
            apply(change, of)
        found = {}

        def walk(folder, path):
            for name, node in of(folder).items():
                if isinstance(node, Folder):
                    found[path + name] = None
                    walk(node, f"{path}{name}/")
                else:
                    contents = list(node.contents(dice))
                    found[path + name] = contents[min(fate, len(contents) - 1)]

        walk(self.root, "")
        return found


def apply(change, entries_of):
    """Does a change of names to the entries that `entries_of(folder)` gives."""
    if change.removed is not None:
        folder, name = change.removed
        entries_of(folder).pop(name, None)
    if change.added is not None:
        folder, name = change.added
        entries_of(folder)[name] = change.what


@dataclass(frozen=True)
class Loss:
    """A state that a loss of power may leave.

    `saved` is the step of the last save that the run was told of, None for none; `operation` how many were done.
    """

    operation: int
    saved: int | None
    files: dict = field(repr=False)


def losses(before, log, *, per_operation=32, seed=0, only_last=False):
    """Returns the different states that a loss of power between any two operations of a log may leave.

    `before` is what lay on the disk, {path: content, None for a folder}; `only_last` takes the loss after the last one.
    """
    dice = random.Random(seed)
    disk, seen, found = Disk(before), set(), []
    for number, operation in enumerate(log):
        disk.play(operation)
        if only_last and number < len(log) - 1:
            continue
        for files in disk.states(dice, per_operation):
            key = (disk.saved, hash(frozenset(files.items())))
            if key not in seen:
                seen.add(key)
                found.append(Loss(number + 1, disk.saved, files))
    return found


def read_tree(folder):
    """Returns {path: content} of a folder."""
    return {
        file.relative_to(folder).as_posix(): None if file.is_dir() else file.read_bytes()
        for file in sorted(folder.rglob("*"))
    }


def build(folder, files):
    """Makes a folder that holds a state."""
    folder.mkdir(parents=True)
    for name, content in sorted(files.items()):
        file = folder / name
        if content is None:
            file.mkdir(parents=True, exist_ok=True)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
