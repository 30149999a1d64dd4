"""Random numbers that the user's code draws in Python, which a graph would keep as constants.

    if self.training and np.random.random() < self.layerdrop:   depends on the number if 0 < layerdrop < 1;
        continue                                                equal for all numbers if layerdrop = 0
    if torch.rand([]) < self.layerdrop:     likewise; the program still draws the number, so that later
        continue                            numbers are those of eager code
    noise = torch.randn(4, generator=self.generator)    a graph cannot hold the generator
    torch.manual_seed(0); noise = torch.randn(4)        a graph cannot seed: each step would draw new numbers
    sizes[int(torch.empty(1).uniform_(0, len(sizes)).item())]       the first element, if there is only one

During capture, a bounded random number of Python or NumPy is an object that knows only the bounds. A
comparison with one result for all numbers within the bounds is answered; any other use of the number is
refused, with the line. After the code itself has seeded the generator (BigBird's random blocks), numbers are
equal at each step and are allowed. For torch's own random numbers, comparisons with one result are constants,
and seeding is refused if the model draws random numbers.
"""

from __future__ import annotations

import os
import random
import secrets
import uuid
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from fxdp.capture.locations import is_user_file, location_of_call, location_of_frame, outside_python
from fxdp.capture.python.flags import mark
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch, around, calling_frame

_UNIT = ("random", "random_sample", "ranf", "sample", "rand")
"""Functions that draw from [0, 1) if called without arguments; `uniform` takes both bounds."""
_KEPT = frozenset({"getstate", "setstate", "get_state", "set_state"})


class Drawn:
    """A random number that is drawn at each step, of which only the bounds are known."""

    def __init__(self, name: str, low: float, high: float) -> None:
        self._name, self._low, self._high = name, low, high

    def __lt__(self, other: Any) -> bool:
        if isinstance(other, (int, float)) and (other <= self._low or other > self._high):
            return other > self._high
        self._refuse()

    def __le__(self, other: Any) -> bool:
        if isinstance(other, (int, float)) and (other < self._low or other >= self._high):
            return other >= self._high
        self._refuse()

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise _refusal(self._name, location_of_call())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))._refuse()

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __round__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse


def python_draws() -> tuple[Patch, ...]:
    """Return patches by which random numbers are only known by their bounds while the user's code runs.

    Any use of a number's value, and any other random function, raises a `CaptureError`.
    """
    found: list[Patch] = []
    for module in (random, np.random):
        seed, draw = _functions(module)
        for name, function in list(vars(module).items()):
            if name == "seed":
                found.append(Patch(module, name, around(seed)))
            # the functions of both modules are methods of one hidden generator each
            elif name not in _KEPT and isinstance(
                getattr(function, "__self__", None), (random.Random, np.random.RandomState)
            ):
                found.append(Patch(module, name, around(partial(draw, name))))
    found.append(Patch(np.random, "default_rng", around(_own_generator)))
    for module, names in _OF_THE_SYSTEM.items():
        _, draw = _functions(module)
        found += [Patch(module, name, around(partial(draw, name))) for name in names]
    return tuple(found)


_OF_THE_SYSTEM = {
    os: ("urandom",),
    secrets: ("choice", "randbelow", "randbits", "token_bytes", "token_hex", "token_urlsafe"),
    uuid: ("uuid1", "uuid4"),
}
"""Functions that draw random numbers from the system, without a seed."""


def _own_generator(plain: Callable[..., Any], seed: Any = None) -> Any:
    frame = calling_frame()
    if seed is None and is_user_file(frame.f_code.co_filename):
        raise _refusal("numpy.random.default_rng without a seed", location_of_frame(frame))
    return plain(seed)


def _functions(module: ModuleType) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return replacements for a random module: one for `seed`, one for a drawing function by name."""
    seeded = False

    def seed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal seeded
        seeded = any(given is not None for given in (*args, *kwargs.values()))
        return plain(*args, **kwargs)

    def draw(name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = outside_python(calling_frame())
        # torch and related libraries draw, too (for names of temporary files, or of functions compiled by
        # Dynamo)
        if seeded or not is_user_file(frame.f_code.co_filename):
            return plain(*args, **kwargs)
        full = f"{module.__name__}.{name}"
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, (int, float))]
        if name in _UNIT and not args and not kwargs:
            return Drawn(full, 0.0, 1.0)
        if name == "uniform" and len(numbers) == len(args) + len(kwargs) == 2:
            return Drawn(full, min(numbers), max(numbers))
        raise _refusal(full, location_of_frame(frame))

    return seed, draw


def _refusal(name: str, location: Location) -> CaptureError:
    return CaptureError(
        f"{location.where}: {name} draws a random number in Python, and a graph would keep the one that was "
        "drawn while it was captured. Draw it with torch and choose with torch.where, draw it outside of the "
        "model and pass it as an input, or switch off what draws it (layerdrop=0, mask_time_prob=0)"
    )


_MARK = "_fxdp_between_0_and_1"
_FULL = "_fxdp_whole"

_ALWAYS: dict[str, Callable[[float], bool | None]] = {
    "__lt__": lambda bound: True if bound >= 1 else False if bound <= 0 else None,
    "__le__": lambda bound: True if bound >= 1 else False if bound < 0 else None,
    "__gt__": lambda bound: False if bound >= 1 else True if bound < 0 else None,
    "__ge__": lambda bound: False if bound >= 1 else True if bound <= 0 else None,
}
"""Result of a comparison for all numbers in [0, 1); None if the result depends on the number."""


def _marked(drawn: Tensor) -> Tensor:
    if all(isinstance(size, int) and size == 1 for size in drawn.shape):  # avoids a guard on a symbolic size
        setattr(drawn, _MARK, drawn._version)
    return drawn


def _is_unit(tensor: Tensor) -> bool:
    """Return whether a tensor is a random number from [0, 1) that was not written since."""
    drawn = getattr(tensor, _MARK, None)
    return drawn is not None and drawn == tensor._version


def _uniform(plain: Callable[..., Tensor], self: Tensor, *bounds: Any, **kwargs: Any) -> Tensor:
    drawn = plain(self, *bounds, **kwargs)
    low, high = bounds if len(bounds) == 2 else (0, 1)
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float)) and not kwargs
    # with a nonzero low bound, rounding may yield the high bound
    return _marked(drawn) if numbers and low == 0 and 0 < high <= 1 else drawn


def integer_part(drawn: Tensor, value: Any) -> Any:
    """Return the value of a tensor; the integer part of a random number from [0, 1) is set to 0."""
    if isinstance(value, torch.SymFloat) and _is_unit(drawn):
        setattr(value, _FULL, 0)
    return value


def _integer(plain: Callable[[Any], int], self: torch.SymFloat) -> int:
    full = getattr(self, _FULL, None)
    return plain(self) if full is None else int(full)


def _compare(
    always: Callable[[float], bool | None], plain: Callable[..., Any], self: Tensor, other: Any
) -> Any:
    if isinstance(other, (int, float)) and _is_unit(self):
        answer = always(other)
        if answer is not None:  # a constant, which Python may read
            return torch.tensor(answer, device=self.device).reshape(self.shape)
        if other == 0:  # 0 itself is drawn once in many millions
            return mark(plain(self, other), likely=always(-1.0) is True)
    return plain(self, other)


UNIT_DRAWS: tuple[Patch, ...] = (
    Patch(torch, "rand", around(lambda plain, *args, **kwargs: _marked(plain(*args, **kwargs)))),
    Patch(Tensor, "uniform_", around(_uniform)),
    Patch(torch.SymFloat, "__int__", around(_integer)),
    *(Patch(Tensor, name, around(partial(_compare, always))) for name, always in _ALWAYS.items()),
)
"""Patches for tracing the user's code: comparisons with one result for all random numbers are constants."""

_SEEDING = (
    *((torch, name) for name in ("manual_seed", "seed", "set_rng_state")),
    *((torch.random, name) for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")),
)


def seedings(found: list[tuple[str, Location]]) -> tuple[Patch, ...]:
    """Return patches that record calls that seed torch's generators while the user's code is exported."""

    def seed(how: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = calling_frame()
        if is_user_file(frame.f_code.co_filename):
            found.append((how, location_of_frame(frame)))
        return plain(*args, **kwargs)

    return tuple(
        Patch(owner, name, around(partial(seed, f"{owner.__name__}.{name}"))) for owner, name in _SEEDING
    )


def seeding_error(how: str, location: Location) -> CaptureError:
    """Return the error for a forward that seeds torch's generators and draws random numbers."""
    return CaptureError(
        f"at {location}: the model calls {how} and draws random numbers, and a graph cannot seed: it would "
        "draw "
        f"others at each step. {_REMEDY}"
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
