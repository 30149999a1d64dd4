"""Exporting a program and taking the joint forward and backward graph of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx, nn

from fxdp import torch_compat
from fxdp.capture.captured import Route
from fxdp.capture.couplings import BatchSymbols, coupling_table
from fxdp.capture.export.examples import make_examples
from fxdp.capture.export.flat_module import FlatModule, OutputRecord
from fxdp.capture.export.rewrites import part_layers, rejoin, unfused_recurrence
from fxdp.capture.export.skip_marks import route_skips
from fxdp.capture.inputs import Inputs
from fxdp.capture.patches.deferred import deferring
from fxdp.capture.patches.module_state import read_old_values
from fxdp.errors import CaptureError
from fxdp.ir.memory_layout import Arrangement

BatchDims: TypeAlias = Sequence["int | None"]


class BatchSpecializedError(Exception):
    """The traced code fixed the batch size to the example's."""


@dataclass(frozen=True)
class Request:
    """What is to be captured, and how (see `capture`)."""

    program: FlatModule
    module: nn.Module
    inputs: Inputs
    batch: tuple[int | None, ...]
    dynamic: bool
    differentiable: str
    couple: bool
    own_statistics: bool = False
    orders: Sequence[Arrangement] = ()


@dataclass(frozen=True)
class RawJoint:
    """The joint graph as torch gives it, and what is needed to read it."""

    gm: fx.GraphModule
    fakes: tuple[Any, ...]
    """The fake inputs; their sizes are the symbols of the graph."""
    record: OutputRecord
    detached: tuple[int, ...]
    buffers: dict[str, torch.Tensor]
    """The buffers of the exported program, by its own names."""
    cloned: frozenset[int]
    """Outputs that were cloned so that torch does not treat them as aliases."""
    shape_env: torch_compat.ShapeEnv | None
    routes: tuple[Route, ...] = ()


class _Differentiated(nn.Module):
    """Runs an exported program; keeps tangents to the outputs that are to have one."""

    def __init__(self, exported: fx.GraphModule, differentiable: str, loss: int | None) -> None:
        super().__init__()
        self.exported = exported
        self.differentiable = differentiable
        self.loss = loss
        self.detached: tuple[int, ...] = ()
        self.cloned: frozenset[int] = frozenset()

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        """The outputs: those without a tangent detached, those that alias something cloned."""
        outputs = list(torch_compat.replay(self.exported, *tensors))
        scalars = [i for i, output in enumerate(outputs) if _is_loss(output)]
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
            if output.requires_grad and (output._base is not None or output.is_leaf or id(output) in seen):
                outputs[index] = output.clone()
                cloned.add(index)
            seen.add(id(output))
        self.cloned = frozenset(cloned)
        return tuple(outputs)


def _is_loss(output: torch.Tensor) -> bool:
    return output.requires_grad and output.dim() == 0 and output.is_floating_point()


def trace(request: Request, hint: int, *, symbolic: bool) -> RawJoint:
    """Export the program and its backward at a batch of `hint`; with `symbolic` sizes are symbols."""
    program, batch = request.program, request.batch
    examples = make_examples(request.inputs.tensors, batch, hint, request.orders)
    with deferring() as deferred:
        exported = torch.export.export(
            program,
            examples,
            dynamic_shapes=(_dynamic_shapes(examples, batch, request.dynamic),) if symbolic else None,
            strict=False,
        )
    _check_constants(exported)
    module = torch_compat.exported_module(exported)
    read_old_values(module, program.record.assigned)
    deferred.bind(module)
    part_layers(module)
    if not symbolic:
        rejoin(module)
    routes = route_skips(module, program.record.skips)
    fakes = tuple(node.meta["val"] for node in module.graph.nodes if node.op == "placeholder")
    fake_mode = next((fake.fake_mode for fake in fakes), None)
    wrapper = _Differentiated(module, request.differentiable, program.record.loss)
    symbols = batch_symbols(fakes, batch) if symbolic else None
    table = coupling_table(BatchSymbols(symbols, request.own_statistics)) if request.couple else {}
    with unfused_recurrence() if request.couple else contextlib.nullcontext():
        gm = torch_compat.joint_graph(wrapper, fakes, fake_mode, table)
    if symbolic:
        batch_symbols(fakes, batch)
    return RawJoint(
        gm=gm,
        fakes=fakes,
        record=program.record,
        detached=wrapper.detached,
        buffers=dict(wrapper.named_buffers(remove_duplicate=False)),
        cloned=wrapper.cloned,
        shape_env=fake_mode.shape_env if fake_mode is not None else None,
        routes=routes,
    )


def _check_constants(exported: torch.export.ExportedProgram) -> None:
    """Refuse tensors that would silently get no gradient."""
    for name, value in exported.constants.items():
        if isinstance(value, torch.Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise CaptureError(
                f"the model uses a tensor ({name.removeprefix('module.')}, shape {list(value.shape)}) that "
                "requires grad but is no registered parameter: it would get no gradient. Make it an "
                "nn.Parameter of the module"
            )


def batch_symbols(fakes: Sequence[Any], batch: BatchDims) -> frozenset[sympy.Symbol]:
    """The symbols in the batch dims; raises where tracing replaced one by a number."""
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


def _dynamic_shapes(examples: Sequence[torch.Tensor], batch: BatchDims, dynamic: bool) -> tuple[Any, ...]:
    """Per input, which dims export makes symbolic: the batch must stay so, others may."""
    auto, required = torch.export.Dim.AUTO, torch.export.Dim.DYNAMIC
    return tuple(
        {
            dim: required if dim == batch[i] else auto
            for dim, size in enumerate(example.shape)
            if dim == batch[i] or (dynamic and size > 1)
        }
        for i, example in enumerate(examples)
    )
