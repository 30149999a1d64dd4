"""Random numbers that the user's code draws from Python or NumPy: a graph would keep what was drawn once.

    if self.training and np.random.random() < self.layerdrop:      decides where layerdrop is between 0 and 1
        continue                                                   alike for all numbers where it is 0

While a model is captured, a number between two bounds is drawn as an object that knows these. A comparison
that comes out alike for all of them is answered; whatever else asks for the number is refused, with its line.
Once the code has seeded the generator itself (BigBird's random blocks), its numbers are alike at each step.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, NoReturn

import numpy as np

from fxdp.capture.sites import is_user_file, site_of_frame
from fxdp.errors import CaptureError
from fxdp.ir.notes import Site

_UNIT = ("random", "random_sample", "ranf", "sample", "rand")
"""Functions that draw a number of [0, 1) when they are given nothing; `uniform` is given both bounds."""
_KEPT = frozenset({"getstate", "setstate", "get_state", "set_state"})


class Drawn:
    """A number that is drawn at each step, of which only the bounds are known."""

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
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not is_user_file(frame.f_code.co_filename):
            frame = frame.f_back
        raise _refusal(self._name, site_of_frame(frame) if frame else Site())

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))._refuse()

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __round__ = __array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __abs__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse


@contextlib.contextmanager
def refused_draws() -> Iterator[None]:
    """While the user's code runs, know its numbers by their bounds only.

    Raises
    ------
    CaptureError : the code asks for a number's value, or draws something else.
    """
    seeded: set[ModuleType] = set()
    with contextlib.ExitStack() as stack:
        for module in (random, np.random):
            for name, function in list(vars(module).items()):
                drawn = isinstance(
                    getattr(function, "__self__", None), (random.Random, np.random.RandomState)
                )
                if name == "seed" or (drawn and name not in _KEPT):
                    made = _seeding if name == "seed" else _noted
                    setattr(module, name, made(module, name, function, seeded))
                    stack.callback(setattr, module, name, function)
        yield


def _seeding(
    module: ModuleType, _: str, function: Callable[..., Any], seeded: set[ModuleType]
) -> Callable[..., Any]:
    def seed(*args: Any, **kwargs: Any) -> Any:
        given = [a for a in (*args, *kwargs.values()) if a is not None]
        (seeded.add if given else seeded.discard)(module)
        return function(*args, **kwargs)

    return seed


def _noted(
    module: ModuleType, name: str, function: Callable[..., Any], seeded: set[ModuleType]
) -> Callable[..., Any]:
    full = f"{module.__name__}.{name}"

    def draw(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if module in seeded or not is_user_file(frame.f_code.co_filename):
            return function(*args, **kwargs)
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, (int, float))]
        if name in _UNIT and not args and not kwargs:
            return Drawn(full, 0.0, 1.0)
        if name == "uniform" and len(numbers) == len(args) + len(kwargs) == 2:
            return Drawn(full, min(numbers), max(numbers))
        raise _refusal(full, site_of_frame(frame))

    return draw


def _refusal(name: str, site: Site) -> CaptureError:
    where = f"at {site}" if site.file else "in the model"
    return CaptureError(
        f"{where}: {name} draws a random number in Python, and a graph would keep the one that was drawn "
        "while it was captured. Draw it with torch and choose with torch.where, draw it outside of the model "
        "and pass it as an input, or switch off what draws it (layerdrop=0, mask_time_prob=0)"
    )
