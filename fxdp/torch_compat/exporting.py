"""Internals of export and tracing: from the user's code to a graph, and from there to the joint graph."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._C import DispatchKey, _dispatch_get_registrations_for_dispatch_key
from torch._dynamo.convert_frame import compile_lock
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.export import _trace as export_trace
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, PropagateUnbackedSymInts
from torch.fx.traceback import preserve_node_meta

from fxdp.torch_compat.faults.attention_sums import attention_sums
from fxdp.torch_compat.operators import patched_kernels
from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.torch_ops import aten

__all__ = [
    "CAUSAL_MASK_TEST", "CHECKPOINT", "EXPORT_PRINT", "LAZY_CUDA_CALL", "NODE_SUMMARY", "REGIONS",
    "BufferAOTInput", "DataDependentOutputException", "ForwardTokenAOTInput", "ForwardTokenAOTOutput",
    "FunctionalTensor", "GradAOTOutput", "GuardOnDataDependentSymNode", "InputMutationAOTOutput",
    "ParamAOTInput", "PlainAOTInput", "PlainAOTOutput", "TangentAOTInput", "as_if_exporting", "compile_lock",
    "exported_module", "forget_tensors", "in_function_transform", "joint_graph", "larger_constants", "replay",
    "tracing_modes", "with_effects",
]  # fmt: skip

CAUSAL_MASK_TEST = (nn.modules.transformer, "_detect_is_causal_mask")
"""The function by which `nn.TransformerEncoder` and `nn.TransformerDecoder` detect a causal mask."""

_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
CHECKPOINT = (
    torch.utils.checkpoint, next(name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name))
)  # fmt: skip
"""The generator around a checkpointed function: runs to the first `yield` before, and resumes after."""

EXPORT_PRINT = (export_trace, "print")
"""The function by which torch.export prints a failed export's graph; a module global hides the builtin."""

LAZY_CUDA_CALL = (torch.cuda.random, "_lazy_call")
"""The function by which each function of `torch.cuda` that seeds generators does so once CUDA is in use."""

NODE_SUMMARY = (proxy_tensor, "_extract_tensor_metadata")
"""The function that makes `meta["tensor_meta"]` of each traced value, comparing strides with sizes."""

with_effects = torch.ops.higher_order.with_effects
"""The op that torch wraps around ops with effects, to keep their order by tokens."""


@contextlib.contextmanager
def as_if_exporting() -> Iterator[None]:
    """Make `torch.compiler.is_compiling()` and `is_exporting()` return True, as during an export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    with patched(
        Patch(torch.compiler, flag, lambda _: True) for flag in flags if hasattr(torch.compiler, flag)
    ):
        yield


@contextlib.contextmanager
def larger_constants(elements: int) -> Iterator[None]:
    """Let Python read constant tensors of up to `elements` elements while tracing; torch allows one."""
    # both modules hold the limit under a name of their own: set in one, the other would not change
    both = vars(fake_tensor), vars(proxy_tensor)
    with patched((Patch(both, "CONSTANT_NUMEL_LIMIT", lambda _: elements),)):
        yield


def in_function_transform() -> bool:
    """Return whether a transform of `torch.func` (vmap, grad, ...) is active."""
    return bool(torch._C._are_functorch_transforms_active())


def exported_module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """Return the forward graph of an exported program, without input checks if torch allows."""
    # newer torch checks inputs in a submodule of the graph: traced, the checks would fix sizes
    accepts_guards = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if accepts_guards else program.module()
    assert isinstance(module, fx.GraphModule)
    return module


def forget_tensors(fakes: Sequence[Any]) -> None:
    """Drop a trace's weak references to real tensors: torch swaps no tensor that has weak references."""
    for mode in {id(fake.fake_mode): fake.fake_mode for fake in fakes}.values():
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


REGIONS = frozenset(
    {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}
)
"""The ops that `torch.no_grad()` and `torch.autocast()` become: calls of nested graphs."""


def replay(module: fx.GraphModule, *args: Any) -> Any:
    """Run an exported graph node by node, keeping source lines on the nodes traced meanwhile."""
    with preserve_node_meta():
        return _Replay(module).run(*args)


def tracing_modes() -> tuple[Any, ...]:
    """Return the state of torch that decides which ops a trace records."""
    backends = torch.backends
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        # attention is traced as the kernel that would run on this device
        [torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()],
        torch._C._get_math_sdp_enabled(),
        backends.cpu.get_cpu_capability(),
        torch.cuda.is_available() and torch.cuda.get_device_capability(),
        backends.mkldnn.enabled,
        backends.mha.get_fastpath_enabled(),
    )


class _Replay(PropagateUnbackedSymInts):
    """Interpreter that also runs graphs of `torch.no_grad()` and `torch.autocast()` node by node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # text that torch appends to an error's message

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # called as a module, a region would be one opaque call, and its ops would have no source lines
        if target in REGIONS:
            args = tuple(_Replay(a).run if isinstance(a, fx.GraphModule) else a for a in args)
        return super().call_function(target, args, kwargs)


def joint_graph(
    module: nn.Module,
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Return the joint forward and backward graph of `module`, with descriptors on inputs and outputs.

    Under `torch.no_grad()` the result is the forward graph alone. Random ops without readers stay, because
    they advance the generator for later random ops.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
            stack.enter_context(_gradients_on_meta())
        # otherwise torch treats random ops as pure, because Inductor has its own, and drops unused ones
        stack.enter_context(inductor_config.patch(fallback_random=True))
        # loops call backward() outside of autocast: traced inside, values kept in float32 would be cast
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        stack.enter_context(attention_sums())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions=decompositions)
        return joint.graph_module


@contextlib.contextmanager
def _gradients_on_meta() -> Iterator[None]:
    """Differentiate composite ops on the meta device as on any other device.

    For composite ops with a meta kernel (`nll_loss`, `dropout`, `var`, ...), torch's Python dispatcher
    assumes that there is no derivative, and silently drops the gradient (torch 2.11 to 2.13).
    """
    names = _dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    overloads = [_overload(name) for name in names if name.startswith("aten::")]
    key = DispatchKey.AutogradMeta
    changed = [op for op in overloads if DispatchKey.Meta in op.py_kernels and key not in op.py_kernels]
    with patched_kernels([(op, key, op.decompose) for op in changed]):
        yield


def _overload(name: str) -> OpOverload:
    """Return the op called `aten::name.overload`."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(aten, packet), overload or "default")
    return found
