"""Torch's random numbers in the user's code that a graph cannot hold: seeds, and generators of its own.

    noise = torch.randn(4, generator=self.generator)    a graph cannot hold the generator
    torch.manual_seed(0); noise = torch.randn(4)        a graph cannot seed: each step would draw new numbers

Seeding is refused if the model draws random numbers.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fxdp.capture.locations import is_user_file, location_of_call, location_of_frame
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import LAZY_CUDA_CALL, Patch, around, calling_frame

_SEEDS = frozenset({"manual_seed", "seed", "set_state"})
"""Methods of a generator that seed it; `set_rng_state` and `fork_rng` call the last."""
_OF_TORCH = tuple(inspect.getfile(module) for module in (torch.random, torch.cuda.random))
_OF_GATE = (__file__, around.__code__.co_filename)
_BETWEEN = (*_OF_TORCH, *_OF_GATE, contextlib.__file__, functools.__file__)


def seedings(found: list[tuple[str, Location]]) -> tuple[Patch, ...]:
    """Return patches that record calls that seed torch's generators while the user's code is exported.

    All functions of torch that seed the CPU's generator find it in one place; those of CUDA use one function.
    """

    def note() -> None:
        frame: FrameType | None = calling_frame()
        how = ""
        while frame is not None and _is_between(file := frame.f_code.co_filename):
            if file in _OF_TORCH:
                how = _public_name(frame)
            frame = frame.f_back
        if frame is not None and is_user_file(frame.f_code.co_filename):
            found.append((how, location_of_frame(frame)))

    def lazy_call(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        note()
        return plain(*args, **kwargs)

    return (
        Patch(torch.random, "default_generator", lambda plain: _NotedGenerator(plain, note)),
        Patch(*LAZY_CUDA_CALL, around(lazy_call)),
    )


class _NotedGenerator:
    """Stand-in for torch's generator that notes when it is seeded."""

    def __init__(self, plain: torch.Generator, note: Callable[[], None]) -> None:
        self._plain, self._note = plain, note

    def __getattr__(self, name: str) -> Any:
        if name in _SEEDS:
            self._note()
        return getattr(self._plain, name)


def _is_between(file: str) -> bool:
    return file in _BETWEEN or file.startswith(_WRAPPERS)


_WRAPPERS = tuple(
    os.path.join(os.path.dirname(inspect.getfile(torch)), name) for name in ("_compile.py", "_dynamo/")
)
"""Files whose functions torch wraps around its own."""


def _public_name(frame: FrameType) -> str:
    """Return the name by which users call a function of torch's modules of random numbers."""
    name, module = frame.f_code.co_name, frame.f_globals["__name__"]
    short = module.removesuffix(".random")
    return f"{short if hasattr(sys.modules[short], name) else module}.{name}"


def seeding_error(how: str, location: Location) -> CaptureError:
    """Return the error for a forward that seeds torch's generators and draws random numbers."""
    return CaptureError(
        f"at {location}: the model calls {how} and draws random numbers, and a graph cannot seed: it would "
        f"draw others at each step. {_REMEDY}"
    )


_REMEDY = (
    "Draw fixed numbers once and keep them (register_buffer), seed outside of the model, or draw outside of "
    "it and pass the numbers as an input"
)


class RefusedGenerators(TorchFunctionMode):
    """Mode that refuses random ops with a generator other than torch's default generators.

    A mode instead of patches: any function of torch may take a generator, and modes only affect this thread.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # tensors are not checked: Dynamo traces this for torch.cond, and cannot trace a check of tensors
        # (2.15)
        others = [arg for arg in (*args, *kwargs.values()) if not isinstance(arg, Tensor)]
        named = [arg for arg in others if isinstance(arg, torch.Generator)]
        if not named:
            return func(*args, **kwargs)
        if not all(map(_is_default, named)):
            name = getattr(func, "__name__", str(func))
            raise CaptureError(
                f"at {location_of_call()}: {name} draws from a generator of the model's own, which a graph "
                f"cannot hold. {_REMEDY}"
            )
        # the graph of torch 2.11 cannot hold default generators either
        args, kwargs = tree_map_only(torch.Generator, lambda _: None, (args, kwargs))
        return func(*args, **kwargs)


def _is_default(generator: torch.Generator) -> bool:
    return any(generator is own for own in (torch.default_generator, *torch.cuda.default_generators))
