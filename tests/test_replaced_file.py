"""A file that is replaced is whole at any time: the old one or the new one."""

import errno
import os

import pytest

from forgather.replaced_file import replace_file, write_whole


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


def test_a_result_that_cannot_be_written_whole_leaves_the_earlier_one(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.json").write_bytes(b"old")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(tmp_path / "a.json", b"new")
    assert (b"old", ["a.json"]) == ((tmp_path / "a.json").read_bytes(), os.listdir(tmp_path))


def test_a_result_keeps_the_mode_the_link_and_the_hard_link_of_the_earlier_one(tmp_path):
    file, link, twin = (tmp_path / name for name in ("a.json", "link.json", "twin.json"))
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, b"new")
    assert (b"new", 0o640, True) == (file.read_bytes(), file.stat().st_mode & 0o777, link.is_symlink())
    os.link(file, twin)
    write_whole(file, b"both")
    assert b"both" == twin.read_bytes()


def test_a_pipe_is_written(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_whole(pipe, b"through")
    assert b"through" == os.read(reader, 100)
    os.close(reader)
