"""Access to the Hugging Face Hub, with a quick fallback to the local cache.

If the Hub cannot be reached, `hub_access` makes the Hugging Face libraries work offline: they read their cache
immediately, instead of retrying for most of a minute.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

from forgather.rules import is_path

_SECONDS = 5.0


def folder_problem(name: str) -> str | None:
    """Returns why a name that can only be a path cannot be loaded as a folder, or None if nothing is wrong with it.

    The Hugging Face libraries would treat such a name as a repository on the Hub and report a network error.
    """
    if not is_path(name) or os.path.isdir(os.path.expanduser(name)):
        return None
    return "it is a file, not a folder" if os.path.isfile(os.path.expanduser(name)) else "there is no such folder"


def lookup_hint(name: str) -> str:
    """Returns a hint for a model or data set name that could not be loaded."""
    if os.path.isdir(os.path.expanduser(name)):
        return "its files are damaged or incomplete: save or download it again"
    if is_path(name):
        return f"name a folder that exists; the working folder is {os.getcwd()!r}"
    return f"check the name and the connection; a folder of that name is not in {os.getcwd()!r} either"


@contextmanager
def hub_access() -> Iterator[None]:
    """Context manager in which the Hugging Face libraries work offline if the Hub cannot be reached.

    Units:
        The connection attempt takes at most 5 seconds.
    """
    # `datasets` copies the constant when it is imported, so its module has to be changed too.
    modules: list[Any] = [constants]
    if datasets_config := sys.modules.get("datasets.config"):
        modules.append(datasets_config)
    before = [module.HF_HUB_OFFLINE for module in modules]
    offline = constants.HF_HUB_OFFLINE or not _reachable()
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = module.HF_HUB_OFFLINE or offline
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _reachable() -> bool:
    if getproxies():
        return True  # the proxy resolves the name and makes the connection
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
    except OSError:
        return False
    return True
