from __future__ import annotations

import socket

import pytest

from fxdp.ranks.comms import interfaces
from fxdp.ranks.comms.interfaces import _is_loopback, own_address


def test_who_is_meant_to_be_reached_here_only_has_the_address_of_here() -> None:
    for master in ("127.0.0.1", "localhost", "no such host.invalid"):
        assert _is_loopback(own_address(master))


def test_a_machine_that_calls_itself_loopback_gives_the_address_of_its_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Debian's /etc/hosts: others know this machine by its name, too, but where it is."""
    known = socket.getaddrinfo

    def resolve(host: str, *rest: object, **options: object) -> object:
        return known("127.0.1.1" if host == "login-node" else host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interfaces, "_FAR", ())
    monkeypatch.setattr(interfaces, "interfaces", lambda: {"10.1.2.3": "eth7"})
    assert own_address("login-node") == "10.1.2.3"
    assert _is_loopback(own_address("login-node", several_hosts=False))


def test_interfaces_are_those_that_others_reach() -> None:
    found = interfaces.interfaces()
    assert set(found.values()) <= {name for _, name in socket.if_nameindex()}
    assert not any(map(_is_loopback, found))
