"""Fixtures that keep a test apart from the user's own settings."""

import itertools
import re

import pytest

NUMBERS = itertools.count()


def own_folder(factory, name):
    """Returns a new folder.

    `mktemp` reads the names of all folders before it makes one more: ten milliseconds where there are thousands.
    """
    folder = factory.getbasetemp() / "own" / f"{name}{next(NUMBERS)}"
    folder.mkdir(mode=0o700, parents=True)
    return folder


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """A folder of this test, as pytest's."""
    return own_folder(tmp_path_factory, re.sub(r"\W", "_", request.node.name)[:30])


@pytest.fixture(autouse=True)
def private_folders(tmp_path_factory, monkeypatch):
    """Each test has a cache and a config folder of its own, and none of the user's settings."""
    home = own_folder(tmp_path_factory, "home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    monkeypatch.delenv("FORGATHER_CACHE", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return home


@pytest.fixture
def warm_cache(session_cache, private_folders, monkeypatch):
    """What one test read of a library, the next one need not read: for tests of many configs, none of them of caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(session_cache))


@pytest.fixture
def warm_settings(warm_cache, tmp_path_factory, monkeypatch):
    """As `warm_cache`, with a config folder that all tests share: cached listings belong to one config folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "no_settings"))
