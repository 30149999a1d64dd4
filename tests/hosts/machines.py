"""Hosts on one machine: Linux network namespaces that a bridge joins, each with a link of a given speed.

    host 0 (fxdp-PID-0-0, ...1) ──htb──┐
    host 1 (fxdp-PID-0-1, ...2) ──htb──┼── bridge (...254), where the process that made them is
    ...                                ┘

Each host has its own process ids, name and /etc/hosts, as real ones have: so ranks of two hosts cannot open
one another's memory. Only root may make them. Both directions of each link have the given rate.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ETC = Path("/etc/netns")


def why_not() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces are made by root only"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (packages iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--pid", "--fork", "--mount-proc", "true"], check=False)
    return "this container may not make namespaces" if tried.returncode else None


@dataclass
class Machines:
    """The hosts of one network.

    Attributes
    ----------
    count : how many there are.
    ipv6 : whether they have IPv6 addresses only.
    known_as : what a host takes for its own address; by default the right one.
    number : of this network among those of this process.
    parent : the address of the process that made them.
    """

    count: int
    ipv6: bool = False
    known_as: str | None = None
    number: int = field(default_factory=itertools.count().__next__)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def address(self, host: int) -> str:
        """By which the other hosts reach it."""
        net = (os.getpid() * 8 + self.number) % 40_000
        return f"fd77:{net:x}::{host + 1:x}" if self.ipv6 else f"10.{77 + net // 250}.{net % 250}.{host + 1}"

    @property
    def parent(self) -> str:
        return self.address(253)

    @property
    def failed(self) -> bool:
        """Whether a command that was started on a host has ended by an error."""
        return any(process.poll() not in (None, 0) for process in self._started)

    def name(self, host: int) -> str:
        """Of its namespace, and its host name."""
        return f"fxdp-{os.getpid()}-{self.number}-{host}"

    def of_rank(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on the host of its RANK, where each has one."""
        return self._inside(f"fxdp-{os.getpid()}-{self.number}-$RANK", command)

    def _inside(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on a host; `host` is a name, or what a shell makes one of."""
        own = 'hostname "$0"; exec "$@"'
        apart = "unshare --uts --pid --fork --kill-child --mount-proc"
        return ["sh", "-c", f'exec ip netns exec "{host}" {apart} sh -c "$0" "{host}" "$@"', own, *command]

    def start(self, command: Sequence[str], output: Path, **environment: str) -> None:
        """Run a command, which may `enter` hosts; all that still runs at the end is killed."""
        with output.open("wb") as log:
            self._start(command, stdout=log, stderr=log, env={**os.environ, **environment})

    def place(self, host: int) -> int:
        """The id of a process on a host, by which others can `enter` it."""
        there = self._start(self._inside(self.name(host), ["sleep", "infinity"])).pid
        while True:  # until that process has its own name, and its host
            assert not self.failed, f"nothing can be started on host {host}"
            with contextlib.suppress(OSError, ValueError):
                first = int(Path(f"/proc/{there}/task/{there}/children").read_text())
                if Path(f"/proc/{first}/comm").read_text() == "sleep\n":
                    return first
            time.sleep(0.005)

    def _start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent, **how
        )
        self._started.append(process)
        return process

    def vanish(self, host: int) -> None:
        """Its link is down: what it sends goes nowhere, and nobody tells it or the others."""
        _run(f"ip link set {self._outer(host)} down")

    def slow_down(self, host: int, mbit: float) -> None:
        """Its link carries `mbit` Mbit/s in each direction from now on."""
        for where, device in ((f"ip netns exec {self.name(host)} ", "eth0"), ("", self._outer(host))):
            rate = f"htb rate {mbit:g}mbit burst 64k"
            _run(f"{where}tc qdisc del dev {device} root", check=False)
            _run(f"{where}tc qdisc add dev {device} root handle 1: htb default 1")
            _run(f"{where}tc class add dev {device} parent 1: classid 1:1 {rate}")

    def kill(self, host: int, process: int) -> None:
        """SIGKILL to the process of this id on a host."""
        space = os.stat(f"/run/netns/{self.name(host)}").st_ino
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                here = (status.parent / "ns/net").stat().st_ino == space
                if here and re.search(rf"^NSpid:.*\t{process}$", status.read_text(), re.M):
                    os.kill(int(status.parent.name), signal.SIGKILL)

    def open(self, mbit: float | None) -> None:
        _remove_those_of_the_dead()
        mask, nodad = (64, " nodad") if self.ipv6 else (24, "")
        _run(f"ip link add {self._bridge} type bridge")
        _run(f"ip addr add {self.parent}/{mask} dev {self._bridge}{nodad}")
        _run(f"ip link set {self._bridge} up")
        for host in range(self.count):
            name, outer = self.name(host), self._outer(host)
            (_ETC / name).mkdir(parents=True, exist_ok=True)
            (_ETC / name / "hosts").write_text(self._known_to(host))
            _run(f"ip netns add {name}")
            _run(f"ip link add {outer} type veth peer name eth0 netns {name}")
            _run(f"ip link set {outer} master {self._bridge} up")
            inside = f"ip netns exec {name}"
            _run(f"{inside} ip addr add {self.address(host)}/{mask} dev eth0{nodad}")
            _run(f"{inside} ip link set eth0 up")
            _run(f"{inside} ip link set lo up")
            if mbit is not None:
                self.slow_down(host, mbit)

    def close(self) -> None:
        """End all that runs on the hosts, and the hosts."""
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for host in range(self.count):
            _remove(self.name(host))
        _run(f"ip link del {self._bridge}", check=False)

    def _known_to(self, host: int) -> str:
        """The /etc/hosts of a host."""
        known = {self.name(h): self.address(h) for h in range(self.count)}
        known[self.name(host)] = self.known_as or self.address(host)
        return "127.0.0.1 localhost\n::1 localhost\n" + "".join(f"{a} {n}\n" for n, a in known.items())

    @property
    def _bridge(self) -> str:
        return f"fx{os.getpid()}n{self.number}"

    def _outer(self, host: int) -> str:
        return f"fx{os.getpid()}n{self.number}v{host}"


@contextlib.contextmanager
def machines(
    count: int, *, mbit: float | None = None, ipv6: bool = False, known_as: str | None = None
) -> Iterator[Machines]:
    """`count` hosts whose links carry `mbit` Mbit/s in each direction; gone at the end."""
    made = Machines(count, ipv6, known_as)
    try:
        made.open(mbit)
        yield made
    finally:
        made.close()


def enter(place: int) -> None:
    """Go on in a fork on the host of this process; the process that called it ends as its fork does."""
    spaces = [os.open(f"/proc/{place}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "pid", "mnt")]
    libc = ctypes.CDLL(None, use_errno=True)
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the host of process {place}")
        os.close(space)
    if fork := os.fork():  # which alone has the host's process ids
        _, status = os.waitpid(fork, 0)
        os._exit(1 if status else 0)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _remove(name: str) -> None:
    """A host, and with its namespace its link."""
    _run(f"ip netns del {name}", check=False)
    shutil.rmtree(_ETC / name, ignore_errors=True)


def _remove_those_of_the_dead() -> None:
    """What processes have left that were killed."""
    for folder in _ETC.glob("fxdp-*"):
        _, pid, number, _ = folder.name.split("-")
        if not Path(f"/proc/{pid}").exists():
            _remove(folder.name)
            _run(f"ip link del fx{pid}n{number}", check=False)


def _run(command: str, *, check: bool = True) -> None:
    subprocess.run(command.split(), check=check, capture_output=True)
