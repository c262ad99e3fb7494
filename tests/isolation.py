"""Fixtures that keep a test apart from the user's own settings."""

import pytest


@pytest.fixture(autouse=True)
def private_folders(tmp_path_factory, monkeypatch):
    """Each test has a cache and a config folder of its own, and none of the user's settings."""
    home = tmp_path_factory.mktemp("home")
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
