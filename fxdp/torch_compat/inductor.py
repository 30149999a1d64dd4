"""Internals of Inductor, imported inside the functions because the import takes seconds."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from fxdp.torch_compat.faults.attention_sums import attention_sums
from fxdp.torch_compat.faults.convolution_strides import convolution_strides
from fxdp.torch_compat.faults.counted_masks import counted_masks
from fxdp.torch_compat.faults.kept_order import kept_order
from fxdp.torch_compat.faults.open_strides import open_strides
from fxdp.torch_compat.faults.selected_offsets import selected_offsets
from fxdp.torch_compat.torch_ops import aten

__all__ = [
    "CppBuilding", "compile_with_inductor", "cpp_building", "handing_on", "inductor_folder",
    "joint_passes_for_inference", "library_built_before", "partition_for_inductor", "trace_for_inductor",
]  # fmt: skip


def trace_for_inductor(
    function: Callable[..., Any], fake_mode: FakeTensorMode, primals: Sequence[Any], tangents: Sequence[Any]
) -> fx.GraphModule:
    """Trace `function(primals, tangents)` with the decompositions that Inductor expects."""
    import torch._inductor.lowering  # the decomposition of max pooling needs this module without importing it
    from torch._inductor.decomposition import select_decomp_table

    # the Python dispatcher decomposes ops whose C++ kernels would fix symbolic sizes
    with (
        fake_mode, tracing(TracingContext(fake_mode)), torch.no_grad(), enable_python_dispatcher(),
        attention_sums(), convolution_strides(),
    ):  # fmt: skip
        traced = make_fx(
            function,
            decomposition_table=select_decomp_table(),
            tracing_mode="real",  # the inputs are fake already
            _allow_non_fake_inputs=True,  # constants of the model are real
        )(list(primals), list(tangents))
    assert isinstance(traced, fx.GraphModule)
    traced.graph.set_codegen(fx.graph.CodeGen())  # flat results, not the traced function's structure
    return traced


@contextlib.contextmanager
def handing_on(meta: Mapping[str, Any]) -> Iterator[None]:
    """Copy metadata entries that torch propagates (as `recompute`) to all nodes traced inside the block."""
    made = fx.Graph().placeholder("marks")
    made.meta = dict(meta)
    with fx_traceback.preserve_node_meta(), fx_traceback.set_current_meta(made):
        yield


def partition_for_inductor(
    joint: fx.GraphModule, inputs: Sequence[Any], outputs: int, fake_mode: FakeTensorMode, budget: float = 1.0
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Run Inductor's joint graph passes and the min-cut partitioner; return the forward and backward graphs.

    The first `outputs` outputs belong to the forward. `budget` is the share of activations that may be saved:
    0 for the inputs alone, 1 for the fastest choice.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V

    # random ops become Inductor's own, whose seeds are created under `V`'s fake mode
    chosen = functorch_config.patch(activation_memory_budget=budget)
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), fake_mode, torch.no_grad(), chosen:
        forward, backward = _matched(partition_fn, joint, list(inputs), num_fwd_outputs=outputs)
    return forward, backward


def _matched(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run Inductor's joint graph passes, without the pattern matcher if a pattern fails on an unbacked size.

    One failing pattern is the softmax of values that are divided by a temperature.
    """
    import torch._inductor.config as inductor_config

    try:
        return run(*args, **kwargs)
    except GuardOnDataDependentSymNode:
        with inductor_config.patch(pattern_matcher=False):
            return run(*args, **kwargs)


def joint_passes_for_inference(
    gm: fx.GraphModule, device: torch.device, fake_mode: FakeTensorMode
) -> fx.GraphModule:
    """Run Inductor's joint graph passes on a program without backward."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), fake_mode, torch.no_grad():
        return _matched(_recursive_joint_graph_passes, gm, input_device=device)  # type: ignore[no-any-return]


def compile_with_inductor(
    gm: fx.GraphModule, inputs: Sequence[Any], fake_mode: FakeTensorMode, *, backward: bool, inference: bool,
    fixed: int, in_order: bool = False, donated: Sequence[int] = (),
    around: AbstractContextManager[None] | None = None,
) -> tuple[Callable[[list[Any]], Any], list[tuple[Any, ...] | None]]:  # fmt: skip
    """Compile a forward or backward graph; return a callable that takes a list, and the known output strides.

    The first `fixed` inputs are parameters and buffers, whose addresses do not change between steps. With
    `in_order` the code runs in the order of the graph, except for fusion. A backward may overwrite the inputs
    numbered `donated`, which have no later reader. Inductor runs inside of `around`.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.virtualized import V

    _call_products_into_buffers()
    _keep_published_shards()
    settings = {name: value for name, value in _MOVES.items() if hasattr(inductor_config, name)}
    if in_order:
        settings |= {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    gm.meta["mends"] = tuple(mend.__name__ for mend in _MENDS)  # Inductor's cache could return faulty code
    gm.meta["donated"] = tuple(donated)  # Inductor's cache key lacks the donated inputs
    context = TracingContext(fake_mode)
    if donated:
        # Inductor reads these two fields of torch's forward metadata
        context.fw_metadata = SimpleNamespace(  # type: ignore[assignment]
            bw_donated_idxs=list(donated), static_input_indices=list(range(fixed))
        )
    with (
        tracing(context),
        TracingContext.report_output_strides() as strides,
        torch.no_grad(),
        V.set_fake_mode(fake_mode),
        torch._C._DisableAutocast(),  # otherwise a traced pattern of Inductor would be cast, too
        around or contextlib.nullcontext(),
        inductor_config.patch(settings),
        contextlib.ExitStack() as mended,
    ):
        for mend in _MENDS:
            mended.enter_context(mend())
        compiled = compile_fx_inner(
            gm,
            list(inputs),
            static_input_idxs=tuple(range(fixed)),
            is_backward=backward,
            is_inference=inference,
            graph_id=next(_graph_ids),  # CUDA graphs identify programs by this number
            boxed_forward_device_index=BoxedDeviceIndex(None),
        )
    return compiled, list(strides or [])


_MENDS = (
    attention_sums, convolution_strides, counted_masks, kept_order, open_strides, selected_offsets,
)  # fmt: skip
"""Workarounds that are active while Inductor compiles; their names are part of the cache key."""

_MOVES: Mapping[str, Any] = {
    "aten_distributed_optimizations.enable_simple_overlap": False,  # on by default since torch 2.14
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_all_reduces_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "_fuse_ddp_communication": False,
    "_micro_pipeline_tp": False,
}
"""Inductor's settings that move or merge collectives by cost estimates of one rank's sizes, turned off.

The order of collectives is part of the plan, which all ranks decide equally.
"""

_graph_ids = itertools.count()


def _call_products_into_buffers() -> None:
    """Make Inductor call the kernel of `addmm_`, which Inductor's lowerings do not include.

    By default Inductor does the same, except if the environment variable `CI` is set: then Inductor raises,
    because the op has a decomposition (which would compute the product in a separate buffer). Inductor also
    copies transposed operands, which this kernel takes as they are.
    """
    from torch._inductor.lowering import lowerings, make_fallback

    if aten.addmm_.default not in lowerings:
        make_fallback(aten.addmm_.default, warn=False)  # type: ignore[no-untyped-call]


def _keep_published_shards() -> None:
    """Prevent Inductor from reusing buffers that other ranks read as published shards."""
    from torch._inductor.lowering import fallback_handler, lowerings, register_lowering
    from torch._inductor.virtualized import V

    op = torch.ops.fxdp.publish_shards.default
    if op in lowerings:
        return
    call = fallback_handler(op)  # type: ignore[no-untyped-call]

    def lower(*args: Any) -> Any:
        made = call(*args)
        V.graph.never_reuse_buffers.add(made.get_name())
        return made

    register_lowering(op, type_promotion_kind=None)(lower)


def inductor_folder() -> str:
    """Return Inductor's default cache folder, which need not exist, without regard to the environment."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


class CppBuilding(NamedTuple):
    """The parts of Inductor that build and load C++ kernels."""

    programs: Any
    """The module that defines `AsyncCompile`, of which each generated program creates an instance."""
    extension_cache: Any
    """Builder and loader of extension modules, keyed by source."""
    failed: type[Exception]
    """The exception of a failed C++ compilation."""
    data_of: int
    """The address of a function `void* (PyObject*)` that returns the data pointer of a tensor."""


def cpp_building() -> CppBuilding:
    """Import and return the parts of Inductor that build C++."""
    from torch._inductor import async_compile, codecache, exc

    return CppBuilding(
        programs=async_compile,
        extension_cache=codecache.CppPythonBindingsCodeCache,
        failed=exc.CppCompileError,
        data_of=torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr,  # type: ignore[attr-defined]
    )


def library_built_before(extension_cache: Any, path: str, key: str) -> Any:
    """Load an extension module that Inductor's cache has built under this key; None if the file is gone."""
    from torch._inductor.codecache import LOCK_TIMEOUT, get_lock_dir
    from torch.utils._filelock import FileLock

    if not os.path.exists(path):
        return None
    with FileLock(os.path.join(get_lock_dir(), f"{key}.lock"), timeout=LOCK_TIMEOUT):  # not half built
        try:
            return extension_cache._load_library(path, key)
        except (ImportError, OSError):
            return None
