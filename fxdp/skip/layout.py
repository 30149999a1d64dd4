"""The routes of skips between partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

from fxdp.skip.declarations import Declaration, skippables_in_order
from fxdp.skip.namespace import Namespace


class SkipLayout:
    """The skip routes between partitions.

    Attributes
    ----------
    by_ns_name : `(namespace, name)` to the partitions `(prev_j, next_j)` that stash and pop the skip.
    by_partition : for each partition the popped skips as `(prev_j, namespace, name)`, in ascending order.
    """

    def __init__(
        self, num_partitions: int, skip_routes: Mapping[tuple[Namespace | None, str], tuple[int, int]]
    ) -> None:
        self.by_ns_name = dict(skip_routes)
        self.by_partition: list[list[tuple[int, Namespace | None, str]]] = [
            sorted((prev_j, ns, name) for (ns, name), (prev_j, next_j) in skip_routes.items() if next_j == j)
            for j in range(num_partitions)
        ]

    def copy_policy(self, next_j: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """Yield the skips to copy to a partition as `(prev_j, namespace, name)`, from the first source on."""
        return (route for route in self.by_partition[next_j] if route[0] != next_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Return whether a skip leaves its partition; False for an unknown skip."""
        prev_j, next_j = self.by_ns_name.get((ns, name), (-1, -1))
        return prev_j != next_j


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Return the skip layout of consecutive partitions, from the declarations of skippables at any depth.

    Raises
    ------
    TypeError : `partitions` is not a list of modules, or pops have no earlier stash; the message lists all.
    """
    if not isinstance(partitions, Iterable) or not all(isinstance(p, nn.Module) for p in partitions):
        raise TypeError(f"inspect_skip_layout takes a list of modules, got {partitions!r}")
    routes: dict[tuple[Namespace | None, str], tuple[int, int]] = {}
    stashed: dict[tuple[Namespace | None, str], int] = {}
    faults: list[str] = []
    for j, partition in enumerate(partitions):
        for together in skippables_in_order(partition, repeated=True):
            for one in together:
                stashed |= dict.fromkeys(one.skippable.stashable(), j)
            for one in together:
                faults += _take(one, j, stashed, routes)
    if faults:
        listing = "\n".join(f"* {fault}" for fault in faults)
        raise TypeError(f"one or more pairs of stash and pop do not match:\n\n{listing}")
    return SkipLayout(len(partitions), routes)


def _take(
    one: Declaration,
    j: int,
    stashed: dict[tuple[Namespace | None, str], int],
    routes: dict[tuple[Namespace | None, str], tuple[int, int]],
) -> Iterator[str]:
    """Turn the pops of a skippable into routes; yield a message for each pop without a stash."""
    for key in one.skippable.poppable():
        if key in stashed:
            routes[key] = (stashed.pop(key), j)
        else:
            yield f"'{one.path}' of partition {j} declared '{key[1]}' as poppable but it was not stashed"
