"""Random numbers that the user's code draws in Python, which a graph would keep as constants.

    if self.training and np.random.random() < self.layerdrop:   depends on the number if 0 < layerdrop < 1;
        continue                                                equal for all numbers if layerdrop = 0

A run of the code that leaves the generators of Python and NumPy as they were has drawn nothing. Otherwise
the code runs again, and each draw is looked at: a bounded random number is an object that knows only the
bounds. A comparison with one result for all numbers within the bounds is answered; any other use of the
number is refused, with the line. After the code itself has seeded the generator (BigBird's random blocks),
numbers are equal at each step and are allowed.
"""

from __future__ import annotations

import contextlib
import os
import random
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np

from fxdp.capture.captured import SideEffect
from fxdp.capture.locations import is_user_frame, location_of_call, location_of_frame, outside_python
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch, around, calling_frame, patched

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


class UncheckedDrawError(Exception):
    """The code moved a generator of Python or NumPy in a run in which draws are not looked at."""


@contextlib.contextmanager
def refused_draws(watched: bool, noted: list[SideEffect]) -> Iterator[None]:
    """Run the model's code inside the block, which draws nothing in Python that a graph would keep.

    With `watched`, each draw is looked at, by about 70 patches, and `noted`, because a program leaves the
    generators alone; without, draws from the system alone.

    Raises
    ------
    UncheckedDrawError : not `watched`, and the code drew or seeded; the generators are as before.
    CaptureError : the code uses a random number's value, with the line.
    """
    if watched:
        with patched((*python_draws(noted), *_SYSTEM_DRAWS)):
            yield
        return
    before, restored = _states(), [False]

    def check(cause: Exception | None) -> None:
        if restored[0] or _differ(before, _states()):
            random.setstate(before[0])
            np.random.set_state(before[1])
            raise UncheckedDrawError from cause

    def restore(plain: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        restored[0] = restored[0] or is_user_frame(calling_frame())
        plain(*args, **kwargs)

    restores = ((random, "setstate"), (np.random, "set_state"))
    with patched((*_SYSTEM_DRAWS, *(Patch(owner, name, around(restore)) for owner, name in restores))):
        try:
            yield
        except Exception as error:  # a number that was drawn may have led the code astray
            check(error)
            raise
    check(None)


def _states() -> tuple[Any, Any]:
    return random.getstate(), np.random.get_state()


def _differ(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    (python, numpy), (python_now, numpy_now) = before, now
    places = range(2, len(numpy))
    same = all(numpy[i] == numpy_now[i] for i in places) and np.array_equal(numpy[1], numpy_now[1])
    return python != python_now or not same


def python_draws(noted: list[SideEffect]) -> tuple[Patch, ...]:
    """Return patches by which random numbers are only known by their bounds while the user's code runs.

    Any use of a number's value, and any other random function, raises a `CaptureError`.
    """
    found: list[Patch] = []
    for module in (random, np.random):
        seed, draw = _functions(module, noted)
        for name, function in list(vars(module).items()):
            if name == "seed":
                found.append(Patch(module, name, around(seed)))
            # the functions of both modules are methods of one hidden generator each
            elif name not in _KEPT and isinstance(
                getattr(function, "__self__", None), (random.Random, np.random.RandomState)
            ):
                found.append(Patch(module, name, around(partial(draw, name))))
    return tuple(found)


def _system_draw(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    frame = calling_frame()
    outside = outside_python(frame)
    if is_user_frame(outside):
        raise _refusal(_called_from(outside, frame) or f"os.{plain.__name__}", location_of_frame(outside))
    return plain(*args, **kwargs)


def _called_from(outside: FrameType, frame: FrameType) -> str:
    """Return the function of Python's library that the code outside of it called; empty without one."""
    name = ""
    while frame is not outside and frame.f_back is not None:
        name, frame = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}", frame.f_back
    return name


def _refused_draw(name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    frame = outside_python(calling_frame())
    if is_user_frame(frame):
        raise _refusal(name, location_of_frame(frame))
    return plain(*args, **kwargs)


def _own_generator(plain: Callable[..., Any], seed: Any = None) -> Any:
    frame = calling_frame()
    if seed is None and is_user_frame(frame):
        raise _refusal("numpy.random.default_rng without a seed", location_of_frame(frame))
    return plain(seed)


_SYSTEM_DRAWS: tuple[Patch, ...] = (
    Patch(os, "urandom", around(_system_draw)),
    Patch(random, "_urandom", around(_system_draw)),  # of `secrets` and `random.SystemRandom`
    Patch(uuid, "uuid1", around(partial(_refused_draw, "uuid.uuid1"))),
    Patch(np.random, "default_rng", around(_own_generator)),
)
"""Patches that refuse random numbers which the system draws, without a seed."""


def _functions(module: ModuleType, noted: list[SideEffect]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return replacements for a random module: one for `seed`, one for a drawing function by name."""
    seeded = False

    def note(words: str, frame: FrameType) -> None:
        effect = SideEffect(words, location_of_frame(frame))
        if effect not in noted and is_user_frame(frame):
            noted.append(effect)

    def seed(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal seeded
        seeded = any(given is not None for given in (*args, *kwargs.values()))
        note(f"seeds {module.__name__}", outside_python(calling_frame()))
        return plain(*args, **kwargs)

    def draw(name: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        frame = outside_python(calling_frame())
        # torch and related libraries draw, too (for names of temporary files, or of functions compiled by
        # Dynamo)
        if not is_user_frame(frame):
            return plain(*args, **kwargs)
        full = f"{module.__name__}.{name}"
        note(f"draws by {full}", frame)
        if seeded:
            return plain(*args, **kwargs)
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
