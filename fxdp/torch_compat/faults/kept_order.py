"""Keep Inductor's order of kernels if reordering for peak memory would read a buffer before its last write.

    buf28 = zeros                   buf28 = zeros
    buf28 += ...  at indices        buf36 = buf28 + 1          zeros, plus 1
    buf36 = buf28 + 1               buf28 += ...  at indices

This fault silently zeroed gradients of images that are enlarged twice (`nn.Upsample` of DPT): torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fxdp.torch_compat.patch import Patch, around, patched

__all__ = ["kept_order"]


@contextlib.contextmanager
def kept_order() -> Iterator[None]:
    """Keep the former order inside the block if a reordered kernel would not wait for its inputs."""
    import torch._inductor.memory as inductor_memory

    with patched((Patch(inductor_memory, "reorder_for_peak_memory", around(_reorder)),)):
        yield


def _reorder(plain: Callable[..., list[Any]], nodes: list[Any], *rest: Any) -> list[Any]:
    found = plain(nodes, *rest)
    return found if _waits_for_all(found) else nodes


def _waits_for_all(nodes: Sequence[Any]) -> bool:
    """Return whether each of Inductor's nodes comes after all nodes it depends on."""
    ops = [(at, op) for at, node in enumerate(nodes) for op in node.get_nodes()]
    place = {op.get_name(): at for at, op in ops}
    return all(place.get(name, at) <= at for at, op in ops for name in op.ancestors)
