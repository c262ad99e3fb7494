"""Checks of the network: the name of this machine, its interfaces, a port, and the address of the rendezvous.

gloo listens at the address to which the machine's own name resolves; if that is a loopback address, other machines do
not reach it.
"""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping

from forgather.doctor.result import CheckResult, note, ok, wrong

_SIOCGIFADDR = 0x8915


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each network interface that has one, by the name of the interface."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
            except OSError:  # an interface without an address
                continue
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def check_hostname(hostname: str, addresses: dict[str, str], *, is_alone: bool) -> CheckResult:
    """Checks that the name of this machine resolves, and says which interface gloo and NCCL would take.

    Args:
        hostname: the name of this machine.
        addresses: the address of each interface.
        is_alone: whether the run has one machine.
    """
    name = "hostname"
    try:
        own = _address_of(hostname)
    except OSError as error:
        fix = f"add a line to /etc/hosts: {_outer(addresses) or '127.0.1.1'} {hostname}"
        if is_alone:
            return note(name, f"{hostname} does not resolve; gloo takes the loopback interface", fix)
        return wrong(name, f"{hostname} does not resolve: {error.strerror or error}", fix)
    interface = next((one for one, address in addresses.items() if address == own), None)
    where = interface or ("lo" if own.startswith("127.") else None)
    outer = [one for one, address in addresses.items() if not address.startswith("127.")]
    nccl = f"; NCCL takes {outer[0]}" if outer else ""
    if where is None:
        fix = f"correct /etc/hosts: {_outer(addresses) or 'the address'} {hostname}; or set GLOO_SOCKET_IFNAME"
        return wrong(name, f"{hostname} resolves to {own}, and no interface has this address", fix)
    if own.startswith("127.") and not is_alone:
        fix = f"export GLOO_SOCKET_IFNAME={outer[0]}" if outer else "connect this machine to a network"
        return wrong(name, f"{hostname} resolves to {own}, which other machines do not reach", fix)
    return ok(name, f"{hostname} is {own}; gloo takes {where}{nccl}")


def own_address(hostname: str, addresses: dict[str, str], environ: Mapping[str, str]) -> str:
    """Returns the address at which gloo listens on this machine.

    Args:
        hostname: the name of this machine.
        addresses: the address of each interface.
        environ: the environment variables, of which one selects an interface.
    """
    selected = environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if selected in addresses:
        return addresses[selected]
    try:
        return _address_of(hostname)
    except OSError:
        return "127.0.0.1"


def _address_of(host: str) -> str:
    """Returns the IPv4 address of a machine.

    Raises:
        OSError: if the name does not resolve.
    """
    try:
        return socket.gethostbyname(host)
    except UnicodeError:
        raise OSError("it is not the name of a machine") from None


def _outer(addresses: dict[str, str]) -> str | None:
    return next((address for address in addresses.values() if not address.startswith("127.")), None)


def check_port(port: int) -> CheckResult:
    """Checks that a port of this machine is free.

    Args:
        port: the port of the rendezvous.
    """
    name = "port"
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return wrong(name, f"{port} is taken: {error.strerror or error}", "give another one: --master-port")
    return ok(name, f"{port} is free")


def check_rendezvous(host: str, addresses: dict[str, str], *, node_rank: int) -> CheckResult:
    """Checks that the address of the rendezvous resolves, and that it is an address of machine 0.

    Args:
        host: the address of machine 0.
        addresses: the address of each interface of this machine.
        node_rank: the rank of this machine.
    """
    name = "rendezvous address"
    try:
        address = _address_of(host)
    except OSError as error:
        return wrong(name, f"{host} does not resolve: {error.strerror or error}", "give --master-addr a number")
    is_here = address in addresses.values() or address.startswith("127.")
    if node_rank == 0 and not is_here:
        return wrong(name, f"{host} is {address}, which is no address of this machine, and this is machine 0",
                     "give --master-addr an address of machine 0, and each machine its own --node-rank")  # fmt: skip
    if node_rank != 0 and address.startswith("127."):
        return wrong(name, f"{host} is {address}, which is this machine, and this is machine {node_rank}",
                     "give --master-addr an address of machine 0 that all machines reach")  # fmt: skip
    if node_rank != 0 and is_here:
        return note(name, f"{host} is {address}, an address of this machine too: both are on one computer")
    return ok(name, f"{host} is {address}")
