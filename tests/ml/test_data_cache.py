import random
import threading

import numpy
import pytest
import torch

from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.data.cache import cached_folder, content_key


def writer(text="content", counts=None):
    def build(folder):
        if counts is not None:
            counts.append(1)
        (folder / "file.txt").write_text(text)

    return build


def test_a_key_follows_every_part_and_not_their_order():
    assert content_key(a=1, b="x") == content_key(b="x", a=1)
    assert len({content_key(a=1), content_key(a=2), content_key(b=1), content_key(a="1"), content_key(a=None)}) == 5


def test_a_folder_is_built_once_and_found_again(tmp_path):
    counts = []
    for _ in range(3):
        folder = cached_folder("things", "key", writer(counts=counts), tmp_path)
        assert (folder / "file.txt").read_text() == "content"
    assert len(counts) == 1


def test_two_that_want_the_same_folder_build_it_once(tmp_path):
    counts, start = [], threading.Barrier(4)

    def work():
        start.wait()
        cached_folder("things", "key", writer(counts=counts), tmp_path)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(counts) == 1


def test_any_flipped_byte_makes_a_folder_be_built_again(tmp_path):
    counts = []
    file = cached_folder("things", "key", writer(counts=counts), tmp_path) / "file.txt"
    content = file.read_bytes()
    for place in range(len(content)):
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        cached_folder("things", "key", writer(counts=counts), tmp_path)
        assert file.read_bytes() == content
    assert len(counts) == 1 + len(content)


def test_what_a_killed_build_left_is_cleared_away(tmp_path):
    (tmp_path / "things" / ".key-abandoned").mkdir(parents=True)
    cached_folder("things", "key", writer(), tmp_path)
    assert sorted(path.name for path in (tmp_path / "things").iterdir()) == ["key", "key.lock"]


def test_an_interrupted_build_leaves_nothing_that_counts(tmp_path):
    def interrupted(folder):
        (folder / "half.txt").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_folder("things", "key", interrupted, tmp_path)
    assert [path.name for path in (tmp_path / "things").iterdir()] == ["key.lock"]
    assert (cached_folder("things", "key", writer(), tmp_path) / "file.txt").exists()


def test_a_user_cache_that_cannot_be_written_is_told_and_not_needed(tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").write_text("in the way")
    monkeypatch.setattr("forgather.ml.data.cache.default_cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cached_folder("things", "key", writer())
    assert (folder / "file.txt").read_text() == "content"
    assert "prepared data is not kept" in caplog.text


def test_a_cache_dir_that_was_asked_for_must_be_writable(tmp_path):
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(OSError, match="cache"):
        cached_folder("things", "key", writer(), tmp_path / "cache")


def test_a_run_that_builds_a_folder_and_one_that_finds_it_draw_the_same_numbers(tmp_path):
    def draws(folder):
        text = repr([random.random(), numpy.random.rand(), torch.rand(()).item()])
        (folder / "file.txt").write_text(text)

    def numbers_after(seed, root):
        seed_everything(seed)
        text = (cached_folder("things", "key", draws, root) / "file.txt").read_text()
        return text, random.random(), numpy.random.rand(), torch.rand(()).item()

    cold, warm = numbers_after(3, tmp_path), numbers_after(3, tmp_path)
    seed_everything(3)
    untouched = (random.random(), numpy.random.rand(), torch.rand(()).item())
    assert cold == warm == (cold[0], *untouched)
    assert cold[0] == numbers_after(4, tmp_path / "another")[0]
