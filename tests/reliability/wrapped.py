"""A storage round another one: all that is asked of it passes through one method.

Takes a storage; gives one that does the same. Keeps true: each act of the storage and of its open files is one call of
`Wrapped.act`, in whose place a test puts what it notes or does instead.
"""

from forgather.ml.checkpoint.storage import LocalStorage


class WrappedFile:
    """An open file of a `Wrapped`."""

    def __init__(self, storage, file, inner):
        self.storage = storage
        self.file = file
        self.inner = inner

    def write(self, data):
        self.storage.act("write", lambda: self.inner.write(data), self.file, data)

    def sync(self):
        self.storage.act("sync", self.inner.sync, self.file)

    def close(self):
        self.storage.act("close", self.inner.close, self.file)


class Wrapped:
    """A storage that asks another one."""

    OpenFile = WrappedFile

    def __init__(self, inner=None):
        self.inner = inner or LocalStorage()

    def act(self, name, do, *given):
        """Does what was asked for, and returns what it gives; `given` are the paths, and what is written."""
        return do()

    def create(self, file):
        return self.OpenFile(self, file, self.act("create", lambda: self.inner.create(file), file))

    def make_folder(self, folder):
        self.act("make_folder", lambda: self.inner.make_folder(folder), folder)

    def rename(self, old, new):
        self.act("rename", lambda: self.inner.rename(old, new), old, new)

    def remove_file(self, file):
        self.act("remove_file", lambda: self.inner.remove_file(file), file)

    def remove_folder(self, folder):
        self.act("remove_folder", lambda: self.inner.remove_folder(folder), folder)

    def sync_folder(self, folder):
        self.act("sync_folder", lambda: self.inner.sync_folder(folder), folder)

    def free_bytes(self, folder):
        return self.inner.free_bytes(folder)
