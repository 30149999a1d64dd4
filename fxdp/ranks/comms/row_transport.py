"""How values travel between the ranks of a row: by its process groups, or by more than these.

opening.py    connections ── open_transport ── groups (and `across`) ── measure ── Comms ── join
wing there    `fxdp/transport/cpu_transport.py` adds messages, shared memory and sums within hosts
wing absent   gloo or NCCL alone carries all
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.ir.network.link_cost import LinkCost
from fxdp.ranks.comms.channel import Channel
from fxdp.ranks.comms.link_speed import measured
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, OutOfOrderError
from fxdp.ranks.comms.sequence_log import SequenceLog
from fxdp.wings import seam


@dataclass(frozen=True)
class OpenRow:
    """A row of ranks whose connections are open, and whose groups are not made yet.

    Attributes
    ----------
    control : short messages between all ranks of the mesh.
    messages : small values between the ranks of the row.
    among : the index in the mesh of each rank of the row.
    gloo : whether the row's groups are gloo's.
    shares_memory : whether `FXDP_SHARED_MEMORY` allows shared memory.
    connect : opens connections of their own between some ranks of the row, by their indices in it.
    """

    control: Channel
    messages: Messages
    among: Sequence[int]
    gloo: bool
    shares_memory: bool
    connect: Callable[[Sequence[int], int], Messages]


class RowTransport:
    """The transport of a row by its process groups alone.

    Attributes
    ----------
    across : the indices in the row of the ranks that one more process group must join; empty for none.
    share : a number that tells this rank's `across` from those of the other ranks of its host.
    cost : the cost of a sum over the network; None where it was not measured.
    """

    across: Sequence[int] = ()
    share: int = 0
    cost: LinkCost | None = None

    def __init__(self, row: OpenRow) -> None:
        # not `row` itself: `connect` holds torch's store, which must end with the process group
        self.control, self.messages, self._gloo = row.control, row.messages, row.gloo

    def measure(self, groups: dict[str, dist.ProcessGroup]) -> None:
        """Measure what sums cost; all ranks call this once their groups are made."""
        self.cost = self._by_gloo(groups)

    def _by_gloo(self, groups: Mapping[str, dist.ProcessGroup]) -> LinkCost | None:
        if not self._gloo or "reduce" not in groups:
            return None
        reduce = groups["reduce"]
        return measured(lambda value: reduce.allreduce([value]).wait(), self.control)

    def join(
        self,
        name: str,
        names: Sequence[int | str],
        explain: Callable[[LinkBrokenError | OutOfOrderError], Exception],
        sequence_log: SequenceLog,
    ) -> None:
        """Begin to serve programs under a name; `explain` turns a broken connection into a user's error."""

    @property
    def facts(self) -> dict[str, Any]:
        """The fields of `Mesh` that passes decide by."""
        return {"messages": False, "link": self.cost}

    @property
    def handed_bytes(self) -> int:
        """The bytes of this rank's values that went outside of process groups so far."""
        return 0

    @property
    def group_name(self) -> str:
        """The name of the process group for small values; empty where there is none."""
        return ""

    def shard_memory(self, count: int, dtype: torch.dtype) -> Tensor | None:
        """Return memory for a local shard that all ranks of the host map; None where there is none."""
        return None

    def settle(self) -> None:
        """Wait until all ranks have read the shards that this call or backward has published."""

    def cut(self) -> None:
        """Make each wait of this transport end with an error."""

    def close(self) -> None:
        """Give back memory and connections."""

    def abandon(self) -> None:
        """Close the connections of a forked child, without a word to the other ranks."""


@seam("transport")
def open_transport(row: OpenRow) -> RowTransport:
    """Open the transport of a row; all ranks of the mesh call this at the same point."""
    return RowTransport(row)
