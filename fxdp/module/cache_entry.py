"""`CacheEntry`: what runs a call; `GuardKey`: all that was captured and compiled for one kind of call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.compiler.executable import CompiledVariants, Runs
from fxdp.compiler.program import Program
from fxdp.module.cache import LRU

_CALLS = 1024  # sizes of calls that are remembered, per kind


@dataclass
class CacheEntry:
    """What runs a call, with what is needed around it."""

    runs: Runs
    graph: fx.GraphModule
    program: Program
    sizes: dict[str, int]
    """Those of the call for which it was made."""
    draws: bool
    """Whether the program draws random numbers."""


@dataclass
class GuardKey:
    """All that was captured and compiled for one kind of call."""

    dims: tuple[tuple[int, ...], ...]
    """The dims of the first call, to which captures that are not `dynamic` belong."""
    captured: dict[bool, list[CompiledVariants]] = field(default_factory=lambda: {False: [], True: []})
    """By `dynamic`: one capture for all sizes, or several where the model branches on sizes."""
    calls: LRU[Any, CacheEntry] = field(default_factory=lambda: LRU(_CALLS))
    """What served each call so far, by its sizes; of several ways that the code can go the last one."""
    branches: LRU[Any, list[CacheEntry]] = field(default_factory=lambda: LRU(_CALLS))
    """By its sizes, too: the programs of other ways."""
