"""Of torch's export and tracing: from user's code to a graph, and from that to the joint graph."""

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

from fxdp.torch_compat.attention_sums import attention_sums
from fxdp.torch_compat.operators import patched_kernels
from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.torch_ops import aten

__all__ = [
    "CAUSAL_MASK_TEST",
    "CHECKPOINT",
    "EXPORT_PRINT",
    "NODE_SUMMARY",
    "REGIONS",
    "BufferAOTInput",
    "DataDependentOutputException",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "FunctionalTensor",
    "GradAOTOutput",
    "GuardOnDataDependentSymNode",
    "InputMutationAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "TangentAOTInput",
    "as_if_exporting",
    "compile_lock",
    "exported_module",
    "forget_tensors",
    "in_function_transform",
    "joint_graph",
    "larger_constants",
    "replay",
    "tracing_modes",
    "with_effects",
]

CAUSAL_MASK_TEST = (nn.modules.transformer, "_detect_is_causal_mask")
"""Where `nn.TransformerEncoder` and `nn.TransformerDecoder` read a mask to see whether it is causal."""

_GENERATORS = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
CHECKPOINT = (
    torch.utils.checkpoint, next(name for name in _GENERATORS if hasattr(torch.utils.checkpoint, name))
)  # fmt: skip
"""What runs around a checkpointed function, up to its first `yield` before and from there on after it."""

EXPORT_PRINT = (export_trace, "print")
"""By which torch.export prints the graph it had when it failed; a global of that module hides the builtin."""

NODE_SUMMARY = (proxy_tensor, "_extract_tensor_metadata")
"""What makes `meta["tensor_meta"]` of each traced value, and compares its strides with its sizes to do so."""

with_effects = torch.ops.higher_order.with_effects
"""The op that torch wraps around ops with effects, to keep their order by tokens."""


@contextlib.contextmanager
def as_if_exporting() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` and `is_exporting()` say yes, as they do during an export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    with patched(
        Patch(torch.compiler, flag, lambda _: True) for flag in flags if hasattr(torch.compiler, flag)
    ):
        yield


@contextlib.contextmanager
def larger_constants(elements: int) -> Iterator[None]:
    """Let Python read constant tensors of up to so many elements while they are traced; torch lets one."""
    # a number that both modules hold under a name of their own: set in one, the other would not see it
    both = vars(fake_tensor), vars(proxy_tensor)
    with patched((Patch(both, "CONSTANT_NUMEL_LIMIT", lambda _: elements),)):
        yield


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, ...) is under way."""
    return bool(torch._C._are_functorch_transforms_active())


def exported_module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The forward graph of an exported program, without its input checks where torch lets us."""
    # newer torch checks the inputs in a submodule that the graph calls: traced, it would fix sizes
    accepts_guards = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if accepts_guards else program.module()
    assert isinstance(module, fx.GraphModule)
    return module


def forget_tensors(fakes: Sequence[Any]) -> None:
    """Let go of what a trace made fake tensors of: torch swaps no tensor that has weak references."""
    for mode in {id(fake.fake_mode): fake.fake_mode for fake in fakes}.values():
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


REGIONS = frozenset(
    {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}
)
"""What `torch.no_grad()` and `torch.autocast()` become: calls of graphs of their own."""


def replay(module: fx.GraphModule, *args: Any) -> Any:
    """Run an exported graph node by node so that what is traced meanwhile keeps its source lines."""
    with preserve_node_meta():
        return _Replay(module).run(*args)


def tracing_modes() -> tuple[Any, ...]:
    """What of torch's state decides which ops a trace records."""
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
        # attention is traced as the kernel that would run here
        [torch._C._get_flash_sdp_enabled(), torch._C._get_mem_efficient_sdp_enabled()],
        torch._C._get_math_sdp_enabled(),
        backends.cpu.get_cpu_capability(),
        torch.cuda.is_available() and torch.cuda.get_device_capability(),
        backends.mkldnn.enabled,
        backends.mha.get_fastpath_enabled(),
    )


class _Replay(PropagateUnbackedSymInts):
    """Runs the graphs of `torch.no_grad()` and `torch.autocast()` node by node, too."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False  # text that is put below an error's own words

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # called as a module a region would be one opaque call, and its ops had no source lines
        if target in REGIONS:
            args = tuple(_Replay(a).run if isinstance(a, fx.GraphModule) else a for a in args)
        return super().call_function(target, args, kwargs)


def joint_graph(
    module: nn.Module,
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """The joint forward and backward graph of `module`, with descriptors on inputs and outputs.

    Under `torch.no_grad()` it is the forward graph alone. Draws that nobody reads stay: others follow them.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        if any(t.is_meta for t in [*module.parameters(), *module.buffers()]):
            stack.enter_context(_gradients_on_meta())
        # else torch counts random ops as pure, as Inductor has its own, and drops those without readers
        stack.enter_context(inductor_config.patch(fallback_random=True))
        # loops call backward() outside of autocast: traced inside, what the forward kept wide would be cast
        stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        stack.enter_context(attention_sums())
        joint = aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions=decompositions)
        return joint.graph_module


@contextlib.contextmanager
def _gradients_on_meta() -> Iterator[None]:
    """Ops that are made of others are differentiated on the meta device as on any other.

    Those of them that have a kernel for meta (`nll_loss`, `dropout`, `var`, ...) torch's dispatcher in Python
    takes for ops without a derivative, and no gradient passes them: silently, torch 2.11 to 2.13.
    """
    names = _dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    overloads = [_overload(name) for name in names if name.startswith("aten::")]
    key = DispatchKey.AutogradMeta
    changed = [op for op in overloads if DispatchKey.Meta in op.py_kernels and key not in op.py_kernels]
    with patched_kernels([(op, key, op.decompose) for op in changed]):
        yield


def _overload(name: str) -> OpOverload:
    """The op called `aten::name.overload`."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    found: OpOverload = getattr(getattr(aten, packet), overload or "default")
    return found
