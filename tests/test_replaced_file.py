"""A file that is replaced is whole at any time: the old one or the new one."""

import errno
import os

import pytest

from forgather.replaced_file import replace_file


def test_a_file_is_written_and_replaced_and_readable_for_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for content in (b"first", b"", b"second"):
        replace_file("a.json", content)
        assert content == (tmp_path / "a.json").read_bytes()
    assert 0o644 == (tmp_path / "a.json").stat().st_mode & 0o777
    assert ["a.json"] == os.listdir(tmp_path)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.json").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "a.json", b"new")
    assert b"old" == (tmp_path / "a.json").read_bytes()
    assert ["a.json"] == os.listdir(tmp_path)
