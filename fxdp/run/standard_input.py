"""Standard input of a script: rank 0 reads, and all ranks get the same text.

name = input("name? ")        for line in sys.stdin: ...        sys.stdin.buffer.read()
"""

from __future__ import annotations

import builtins
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fxdp.errors import StateError
from fxdp.run.rank_zero import RankZero
from fxdp.run.script_lines import script_line
from fxdp.torch_compat import Patch, around


def input_patches(rank_zero: RankZero) -> Iterator[Patch]:
    """Yield the replacement of `input`."""

    def asked(plain: Callable[..., str], prompt: object = "") -> str:
        if not rank_zero.can_share():
            return plain(prompt)
        return str(rank_zero.call(f"input at {script_line()}", lambda: plain(prompt)))

    yield Patch(builtins, "input", around(asked))


def share_input(rank_zero: RankZero) -> None:
    """Let the script read rank 0's standard input, until the process ends; other ranks' own is empty."""
    if not rank_zero.is_rank_0:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
    if sys.stdin is not None:
        sys.stdin = SharedReader(sys.stdin, rank_zero, "sys.stdin")


class SharedReader:
    """A stream that rank 0 reads for all ranks; its other attributes are the stream's own."""

    def __init__(self, stream: Any, rank_zero: RankZero, name: str) -> None:
        self._stream, self._rank_zero, self._name = stream, rank_zero, name

    def read(self, *size: int) -> Any:
        """Read up to `size` characters, or all."""
        return self._shared("read", *size)

    def readline(self, *size: int) -> Any:
        """Read one line."""
        return self._shared("readline", *size)

    def readlines(self, *hint: int) -> Any:
        """Read all lines."""
        return self._shared("readlines", *hint)

    def __iter__(self) -> SharedReader:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next line."""
        line = self.readline()
        if not line:
            raise StopIteration
        return line

    def __enter__(self) -> SharedReader:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stream."""
        self.close()

    def close(self) -> None:
        """Close the stream, on the rank that has it."""
        if self._stream is not None:
            self._stream.close()

    @property
    def buffer(self) -> SharedReader:
        """The stream of bytes below, read by rank 0 for all, too."""
        return SharedReader(self._stream.buffer, self._rank_zero, f"{self._name}.buffer")

    def _shared(self, method: str, *arguments: int) -> Any:
        rank_zero = self._rank_zero
        if rank_zero.inside:
            return getattr(self._stream, method)(*arguments)
        if not rank_zero.can_share():
            raise StateError(
                f"{script_line()} reads {self._name} in a thread or process of its own; expected the "
                "script's main thread: rank 0 reads for all ranks, which must come to the same call"
            )
        what = f"{self._name}.{method} at {script_line()}"
        return rank_zero.call(what, lambda: getattr(self._stream, method)(*arguments))

    def __getattr__(self, name: str) -> Any:
        if self._stream is None:
            raise StateError(
                f"{script_line()} uses {self._name}.{name}; expected reading: only rank 0 has the stream"
            )
        return getattr(self._stream, name)
