"""Hosts on one machine: Linux network namespaces that a bridge joins, each with a link of a given speed.

    host 0 (fxdp-h0, 10.77.0.1) ──htb──┐
    host 1 (fxdp-h1, 10.77.0.2) ──htb──┼── bridge fxdp-br (10.77.0.254): the store of the parent
    ...                                ┘

Only root may make them. Both directions of each link have the given rate.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

_BRIDGE = "fxdp-br"
_STORE = "10.77.0.254"


def why_not() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} not found (package iproute2)" if missing else None


@contextmanager
def hosts(count: int, mbit: float) -> Iterator[None]:
    """`count` hosts whose links carry `mbit` Mbit/s in each direction; gone at the end."""
    _remove(count)
    try:
        _run(f"ip link add {_BRIDGE} type bridge")
        _run(f"ip addr add {_STORE}/24 dev {_BRIDGE}")
        _run(f"ip link set {_BRIDGE} up")
        for host in range(count):
            _add(host, mbit)
        yield
    finally:
        _remove(count)


def on_hosts(command: Sequence[str], each: int = 1) -> list[str]:
    """The command that runs `command` on the host of its RANK, `each` ranks per host."""
    inside = f'exec ip netns exec fxdp-h$((RANK / {each})) "$@"'
    return ["sh", "-c", inside, "sh", *command]


def environment() -> Mapping[str, str]:
    """What ranks on hosts need: where the store is, and no memory that real hosts would not share."""
    return {"MASTER_ADDR": _STORE, "GLOO_SOCKET_IFNAME": "eth0", "FXDP_SHARED_MEMORY": "0"}


def _add(host: int, mbit: float) -> None:
    name, outer = f"fxdp-h{host}", f"fxdp-v{host}"
    _run(f"ip netns add {name}")
    _run(f"ip link add {outer} type veth peer name eth0 netns {name}")
    _run(f"ip link set {outer} master {_BRIDGE} up")
    inside = f"ip netns exec {name}"
    _run(f"{inside} ip addr add 10.77.0.{host + 1}/24 dev eth0")
    _run(f"{inside} ip link set eth0 up")
    _run(f"{inside} ip link set lo up")
    for where, device in ((inside, "eth0"), ("", outer)):
        _run(f"{where} tc qdisc add dev {device} root handle 1: htb default 1")
        _run(f"{where} tc class add dev {device} parent 1: classid 1:1 htb rate {mbit:g}mbit burst 64k")


def _remove(count: int) -> None:
    for host in range(count):
        with suppress(subprocess.CalledProcessError):
            _run(f"ip netns del fxdp-h{host}")
        with suppress(subprocess.CalledProcessError):
            _run(f"ip link del fxdp-v{host}")
    with suppress(subprocess.CalledProcessError):
        _run(f"ip link del {_BRIDGE}")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)
