"""Locations in the user's code from which nodes come, read from the stack traces that export records."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.metadata import Location

_FRAME = re.compile(
    r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in [^\n]*)?(?:\n(?P<code>[^\n]*))?', re.M
)
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (inspect.getfile(torch), os.path.dirname(__file__))  # torch, fxdp
)
_DEMO = os.path.join(_LIBRARIES[1], "cli", "demo", "")  # user code that is part of this package
_NUMBERS = inspect.getfile(torch)  # where `SymInt` and `SymBool` are
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = re.compile(r"(site|dist)-packages")
_PROMPTS = ("<stdin>", "<string>")  # code typed at a prompt or passed by `-c`: user code without a file
_TYPED = ("<stdin>", "<ipython-input-", "<python-input-")  # a prompt's: of Python, of IPython, of Python 3.13
_PREFIXES = ("exported.", "module.")


def is_user_file(file: str) -> bool:
    """Return whether a source is user code, typed or in a file: not of torch or fxdp, nor generated."""
    return file.startswith((_DEMO, *_TYPED)) or not file.startswith((*_LIBRARIES, "<"))


def is_user_frame(frame: FrameType) -> bool:
    """Return whether a frame runs user code; `exec` and `python -c` call it `<string>`, as torch its own."""
    if frame.f_code.co_filename == "<string>":
        return frame.f_globals.get("__name__", "torch").partition(".")[0] not in ("torch", "fxdp")
    return is_user_file(frame.f_code.co_filename)


def is_own_file(file: str) -> bool:
    """Return whether a source file is the user's own: user code, and no installed package."""
    return (is_user_file(file) or file in _PROMPTS) and _PACKAGES.search(file) is None


def _is_pythons(file: str) -> bool:
    """Return whether a file is of Python's standard library; errors name the line that calls such code."""
    return file.startswith(_PYTHON) and _PACKAGES.match(file, len(_PYTHON)) is None


@lru_cache(maxsize=65536)
def _location_of_trace(trace: str) -> Location:
    """Return the innermost frame of user code, or without one, the innermost frame that is not fxdp's."""
    frames = [
        Location(match["file"], int(match["line"]), _code(match["code"])) for match in _FRAME.finditer(trace)
    ]
    users = [frame for frame in frames if is_user_file(frame.file)]
    others = [frame for frame in frames if not frame.file.startswith(_LIBRARIES[1])]
    return (users or others or [Location()])[-1]


def chain(error: BaseException) -> list[BaseException]:
    """Return an exception, and the causes and contexts that led to the exception."""
    found: list[BaseException] = []
    seen: BaseException | None = error
    while seen is not None and seen not in found:
        found.append(seen)
        seen = seen.__cause__ or seen.__context__
    return found


def location_of_exception(error: BaseException) -> Location:
    """Return the innermost frame of user code that an exception passed through."""
    for link in chain(error):
        frames = traceback.extract_tb(link.__traceback__)
        users = [frame for frame in frames if is_user_file(frame.filename)]
        if users:
            last = [*users[:1], *(frame for frame in users if not _is_pythons(frame.filename))][-1]
            return Location(last.filename, last.lineno or 0, last.line or "")
    return Location()


def location_of_call() -> Location:
    """Return the innermost line of user code that is running now, also at a prompt or in `python -c`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if (is_user_file(file) and not _is_pythons(file)) or file in _PROMPTS:
            return location_of_frame(frame)
        frame = frame.f_back
    return Location()


def asking_frame(frame: FrameType) -> FrameType:
    """Return the nearest frame, from `frame` outwards, that is neither fxdp's nor one of torch's numbers."""
    while frame.f_code.co_filename.startswith((_NUMBERS, _LIBRARIES[1])) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def outside_python(frame: FrameType) -> FrameType:
    """Return the nearest frame, from `frame` outwards, that is not in Python's standard library."""
    while _is_pythons(frame.f_code.co_filename) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def location_of_frame(frame: FrameType) -> Location:
    """Return the line that a frame is executing."""
    return Location.at(frame.f_code.co_filename, frame.f_lineno)


@dataclass(frozen=True, slots=True)
class Origin:
    """The user's lines behind ops that run inside torch's own modules or losses, without a line of user code.

    nn.Sequential(nn.Linear(8, 3))      a line of torch.nn.Linear           the line that calls the model
    loss_fn=my_loss                     no line at all                     the line `def my_loss(...)`
    """

    call: Location = field(default_factory=Location)
    """The line that calls the compiled model, or plans the model."""
    loss: Location = field(default_factory=Location)
    """The definition of the user's loss function; `call` if the loss function is torch's."""

    @classmethod
    def here(cls, loss_fn: Any = None) -> Origin:
        """Return the origin for the line that is running now."""
        call = location_of_call()
        return cls(call, location_of_function(loss_fn) or call)

    def of(self, location: Location) -> Location:
        """Return the user's line for the location of a node; the module path is kept."""
        if location.file and is_user_file(location.file):
            return location
        behind = self.call if location.file else self.loss
        return replace(behind, module=location.module)


def location_of_function(function: Any) -> Location | None:
    """Return the first line of a function or module with Python code of the user; None for all others."""
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(getattr(function, "forward", function), "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return None
    return Location.at(code.co_filename, code.co_firstlineno)


def module_path(name: str) -> str:
    """Return the user's name of a module or parameter, without the prefixes of capture's wrappers."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
        elif name == prefix[:-1]:
            return ""
    return name


class LocationIndex:
    """Locations of the nodes of a joint graph; a backward node has the location of the forward node."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._forward: dict[int, Location] = {}
        for node in nodes:
            sequence = node.meta.get("seq_nr")
            if sequence is not None and node.meta.get("stack_trace"):
                self._forward.setdefault(sequence, self._own(node))

    def location(self, node: fx.Node) -> Location:
        """Return the location of a node."""
        own = self._own(node)
        if own.file:
            return own
        found = self._forward.get(node.meta.get("seq_nr", -1))
        return found or own

    @staticmethod
    def _own(node: fx.Node) -> Location:
        return _with_module(_location_of_trace(node.meta.get("stack_trace") or ""), module_of(node))


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that a traced node comes from; empty for the model itself."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _innermost(tuple(entry[0] for entry in stack.values()))


def _code(line: str | None) -> str:
    """Return the source line, without the text that autograd appends to traces."""
    return (line or "").split("Gradient addition node", 1)[0].strip()


@lru_cache(maxsize=65536)
def _innermost(paths: tuple[str, ...]) -> str:
    return module_path(paths[-1]) if paths else ""


@lru_cache(maxsize=65536)
def _with_module(location: Location, module: str) -> Location:
    return replace(location, module=module)
