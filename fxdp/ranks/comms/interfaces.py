"""This machine's addresses, and by which of them other machines reach it."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

_ASK_ADDRESS = 0x8915  # SIOCGIFADDR, of Linux
_IPV6 = "/proc/net/if_inet6"
_GLOBAL = "00"  # scope of an IPv6 address that other machines may use
_FAR = ("192.0.2.1", "2001:db8::1")  # kept free for documentation: only the way there is asked for
_PORT = 9


def own_address(master: str | None, several_hosts: bool = True) -> str:
    """The address of the interface by which this machine reaches `master` (or, without one, itself).

    The machine that has the store may know its own name as 127.0.1.1, as Debian's /etc/hosts says: no way
    there leads by an interface that others could reach. Then it is the one to all other networks.
    """
    found = next(filter(None, map(_way_to, resolved(master or socket.gethostname(), _PORT))), None)
    if found is None or not is_loopback(found):
        return found or "127.0.0.1"
    if not several_hosts or master is None or _names_loopback(master):
        return found
    outward = [_way_to(target) for far in _FAR for target in resolved(far, _PORT)]
    return next((a for a in (*outward, *interfaces()) if a and not is_loopback(a)), found)


def interfaces() -> dict[str, str]:
    """The interface that has each address of this machine, those of IPv4 first; without loopback."""
    found: dict[str, str] = {}
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _ASK_ADDRESS, struct.pack("256s", name.encode()[:15]))
            found[socket.inet_ntoa(answer[20:24])] = name
    with contextlib.suppress(OSError), open(_IPV6) as lines:
        for line in lines:
            digits, _, _, scope, _, name = line.split()
            if scope == _GLOBAL:
                found[str(ipaddress.IPv6Address(bytes.fromhex(digits)))] = name
    return {address: name for address, name in found.items() if not is_loopback(address)}


def is_loopback(address: str) -> bool:
    """Whether only this machine itself reaches it by this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def knows_itself_as_loopback() -> bool:
    """Whether this machine's own name is the address of nobody else's network: gloo would listen there."""
    addresses = [target[4][0] for target in resolved(socket.gethostname(), _PORT)]
    return not addresses or is_loopback(addresses[0])


def resolved(host: str, port: int) -> Sequence[tuple[int, int, int, str, tuple[str, int]]]:
    """Where to connect to for a host by its name or address; nothing for one that nobody knows."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return ()


def _way_to(target: tuple[int, int, int, str, tuple[str, int]]) -> str | None:
    """This machine's address on the way there; a datagram socket sends nothing on connect."""
    with contextlib.suppress(OSError), socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        probe.connect(target[4])
        return str(probe.getsockname()[0])
    return None


def _names_loopback(master: str) -> bool:
    if master == "localhost":
        return True
    try:
        return is_loopback(master)
    except ValueError:  # a name
        return False
