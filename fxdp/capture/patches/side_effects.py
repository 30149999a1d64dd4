"""Side effects of a model's code that are no state: output, logs, warnings, files written.

    print(h.shape)      log.info("step")      warnings.warn("long")      open("seen.txt", "a")

Each happens while the model is captured, and then no more, as a program only computes tensors. Code of
installed packages is not looked at: their messages are for the first call.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fxdp.capture.captured import SideEffect
from fxdp.capture.locations import is_own_file, location_of_call
from fxdp.torch_compat import Patch, around, patched

_WRITES = frozenset("wax+")


@contextlib.contextmanager
def noted_side_effects(found: list[SideEffect]) -> Iterator[None]:
    """Note the side effects of the code inside the block, each line once."""

    def note(words: str) -> None:
        location = location_of_call()
        effect = SideEffect(words, location)
        if is_own_file(location.file) and effect not in found:
            found.append(effect)

    def noting(words: str, is_meant: Callable[..., bool] = lambda *args, **kwargs: True) -> Any:
        def call(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if is_meant(*args, **kwargs):
                note(words)
            return plain(*args, **kwargs)

        return around(call)

    patches = (
        Patch(logging.Logger, "handle", noting("logs")),
        Patch(warnings, "warn", noting("warns")),
        Patch(builtins, "open", noting("writes a file", _opens_to_write)),
        Patch(io, "open", noting("writes a file", _opens_to_write)),
        Patch(torch, "save", noting("writes a file")),
    )
    with patched(patches), noted_output(lambda: note("prints")):
        yield


def _opens_to_write(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> bool:
    return not _WRITES.isdisjoint(mode)


@contextlib.contextmanager
def noted_output(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` before each write of this thread to standard output or error inside the block."""
    with patched(Patch(sys, name, lambda stream: _Stream(stream, note)) for name in ("stdout", "stderr")):
        yield


class _Stream:
    """A stream, of which writes are noted."""

    def __init__(self, stream: Any, note: Callable[[], None]) -> None:
        self._stream, self._note = stream, note

    def __getattr__(self, name: str) -> Any:
        if name.startswith("write"):
            self._note()
        return getattr(self._stream, name)


def words_of(effects: Sequence[SideEffect]) -> str:
    """Return several side effects as text: equal ones once, with all their lines."""
    lines: dict[str, list[str]] = {}
    for effect in effects:
        lines.setdefault(effect.words, []).append(str(effect.location))
    return ", ".join(f"{words} at {' and '.join(where)}" for words, where in lines.items())
