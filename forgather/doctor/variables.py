"""Checks of environment variables: names that no library reads, and interfaces that do not exist.

A variable with a wrong name is ignored without a message: a timeout that was set by `NCCL_TIMEOUT`, for example, is not
set. The names that exist are in `nccl_variables.json`, from the libraries of NCCL and PyTorch themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from forgather.doctor.result import CheckResult, ok, wrong
from forgather.spelling import close_matches

_RECORD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nccl_variables.json")
_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "TORCH_GLOO_", "GLOO_")
# What is meant by names that seem to exist, because other libraries or messages suggest them.
_INSTEAD = {
    "NCCL_TIMEOUT": "the timeout of a run is timeout_seconds of distributed_env; the watchdog of PyTorch has "
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "NCCL_TIMEOUT_SECONDS": "the timeout of a run is timeout_seconds of distributed_env",
    "TORCH_NCCL_TIMEOUT": "the timeout of a run is timeout_seconds of distributed_env",
    "NCCL_IFNAME": "NCCL_SOCKET_IFNAME names the interface",
    "GLOO_IFNAME": "GLOO_SOCKET_IFNAME names the interface",
}

# NVIDIA's container images state their version of NCCL with it; nothing is meant to read it.
_OF_IMAGES = ("NCCL_VERSION",)


@cache
def known_variables() -> frozenset[str]:
    """Returns the variables that NCCL, gloo and PyTorch's process groups read."""
    with open(_RECORD, encoding="utf-8") as stream:
        return frozenset(json.load(stream)["names"])


def check_variable_names(environ: Mapping[str, str]) -> CheckResult:
    """Checks that a library reads each variable whose name begins like one of NCCL, gloo or PyTorch.

    Args:
        environ: the environment variables.
    """
    check = "NCCL variables"
    given = sorted(name for name in environ if name.startswith(_PREFIXES) and name not in _OF_IMAGES)
    unknown = [variable for variable in given if variable not in known_variables()]
    if unknown:
        return wrong(check, f"no library reads {', '.join(unknown)}", "; ".join(map(_advice, unknown)))
    return ok(check, f"{', '.join(given)}: all exist" if given else "none is set")


def _advice(variable: str) -> str:
    instead = _INSTEAD.get(variable)
    if instead is None:
        close = close_matches(variable, sorted(known_variables()))
        instead = f"did you mean {close[0]}?" if close else "remove it"
    return f"{variable}: {instead}"


def check_interface_variables(environ: Mapping[str, str], interfaces: Collection[str]) -> Iterator[CheckResult]:
    """Checks that each variable that selects network interfaces selects one.

    Args:
        environ: the environment variables.
        interfaces: the names of the interfaces of this machine.
    """
    for variable, selects in (("NCCL_SOCKET_IFNAME", _nccl_interfaces), ("GLOO_SOCKET_IFNAME", _gloo_interfaces)):
        text = environ.get(variable)
        if text is None:
            continue
        found = selects(text, interfaces)
        if found:
            yield ok(variable, f"{text} selects {', '.join(found)}")
        else:
            have = ", ".join(sorted(interfaces)) or "none"
            yield wrong(variable, f"{text!r} selects no interface", f"name one of: {have}; or unset {variable}")


def _nccl_interfaces(text: str, interfaces: Collection[str]) -> list[str]:
    """Returns the interfaces that NCCL selects: by prefixes, by names after `=`, or all others after `^`.

    Source:
        NCCL user guide, environment variables, NCCL_SOCKET_IFNAME.
    """
    is_excluded, words = text.startswith("^"), text.removeprefix("^")
    is_exact = words.startswith("=")
    names = [word for word in words.removeprefix("=").split(",") if word]

    def is_named(interface: str) -> bool:
        return any(interface == one if is_exact else interface.startswith(one) for one in names)

    return sorted(one for one in interfaces if is_named(one) is not is_excluded)


def _gloo_interfaces(text: str, interfaces: Collection[str]) -> list[str]:
    # gloo takes a list of names; one that does not exist is an error of its own.
    names = [word for word in text.split(",") if word]
    return names if names and all(name in interfaces for name in names) else []
