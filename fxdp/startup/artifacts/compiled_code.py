"""Inductor's compiled code as bytes for another process, and the environment that the code depends on."""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch

from fxdp.startup.artifacts.program_header import with_light_header
from fxdp.startup.building.vector_instructions import built_as_code, code_settings
from fxdp.torch_compat.exporting import tracing_modes
from fxdp.torch_compat.shortcuts import is_on

__all__ = ["code_bytes", "code_environment", "code_of_bytes", "library_environment", "without_profiling"]

_SETTINGS = ("torch._inductor.config", "torch._inductor.config_comms", "torch._functorch.config")
_PASSES = (
    "joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass", "_pre_fusion_custom_pass", "_post_fusion_custom_pass",
    "custom_partitioner_fn",
)  # fmt: skip
"""Settings that hold code of the user."""


def code_environment() -> str | None:
    """Return all state beside the graph that compiled code depends on.

    None if Inductor caches no code, or runs custom passes.
    """
    import torch._inductor.config as inductor_config

    if inductor_config.force_disable_caches or not inductor_config.fx_graph_cache:
        return None
    if any(getattr(inductor_config, name, None) for name in _PASSES):
        return None
    # Inductor's own cache key has the same content, but imports all code generators, which takes as long as
    # loading the code of a small model
    common = sys.modules.get("torch._inductor.codegen.common")
    if any(getattr(common, "custom_backend_passes", {}).values()):
        return None
    settings = [_settings(name) for name in _SETTINGS]
    threads = torch.get_num_threads(), os.cpu_count()
    return repr((settings, sorted(code_settings().items()), threads, tracing_modes()))


def library_environment() -> str | None:
    """Return all state beside the source that kernel libraries depend on; None if Inductor caches no code."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    known = code_environment()
    return None if known is None else f"{known} {pick_vec_isa()}"


def _settings(name: str) -> list[tuple[str, Any]]:
    try:
        config: Any = importlib.import_module(name)
    except ImportError:  # older releases lack some
        return []
    if hasattr(config, "_cache_config_serializer") and config.inductor_choices_class is None:
        # since torch 2.15 this imports all code generators, to write the class of choices even if there is
        # none
        ignored = tuple(config._cache_config_ignore_prefix)
        return sorted(one for one in config.get_config_copy().items() if not one[0].startswith(ignored))
    return sorted(config.save_config_portable(ignore_private_configs=False).items())


def code_bytes(code: Any) -> bytes:
    """Serialize compiled code like Inductor: as source, from which kernels are found or rebuilt.

    Raises
    ------
    TypeError : the code holds objects that are not in the source, or is not Inductor's.
    """
    from torch._inductor.codecache import code_hash
    from torch._inductor.output_code import CompiledFxGraph

    if isinstance(code, _WithoutProfiling):
        code = code.code
    if type(code) is not CompiledFxGraph:
        raise TypeError(f"{type(code).__name__} is no code of Inductor's")
    if code.constants or code.frozen_param_names or code.torchbind_constants:
        raise TypeError("the code holds tensors of its own")
    plain = copy.copy(code)
    plain.prepare_for_serialization()
    plain.source_code = with_light_header(code.source_code)
    plain.cache_key = code_hash(plain.source_code)  # the file's name; Inductor's file keeps another
    plain.runnable_graph_str = plain.inductor_post_grad_graph_str = ""  # for torch's logs: half of the bytes
    return pickle.dumps(plain)


def code_of_bytes(content: bytes) -> Callable[[list[Any]], Any]:
    """Load serialized code, ready to run."""
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    code = pickle.loads(content)
    constants = CompiledFxGraphConstants()
    with built_as_code():  # these settings decide where kernels are found
        code.after_deserialization(constants)
        code.post_compile([], constants, {**code.fx_kwargs, "cudagraphs": BoxedBool(False)})
    made: Callable[[list[Any]], Any] = without_profiling(code)
    return made


def without_profiling(code: Any) -> Any:
    """Return Inductor's code in a wrapper that skips Inductor's bookkeeping, 4 us per call.

    On devices other than CPU the code is returned unchanged, because Inductor times the first calls for a
    cache.
    """
    from torch._inductor.output_code import CompiledFxGraph

    plain = type(code) is CompiledFxGraph and {*code.device_types} <= {"cpu"}
    return (
        _WithoutProfiling(code)
        if plain and hasattr(code, "current_callable") and is_on("without_profiling")
        else code
    )


class _WithoutProfiling:
    """Compiled code that calls Inductor's bookkeeping only under Inductor's debugging or torch's profiler.

    Inductor's debug module is not imported just to check for debugging.
    """

    def __init__(self, code: Any) -> None:
        self.code = code

    def __call__(self, inputs: list[Any]) -> Any:
        if _is_profiled() or _is_recorded():
            importlib.import_module("torch._inductor.debug")
            return self.code(inputs)
        return self.code.current_callable(inputs)


def _is_recorded() -> bool:
    return bool(getattr(sys.modules.get("torch._inductor.debug"), "RECORD_GRAPH_EXECUTION", False))


def _is_profiled() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)
