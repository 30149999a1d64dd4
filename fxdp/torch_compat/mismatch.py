"""Distinguish errors caused by an unknown torch from errors of the model.

fxdp replaces functions of torch, and calls private ones. If a release changes one of these functions,
Python's error message looks like a mistake of the user:

    torch calls ours        TypeError: _Copies.method.<locals>.made() missing 1 required positional argument
    ours calls torch's      TypeError: partition() got an unexpected keyword argument 'outputs'
    ours reads torch's      AttributeError: 'classmethod_descriptor' object has no attribute '__func__'
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from fxdp.errors import TorchMismatchError
from fxdp.torch_compat.releases import PROVEN, installed

__all__ = ["torch_mismatch", "why_not_compiled"]

_FXDP = Path(__file__).resolve().parent.parent
_PATCHES = ("fxdp.capture.patches", "fxdp.capture.python")
_ROOMS = {
    room: _FXDP.joinpath(*room.split(".")[1:])
    for room in (
        "fxdp.torch_compat", "fxdp.startup.memoized", "fxdp.startup.artifacts", "fxdp.startup.building",
        *_PATCHES,
    )
}  # fmt: skip
"""The rooms with functions that replace torch's."""
_COMPILER = ("InvalidCxxCompiler", "CppCompileError", "C++ compile error")
"""Parts of Inductor's error messages for a missing or outdated C++ compiler."""
_CALL = re.compile(r"^(?P<name>[\w.<>]+)\(\) (missing \d+ required|takes |got an unexpected|got multiple)")


def torch_mismatch(error: BaseException) -> TorchMismatchError | None:
    """Return the error to raise instead if fxdp does not fit torch; None for every other error."""
    for link in _chain(error):
        frames = traceback.extract_tb(link.__traceback__)
        if not frames:
            continue
        last = frames[-1]
        file = Path(last.filename)
        room = next((room for room, folder in _ROOMS.items() if file.is_relative_to(folder)), "")
        if _is_mismatch(link, room):
            where = f"{file.name}:{last.lineno}"
            return TorchMismatchError(
                f"fxdp does not fit torch {installed()} (proven with {PROVEN[0]} to "
                f"{PROVEN[-1]}): {type(link).__name__}: {str(link).splitlines()[0]} (at {where}). "
                "The model is not at fault: please report it, with what `fxdp doctor` prints"
            )
    return None


def why_not_compiled(error: BaseException) -> str:
    """Return the reason why Inductor failed in one line, with the remedy if known."""
    if (mismatch := torch_mismatch(error)) is not None:
        return str(mismatch)
    line = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if any(name in line for name in _COMPILER):
        line += ". Install g++ 11 or newer, or set CXX to a C++ compiler that knows C++20"
    return line


def _is_mismatch(error: BaseException, room: str) -> bool:
    """Return whether an error, raised in `room` (empty: elsewhere), is one of the three kinds."""
    if isinstance(error, (AttributeError, ImportError, NameError)):
        return bool(room)
    call = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if call is None:
        return False
    # a user's call of a replaced function goes through these, and may contain mistakes of the user
    return room not in ("", *_PATCHES) or call["name"] in _own_names()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def _own_names() -> set[str]:
    """Return the qualified names of all functions in the rooms, including nested functions."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith(tuple(_ROOMS))]
    return {getattr(code, "co_qualname", code.co_name) for module in modules for code in _codes(module)}


def _codes(module: Any) -> Iterator[CodeType]:
    waiting: list[Any] = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    while waiting:
        one = waiting.pop()
        if isinstance(one, CodeType):
            yield one
            waiting += [c for c in one.co_consts if isinstance(c, CodeType)]
        elif isinstance(one, type):
            kinds = FunctionType, staticmethod, classmethod
            waiting += [v for v in vars(one).values() if isinstance(v, kinds)]
        else:
            code = getattr(getattr(one, "__wrapped__", one), "__code__", None)
            waiting += [code] if isinstance(code, CodeType) else []
