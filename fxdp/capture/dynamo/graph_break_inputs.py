"""How the inputs of a graph lie on the ranks where torch breaks a call into several graphs.

an argument of the call            as batch_dims= says
a result of an earlier graph       as its program left it: this rank's rows along a dim, or full
what Python made in between        this rank's rows, as graph_breaks=True promises: along dim 0, or the
                                   dim that batch_dims= gives for all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxdp.capture.batch_dims import resolve_batch_dims
from fxdp.capture.dynamo.dynamo_inputs import GraphInput
from fxdp.errors import InputError
from fxdp.torch_compat import OuterCall

_LIES = "_fxdp_lies"


@dataclass(frozen=True, slots=True)
class KnownPlacement:
    """How a result of a program lies on the ranks."""

    dim: int | None
    """Along which dim this rank has its rows of the batch; None: it is complete on each rank."""
    folded: bool = False
    """Whether the batch is a part of a larger dim, as after `x.flatten(0, 1)`."""


def record_placements(tensor: Tensor, lies: KnownPlacement) -> None:
    """Tell whoever is passed this very tensor, and no view or copy of it, how it lies."""
    tensor.__dict__[_LIES] = lies


def placements_of_tensor(tensor: Any) -> KnownPlacement | None:
    """How a tensor lies that is a result of a program; None for others."""
    found: KnownPlacement | None = getattr(tensor, _LIES, None)
    return found


@dataclass
class GraphBreakInputs:
    """What is known of the tensors that are passed to a graph of a call, and which of them the call made."""

    arguments: Mapping[int, int | None]
    """The batch dim of each tensor among the call's arguments, by its `id`."""
    rows: int | None
    """How many samples this rank's part of the batch has; None where no argument tells."""
    default: int
    """The batch dim of what Python made between graphs."""
    passed: set[str] = field(default_factory=set)
    """The inputs that were asked for and are no arguments of the call."""
    made: list[str] = field(default_factory=list)
    """In words those of them that are no results of a graph, either."""

    @classmethod
    def of(cls, call: OuterCall, batch_dims: Any) -> GraphBreakInputs:
        """By the call that torch breaks, and what its user said of its arguments.

        Raises
        ------
        InputError : a prefix that does not fit the arguments.
        """
        tensors = [leaf for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)]
        dims = resolve_batch_dims(call.args, call.kwargs, batch_dims)
        sizes = {t.shape[dim] for t, dim in zip(tensors, dims, strict=True) if dim is not None}
        default = batch_dims if isinstance(batch_dims, int) else 0
        known = {id(tensor): dim for tensor, dim in zip(tensors, dims, strict=True)}
        return cls(known, sizes.pop() if len(sizes) == 1 else None, default)

    def dim(self, given: GraphInput) -> int | None:
        """The batch dim of an input of a graph.

        Raises
        ------
        InputError : one that cannot be told, or has other sizes than this rank's rows.
        """
        tensor = given.example
        if id(tensor) in self.arguments:
            return self.arguments[id(tensor)]
        if not isinstance(tensor, Tensor):
            return None
        self.passed.add(given.operand.name)
        if tensor.dim() == 0:
            return None
        lies = placements_of_tensor(tensor)
        if lies is None:
            return self._made(given)
        if lies.folded:
            raise InputError(
                f"torch breaks the call where {given.operand.name}, of shape {tuple(tensor.shape)}, has the "
                f"batch as a part of its dim {lies.dim}, of which the next graph cannot know; expected a "
                "batch dim of its own at each break: reshape it after the break, or break elsewhere"
            )
        return lies.dim

    def _made(self, given: GraphInput) -> int:
        shape, dim = tuple(given.example.shape), self.default
        if -len(shape) <= dim < len(shape) and (self.rows is None or shape[dim] == self.rows):
            self.made.append(f"takes {given.operand.name}, which Python made, as rows along dim {dim}")
            return dim % len(shape)
        raise InputError(
            f"{given.operand.name}, of shape {shape}, was made by Python between two graphs of "
            f"torch.compile, where graph_breaks=True promises this rank's rows of the batch in dim {dim}"
            + (f", {self.rows} of them" if self.rows is not None else "")
            + "; expected such rows, or a tensor that is made inside of a graph, passed as an argument, or a "
            "buffer of the model"
        )
