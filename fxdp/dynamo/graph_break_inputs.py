"""Placements of a graph's inputs if torch breaks a call into several graphs.

an argument of the call            as batch_dims= gives
a result of an earlier graph       as returned by that graph's program: this rank's rows of a dim, or full
a tensor made by Python between    this rank's rows, as graph_breaks=True promises: along dim 0, or the
graphs                             dim that batch_dims= gives for all
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxdp.capture.batch_dims import resolve_batch_dims
from fxdp.dynamo.dynamo_inputs import GraphInput
from fxdp.errors import InputError
from fxdp.torch_compat.outer_call import OuterCall

_LIES = "_fxdp_lies"


@dataclass(frozen=True, slots=True)
class KnownPlacement:
    """Placement of a program's result on the ranks."""

    dim: int | None
    """The dim along which this rank has local rows of the batch; None: the tensor is full on each rank."""
    folded: bool = False
    """True if the batch is a part of a larger dim, as after `x.flatten(0, 1)`."""


def record_placements(tensor: Tensor, lies: KnownPlacement) -> None:
    """Record a placement on this tensor object; views and copies of the tensor do not inherit the record."""
    tensor.__dict__[_LIES] = lies


def placements_of_tensor(tensor: Any) -> KnownPlacement | None:
    """Return the recorded placement of a program's result; None for any tensor without a record."""
    found: KnownPlacement | None = getattr(tensor, _LIES, None)
    return found


@dataclass
class GraphBreakInputs:
    """Placements of the tensors that are passed to a graph of a call, and names of tensors made by Python."""

    arguments: Mapping[int, int | None]
    """The batch dim of each tensor among the call's arguments, by its `id`."""
    rows: int | None
    """Number of samples in this rank's part of the batch; None if no argument has a batch dim."""
    default: int
    """The batch dim of tensors that Python makes between graphs."""
    passed: set[str] = field(default_factory=set)
    """Names of the graph's inputs that are not arguments of the call."""
    made: list[str] = field(default_factory=list)
    """Descriptions of the inputs in `passed` that are not results of a graph, either."""

    @classmethod
    def of(cls, call: OuterCall, batch_dims: Any) -> GraphBreakInputs:
        """Read the placements from the call that torch breaks, and the user's `batch_dims`.

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
        """Return the batch dim of an input of a graph.

        Raises
        ------
        InputError : an input with an unknown batch dim, or with a size that differs from this rank's rows.
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
