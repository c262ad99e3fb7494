"""The pages of the process that runs the tests: what it wrote stays as it is, and what it starts is as a user starts it."""

import os

import pytest

from tests.large_pages import MALLOC, ask_malloc, collapse


def test_what_was_written_stays(tmp_path):
    written = [bytes([number]) * 100_000 for number in range(100)]
    collapse()
    assert [bytes([number]) * 100_000 for number in range(100)] == written


def test_a_process_of_xdist_does_not_hand_it_on(monkeypatch):
    name, value = MALLOC
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv(name, value)
    ask_malloc(starts_workers=False)
    assert name not in os.environ


@pytest.mark.parametrize("starts_workers", [True, False])
def test_only_processes_of_xdist_are_asked(monkeypatch, starts_workers):
    name, _ = MALLOC
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    ask_malloc(starts_workers=starts_workers)
    assert starts_workers == (name in os.environ)


def test_what_a_user_has_set_himself_stays(monkeypatch):
    name, _ = MALLOC
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv(name, "glibc.malloc.check=0")
    ask_malloc(starts_workers=True)
    assert "glibc.malloc.check=0" == os.environ[name]
