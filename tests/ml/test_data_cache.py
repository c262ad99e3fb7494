import copy
import json
import os
import random
import threading

import numpy
import pytest
import torch
from datasets import Dataset

from forgather.ml import data
from forgather.ml.checkpoint.rng import seed_everything
from forgather.ml.data.cache import cached_folder, content_key
from forgather.ml.data.tokenizer import tokenizer_digest
from tests.ml.packed_rows import symbols
from tests.ml.test_chat_tokens import byte_pairs

CHAT = '{{"prompt": "{}{}", "completion": "{}"}}'


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


def _rewritten(file, content):
    """Replaces the content of a file by one of the same size, and keeps its time of change."""
    before = file.stat()
    assert len(content) == before.st_size
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


ROWS = {"text_files": "{}{} {}", "json_lines": '{{"text": "{}{} {}"}}', "csv_files": "text\n{}{} {}", "chats": CHAT}


@pytest.mark.parametrize("name", ROWS)
def test_a_file_that_was_edited_is_read_again_although_size_and_time_are_the_same(name, tmp_path):
    read, file = getattr(data, name), tmp_path / "rows.jsonl"
    file.write_text(ROWS[name].format("one", 1, "two"))
    first = read(str(file))
    kept = (first._fingerprint, first[:])
    _rewritten(file, ROWS[name].format("one", 2, "two").encode())
    second = read(str(file))
    assert kept[0] != second._fingerprint and kept[1] != second[:]
    # The same content has the same fingerprint, wherever the file is.
    (tmp_path / "copies").mkdir()
    copy = tmp_path / "copies" / "rows.jsonl"
    copy.write_bytes(file.read_bytes())
    assert second._fingerprint == read(str(copy))._fingerprint


def test_a_tokenizer_that_was_edited_on_disk_makes_a_new_entry(tmp_path):
    symbols().save_pretrained(tmp_path / "t")
    rows, file = Dataset.from_dict({"text": ["abcdefgh"]}), tmp_path / "t" / "tokenizer.json"
    first = data.tokenize(rows, data.load_tokenizer(tmp_path / "t"), 4, cache_dir=tmp_path)
    facts = json.loads(file.read_text())
    vocab = facts["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    text = json.dumps(facts)
    file.write_text(text.ljust(file.stat().st_size))
    second = data.tokenize(rows, data.load_tokenizer(tmp_path / "t"), 4, cache_dir=tmp_path)
    assert (
        first._fingerprint != second._fingerprint and first["input_ids"][:].tolist() != second["input_ids"][:].tolist()
    )


@pytest.mark.parametrize(("name", "value"), [("split_special_tokens", True), ("truncation_side", "left")])
def test_settings_that_are_not_in_the_serialized_tokenizer_are_part_of_its_digest(name, value):
    changed = copy.deepcopy(symbols())
    assert tokenizer_digest(symbols()) == tokenizer_digest(changed)
    setattr(changed, name, value)
    assert tokenizer_digest(symbols()) != tokenizer_digest(changed)


@pytest.mark.parametrize("library", ["tokenizers.__version__", "transformers.__version__"])
def test_another_version_of_the_library_makes_a_new_entry(library, tmp_path, monkeypatch):
    rows = data.chats(_chats(tmp_path))
    first = data.tokenize_chats(rows, byte_pairs("chatml"), 64, cache_dir=tmp_path)
    monkeypatch.setattr(library, "0.0.1")
    assert first._fingerprint != data.tokenize_chats(rows, byte_pairs("chatml"), 64, cache_dir=tmp_path)._fingerprint


def test_packed_mixtures_are_entries_of_their_own(tmp_path):
    parts = {name: data.chats(_chats(tmp_path, name)) for name in ("ab", "cd")}
    mixed = [data.mix(parts, weights={"ab": weight, "cd": 1}) for weight in (1, 2)]
    made = [
        data.tokenize_chats(rows, byte_pairs("chatml"), length, packing=packing, cache_dir=tmp_path)
        for rows in mixed for length in (64, 65) for packing in (False, True)
    ]  # fmt: skip
    assert len(made) == len({rows._fingerprint for rows in made})


def _chats(folder, name="ab"):
    file = folder / f"{name}.jsonl"
    file.write_text("".join(CHAT.format(name, number, "x") + "\n" for number in range(6)))
    return file
