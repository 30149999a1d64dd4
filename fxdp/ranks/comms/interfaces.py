"""Network addresses of this machine, and the choice of one that other machines can reach."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence

_ASK_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
_IPV6 = "/proc/net/if_inet6"
_GLOBAL = "00"  # scope of an IPv6 address that is valid beyond this machine
_FAR = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: only the route there is looked up
_PORT = 9


def own_address(master: str | None, several_hosts: bool = True) -> str:
    """Return the address of the interface by which this machine reaches `master` (or, without one, itself).

    The machine with the store may resolve its own name to 127.0.1.1, as in Debian's /etc/hosts: no different
    machine could reach that address. Then the result is the interface to all remaining networks.
    """
    found = next(filter(None, map(_way_to, resolved(master or socket.gethostname(), _PORT))), None)
    if found is None or not _is_loopback(found):
        return found or "127.0.0.1"
    if not several_hosts or master is None or _names_loopback(master):
        return found
    outward = [_way_to(target) for far in _FAR for target in resolved(far, _PORT)]
    return next((a for a in (*outward, *interfaces()) if a and not _is_loopback(a)), found)


def interfaces() -> dict[str, str]:
    """Return the interface name of each address of this machine, IPv4 first; without loopback."""
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
    return {address: name for address, name in found.items() if not _is_loopback(address)}


def _is_loopback(address: str) -> bool:
    """Return whether only this machine itself is reached by this address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def knows_itself_as_loopback() -> bool:
    """Return whether this machine's own name resolves to loopback: gloo would listen there."""
    addresses = [target[4][0] for target in resolved(socket.gethostname(), _PORT)]
    return not addresses or _is_loopback(addresses[0])


def resolved(host: str, port: int) -> Sequence[tuple[int, int, int, str, tuple[str, int]]]:
    """Return addresses to connect to, for a host name or address; empty for an unknown host."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)  # type: ignore[return-value]
    except OSError:
        return ()


def _way_to(target: tuple[int, int, int, str, tuple[str, int]]) -> str | None:
    """Return this machine's address on the route to a target; a datagram socket sends nothing on connect."""
    with contextlib.suppress(OSError), socket.socket(target[0], socket.SOCK_DGRAM) as probe:
        probe.connect(target[4])
        return str(probe.getsockname()[0])
    return None


def _names_loopback(master: str) -> bool:
    if master == "localhost":
        return True
    try:
        return _is_loopback(master)
    except ValueError:  # a name
        return False
