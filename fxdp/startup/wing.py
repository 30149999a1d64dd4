"""Extend the core's seams with faster first steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from fxdp.capture.joint.raw_joint import differentiated
from fxdp.capture.joint.symbolic_joint import annotated_joint, symbolic_joint
from fxdp.capture.patches.patch_tables import around_capture
from fxdp.lowering.inductor.compile import around_inductor, callable_of, compile_phase, lower_inductor
from fxdp.lowering.inductor.forward_backward import around_lowering, partition
from fxdp.lowering.inductor.start import Start, go_on, start_of
from fxdp.lowering.inductor.trace import op_caller
from fxdp.startup.artifacts.cached_joint import cached_joint
from fxdp.startup.artifacts.cached_pair import lower_cached
from fxdp.startup.artifacts.compiled_code import without_profiling
from fxdp.startup.building.vector_instructions import built_as_code
from fxdp.startup.memoized.lazy_codegen import lazy_codegen
from fxdp.startup.memoized.memoized_fakes import memoized_fakes
from fxdp.startup.memoized.memoized_indices import memoized_indices
from fxdp.startup.memoized.memoized_sizes import memoized_sizes
from fxdp.startup.memoized.memoized_stacks import memoized_stacks
from fxdp.startup.memoized.op_traces import OpTraces
from fxdp.startup.memoized.predicted_forward import predicted_trace
from fxdp.startup.regions.compile_by_region import compile_by_region
from fxdp.startup.repeated.joint_by_layer import joint_by_layer
from fxdp.startup.repeated.pair_by_layer import pair_by_layer
from fxdp.torch_compat import is_on

_Context = Callable[[], AbstractContextManager[None]]

_CAPTURE: tuple[_Context, ...] = (memoized_sizes, memoized_fakes, memoized_stacks, lazy_codegen)
_LOWERING: tuple[_Context, ...] = (lazy_codegen, memoized_sizes)
_INDUCTOR: tuple[_Context, ...] = (built_as_code, memoized_indices)


def _all_of(contexts: tuple[_Context, ...]) -> Callable[[_Context], AbstractContextManager[None]]:
    """Return an extension that enters all of these contexts."""

    @contextlib.contextmanager
    def entered(own: _Context) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in (own, *contexts):
                stack.enter_context(context())
            yield

    return entered


def _start_of(
    own: Callable[[int, Callable[[], None]], Start], rank: int = 0, barrier: Callable[[], None] = go_on
) -> Start:
    """Extend `start_of`: ranks share the builds of kernels."""
    if not is_on("cold_start"):
        return own(rank, barrier)
    # here, so that a run without it loads none of it
    from fxdp.startup.building.cold_start import ColdStart

    return ColdStart(barrier, backward_first=rank % 2 == 1)


def _op_caller(_own: Callable[[], Any]) -> Any:
    return OpTraces().call


def _callable_of(_own: Callable[[Any], Any], code: Any) -> Any:
    return without_profiling(code)


def extend() -> None:
    """Extend each seam; called once, when fxdp is imported."""
    around_capture.extend(_all_of(_CAPTURE))
    differentiated.extend(predicted_trace)
    annotated_joint.extend(joint_by_layer)
    symbolic_joint.extend(cached_joint)
    around_lowering.extend(_all_of(_LOWERING))
    op_caller.extend(_op_caller)
    partition.extend(pair_by_layer)
    compile_phase.extend(compile_by_region)
    around_inductor.extend(_all_of(_INDUCTOR))
    callable_of.extend(_callable_of)
    lower_inductor.extend(lower_cached)
    start_of.extend(_start_of)
