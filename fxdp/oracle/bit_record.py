"""The bits of every op of one device's step, and the first op of a rank's step that has others, with why."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fxdp.compiler.watched_step import Call, Moment
from fxdp.ir.graph.draws import kept_random_state, node_draws
from fxdp.ir.graph.graph_text import node_text
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.ops.sum_tree import finish_tree_moments, finish_tree_sum
from fxdp.ir.types.placements import ParamShard, R

_SHIFTS = 8
"""Elements by which copies begin later than aligned memory, to find kernels that depend on this."""

_Bits: TypeAlias = "tuple[tuple[str, tuple[int, ...]], ...]"
"""A digest and the strides of each tensor of a result."""


@dataclass(frozen=True, slots=True)
class BitFault:
    """The first op of a rank whose result has other bits than on one device, though its operands have not.

    Attributes
    ----------
    node, text : name and line of the op.
    moment : the part of the step, the block, and forward or backward.
    rank : the rank.
    why : the reason: random numbers, the order of a sum, the kernel, or an op that is not deterministic.
    """

    node: str
    text: str
    moment: str
    rank: int
    why: str
    location: Location

    def __str__(self) -> str:
        return f"{self.text}\n    on rank {self.rank}, {self.moment}: {self.why}\n    from {self.location}"


@dataclass
class BitRecord:
    """The bits of one device's step by moment and node, with which ranks are compared."""

    found: dict[tuple[Moment, str], _Bits] = field(default_factory=dict)

    def keep(self, moment: Moment, node: fx.Node, call: Call | None, result: Any) -> None:
        """Keep the bits of a result of one device."""
        self.found[moment, node.name] = _bits(result)


@dataclass
class BitWatch:
    """Watches the step of one rank, and keeps the first fault."""

    record: BitRecord
    rank: int
    fault: BitFault | None = None
    place: int = 0
    """How many results one device had before the fault's."""
    compared: int = 0

    def see(self, moment: Moment, node: fx.Node, call: Call | None, result: Any) -> None:
        """Compare a result with that of one device, unless a fault is known or one device has none."""
        expected = self.record.found.get((moment, node.name))
        placement = meta(node).placement
        # what runs once per step may be this rank's part, or a term of a sum
        is_own = isinstance(placement, ParamShard) or (moment.block is None and placement != R)
        if expected is None or self.fault is not None or is_own:
            return
        found = _bits(result)
        self.compared += 1
        if _digests(found) != _digests(expected):
            why = self._why(moment, node, call, _digests(found))
            text, location = node_text(node, ("dp",)), meta(node).location
            self.fault = BitFault(node.name, text, str(moment), self.rank, why, location)
            self.place = list(self.record.found).index((moment, node.name))

    def _why(self, moment: Moment, node: fx.Node, call: Call | None, own: list[str]) -> str:
        """Return the reason for the rank's `own` bits."""
        if call is None:
            return "an input of this part, which reaches the rank with other bits"
        if node_draws(node):
            return "random numbers: the op draws others than on one device"
        if moment.block is None and self._reads_sums(moment, node):
            return "the order of a sum: the values of all blocks have equal bits, their sum has not"
        with kept_random_state():
            first, again = (_digests(_bits(_on_copies(call))) for _ in range(2))
            if first != again:
                return "the op is not deterministic, or keeps a state: each call gives other bits"
            elsewhere = [_digests(_bits(_on_copies(call, shift))) for shift in range(1, _SHIFTS)]
        if any(bits != own for bits in (first, *elsewhere)):
            return "the kernel depends on where operands begin in memory: copies of them give other bits"
        return f"the op reads more than its operands{self._layouts(moment, node, call)}"

    def _reads_sums(self, moment: Moment, node: fx.Node) -> bool:
        """Return whether a node reads a sum over blocks, directly or by values that one device has not."""
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source.target in (finish_tree_sum, finish_tree_moments):
                return True
            if (moment, source.name) not in self.record.found:
                pending += source.all_input_nodes
        return False

    def _layouts(self, moment: Moment, node: fx.Node, call: Call) -> str:
        """Return the operands whose strides are not those of one device, which choose a kernel, too."""
        lines = []
        for source, value in zip(node.all_input_nodes, _operands(node, call), strict=False):
            known = self.record.found.get((moment, source.name))
            if known and isinstance(value, Tensor) and known[0][1] != value.stride():
                lines.append(f"%{source.name} has strides {value.stride()}, on one device {known[0][1]}")
        return f", whose memory layout differs: {'; '.join(lines)}" if lines else ""


def _operands(node: fx.Node, call: Call) -> list[Any]:
    """Return the values of the nodes that a call reads, in the order of `all_input_nodes`."""
    values: Mapping[fx.Node, Any] = {}
    given = pytree.tree_leaves((node.args, node.kwargs))
    had = pytree.tree_leaves(call[1:])
    if len(given) == len(had):
        values = {a: v for a, v in zip(given, had, strict=True) if isinstance(a, fx.Node)}
    return [values.get(source) for source in node.all_input_nodes]


def _on_copies(call: Call, shift: int = 0) -> Any:
    """Return the result of a call on copies of its tensors, `shift` elements after aligned memory begins."""

    def copy(value: Tensor) -> Tensor:
        if not shift or not value.is_contiguous():
            return value.clone()
        return value.new_empty(value.numel() + shift)[shift:].view(value.shape).copy_(value)

    target, args, kwargs = pytree.tree_map_only(Tensor, copy, call)
    return target(*args, **kwargs)


def digest(value: Tensor) -> str:
    """Return a hash of the shape, the dtype and all bits of a tensor."""
    plain = value.detach().resolve_conj().resolve_neg().contiguous().cpu()
    found = hashlib.blake2b(f"{plain.dtype} {tuple(plain.shape)}".encode(), digest_size=16)
    found.update(plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
    return found.hexdigest()


def _bits(result: Any) -> _Bits:
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    return tuple((digest(tensor), tensor.stride()) for tensor in tensors if tensor.layout == torch.strided)


def _digests(bits: _Bits) -> list[str]:
    return [found for found, _ in bits]
