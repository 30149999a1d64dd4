"""The only file that imports torch internals; works on torch 2.11 to 2.13.

Everything private that fxdp needs passes through here, so that a new torch release is one file to read.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._C._distributed_c10d import Store
from torch._decomp import decomposition_table as torch_decompositions
from torch._dynamo.exc import UserError
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    GuardOnDataDependentSymNode,
    PropagateUnbackedSymInts,
    ShapeEnv,
)
from torch.fx.traceback import preserve_node_meta

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BufferAOTInput",
    "ConstraintViolationError",
    "DataDependentOutputException",
    "FakeTensorMode",
    "GradAOTOutput",
    "GuardOnDataDependentSymNode",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "Store",
    "TangentAOTInput",
    "UserError",
    "default_store",
    "exported_module",
    "joint_graph",
    "replay",
    "torch_decompositions",
]


def exported_module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The forward graph of an exported program, without its input checks where torch lets us."""
    accepts_guards = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if accepts_guards else program.module()
    assert isinstance(module, fx.GraphModule)
    return module


def replay(module: fx.GraphModule, *args: Any) -> Any:
    """Run an exported graph node by node so that what is traced meanwhile keeps its source lines."""
    with preserve_node_meta():
        return PropagateUnbackedSymInts(module).run(*args)


def joint_graph(
    module: nn.Module,
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """The joint forward and backward graph of `module`, with descriptors on inputs and outputs.

    Under `torch.no_grad()` it is the forward graph alone.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        joint = aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions=decompositions)
        return joint.graph_module


def default_store() -> Store:
    """The key-value store of the default process group, which must exist."""
    store = distributed_c10d._get_default_store()
    assert isinstance(store, Store)
    return store
