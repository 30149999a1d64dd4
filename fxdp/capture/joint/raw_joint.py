"""The joint forward and backward graph of an exported forward, as produced by torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch import fx, nn

from fxdp import torch_compat
from fxdp.capture.cross_sample.table import BatchSymbols, cross_sample_table
from fxdp.capture.export.exported import BatchDims, Exported
from fxdp.capture.export.needless_writes import give_new_values
from fxdp.capture.export.rewrites import part_layers, rejoin, unfused_recurrence
from fxdp.capture.joint.sparse_lookups import read_densely
from fxdp.wings import seam


class BatchSpecializedError(Exception):
    """The traced code specialized the batch size to the size of the example."""


@dataclass(frozen=True)
class JointOptions:
    """Options for differentiating a forward graph."""

    differentiable: Literal["loss", "all"] = "loss"
    """Outputs that get a tangent.

    `"loss"`: only the scalar output named `loss`; without one, the first scalar; without scalars, every
    output. `"all"`: every output.
    """
    couple: bool = True
    """True decomposes ops that combine samples into sums and counts; False keeps eager's own ops."""
    own_statistics: bool = False
    """True lets BatchNorm normalize each part of the batch by statistics of the part."""


@dataclass(frozen=True)
class RawJoint:
    """The joint graph as produced by torch, with the context needed to interpret the graph."""

    gm: fx.GraphModule
    exported: Exported
    fakes: tuple[Any, ...]
    """The fake inputs; the sizes of these are the symbols of the graph."""
    detached: tuple[int, ...]
    buffers: dict[str, torch.Tensor]
    """The buffers of the exported graph, by the graph's own names."""
    cloned: frozenset[int]
    """Indices of outputs that were cloned so that torch does not treat them as aliases."""
    shape_env: torch_compat.ShapeEnv | None


class Differentiated(nn.Module):
    """Wrapper that runs an exported program, and detaches outputs that should not get a tangent."""

    def __init__(self, exported: fx.GraphModule, differentiable: str, loss: int | None) -> None:
        super().__init__()
        self.exported = exported
        self.differentiable = differentiable
        self.loss = loss
        self.detached: tuple[int, ...] = ()
        self.cloned: frozenset[int] = frozenset()

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """Return the outputs, detached if they get no tangent, and cloned if they are aliases."""
        outputs = self.run(tensors)
        scalars = [
            i for i, o in enumerate(outputs) if o.requires_grad and o.dim() == 0 and o.is_floating_point()
        ]
        if self.differentiable == "all" or not scalars:
            wanted = [output.requires_grad for output in outputs]
        else:
            chosen = self.loss if self.loss in scalars else scalars[0]
            wanted = [i == chosen for i in range(len(outputs))]
        self.detached = tuple(i for i, o in enumerate(outputs) if o.requires_grad and not wanted[i])
        outputs = [o.detach() if i in self.detached else o for i, o in enumerate(outputs)]
        seen = {id(tensor) for tensor in (*tensors, *self.parameters())}
        cloned = set()
        for index, output in enumerate(outputs):
            # torch would return a view of the aliased value, made outside of the graph
            if output.requires_grad and (output._base is not None or output.is_leaf or id(output) in seen):
                outputs[index] = output.clone()
                cloned.add(index)
            seen.add(id(output))
        self.cloned = frozenset(cloned)
        return tuple(outputs)

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """Run the exported program on these inputs."""
        return list(torch_compat.replay(self.exported, *tensors))


Decompositions: TypeAlias = dict[Any, Callable[..., Any]]
Traced: TypeAlias = tuple[fx.GraphModule, Differentiated]


def trace_joint(exported: Exported, options: JointOptions) -> RawJoint:
    """Trace a forward graph with its backward.

    The trace uses the graph's own fake inputs: with real tensors torch would specialize the batch size again.
    """
    part_layers(exported.gm)
    give_new_values(exported.gm)
    read_densely(exported.gm)
    if not exported.symbolic:
        rejoin(exported.gm)
    fakes = exported.fakes
    fake_mode = next((fake.fake_mode for fake in fakes), None)
    symbols = _batch_symbols(fakes, exported.batch) if exported.symbolic else None
    table = cross_sample_table(BatchSymbols(symbols, options.own_statistics)) if options.couple else {}
    with unfused_recurrence() if options.couple else contextlib.nullcontext():
        gm, wrapper = differentiated(exported, options, table)
    if exported.symbolic:
        _batch_symbols(fakes, exported.batch)  # differentiation may specialize the batch size, too
    return RawJoint(
        gm=gm,
        exported=exported,
        fakes=fakes,
        detached=wrapper.detached,
        buffers=dict(wrapper.named_buffers(remove_duplicate=False)),
        cloned=wrapper.cloned,
        shape_env=fake_mode.shape_env if fake_mode is not None else None,
    )


@seam("startup")
def differentiated(exported: Exported, options: JointOptions, table: Decompositions) -> Traced:
    """Trace a forward graph with its backward; also return the module that was traced."""
    return traced(Differentiated(exported.gm, options.differentiable, exported.loss), exported, table)


def traced(wrapper: Differentiated, exported: Exported, table: Decompositions) -> Traced:
    """Trace the joint graph of this module with the exported graph's own fake inputs."""
    fake_mode = next((fake.fake_mode for fake in exported.fakes), None)
    # what fails within the `no_grad` of a graph leaves gradients off, and the next trace has no backward
    with torch.set_grad_enabled(torch.is_grad_enabled()):
        return torch_compat.joint_graph(wrapper, exported.fakes, fake_mode, table), wrapper


def _batch_symbols(fakes: Sequence[Any], batch: BatchDims) -> frozenset[sympy.Symbol]:
    """Return the symbols in the batch dims; raise if tracing specialized one to a number."""
    found: set[sympy.Symbol] = set()
    for fake, dim in zip(fakes, batch, strict=True):
        if dim is None:
            continue
        size = fake.shape[dim]
        symbols = set() if isinstance(size, int) else size.node.expr.free_symbols
        if not symbols:
            raise BatchSpecializedError(f"the batch size became the constant {size}")
        found |= symbols
    return frozenset(found)
