"""The transport of a row of CPUs: messages for small values, memory for large ones, gloo between hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.ranks.comms.link_speed import is_cheaper, measured
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, OutOfOrderError
from fxdp.ranks.comms.row_transport import OpenRow, RowTransport, open_transport
from fxdp.ranks.comms.sequence_log import SequenceLog
from fxdp.torch_compat import register_group
from fxdp.transport.group import MessageGroup
from fxdp.transport.host_places import host_places
from fxdp.transport.host_sums import HostSums
from fxdp.transport.shared_memory import SharedMemory
from fxdp.transport.shared_windows import SharedWindows


class _CpuTransport(RowTransport):
    """Messages between the ranks of a row, and memory that the ranks of a host share.

    Attributes
    ----------
    memory : large sums and gathers in shared memory; None where the ranks are on several hosts.
    hosts : sums of ranks on several hosts, through memory within each; None where gloo alone is as fast.
    windows : shards of parameters that all ranks of the host map; None where the ranks share no memory.
    """

    def __init__(self, row: OpenRow) -> None:
        super().__init__(row)
        self._size = len(row.among)
        self._places = host_places(row.control, list(row.among), row.gloo and row.shares_memory)
        one = self._places.one and self._size > 1
        self.memory = SharedMemory(row.messages, self._size, self._places.direct) if one else None
        self.windows = None if self.memory is None else SharedWindows(row.messages, self._size)
        self.hosts: HostSums | None = None
        self._mates: Messages | None = None
        self._group: MessageGroup | None = None
        self._name = ""
        if self._places.several:
            place = row.messages.rank
            here = self._places.of(place)
            self._mates = row.connect(here, len(self._places.hosts))
            self.share = here.index(place)
            if self.share < self._places.shares:
                self.across = [host[self.share] for host in self._places.hosts]

    def measure(self, groups: dict[str, dist.ProcessGroup]) -> None:
        """Choose the cheapest way for large sums: gloo alone, or memory within hosts and gloo between."""
        across = groups.get("across")
        hosts = None if self._mates is None else HostSums(self._mates, self._places, across)
        if self.memory is not None:
            return
        self.cost = self._by_gloo(groups)
        if hosts is None or self.cost is None:
            return
        over_hosts = measured(lambda value: hosts.finish(hosts.start(value)), self.control)
        if is_cheaper(over_hosts, self.cost):
            self.cost, self.hosts = over_hosts, hosts
            return
        hosts.close()
        if (unused := groups.pop("across", None)) is not None:
            dist.destroy_process_group(unused)

    def join(
        self,
        name: str,
        names: Sequence[int | str],
        explain: Callable[[LinkBrokenError | OutOfOrderError], Exception],
        sequence_log: SequenceLog,
    ) -> None:
        """Register the group by which programs send small values."""
        if self.hosts is not None:
            self.hosts.messages.names, self.hosts.messages.sequence_log = list(names), sequence_log
        self._name = f"{name}/messages"
        self._group = MessageGroup(self.messages, self._size, explain, self.memory, self.hosts, self.windows)
        register_group(self._name, self._group)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of `Mesh` that passes decide by."""
        memory = self.memory
        return {
            "messages": True,
            "link": self.cost,
            "shared_memory": memory is not None,
            "direct_sums": memory is not None and memory.direct,
            "host_sums": self.hosts is not None,
        }

    @property
    def group_name(self) -> str:
        """The name of the process group for small values."""
        return self._name

    @property
    def handed_bytes(self) -> int:
        """The bytes of this rank's values that went by messages and through shared memory so far."""
        return 0 if self._group is None else self._group.handed_bytes

    def shard_memory(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a local shard that all ranks of the host map; None where they share none."""
        return None if self.windows is None else self.windows.memory(count, dtype)

    def settle(self) -> None:
        """Wait until all ranks have read the shards that this call or backward has published."""
        if self.windows is not None and self._group is not None:
            with self._group.explained():
                self.windows.settle()

    def cut(self) -> None:
        """Make each wait between the ranks of this host end with an error."""
        if self.hosts is not None:
            self.hosts.messages.cut()

    def abandon(self) -> None:
        """Close the connections of a forked child within this host."""
        if self.hosts is not None:
            self.hosts.messages.abandon()

    def close(self) -> None:
        """Give back memory and the connections within this host."""
        for one in (self.memory, self.windows, self.hosts):
            if one is not None:
                one.close()
        if self.hosts is None and self._mates is not None:
            self._mates.close()


def extend() -> None:
    """Extend the core's seam; called once, when fxdp is imported."""
    open_transport.extend(lambda _, row: _CpuTransport(row))
