"""`CacheEntry`: one executable for calls of some sizes; `GuardKey`: all executables of one kind of call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.compiler.executable import CompiledVariants, Runs
from fxdp.compiler.program import Program
from fxdp.module.cache import LRU
from fxdp.module.outputs import has_size_leaves, returns_tensor

_CALLS = 1024  # cached sets of sizes per kind


@dataclass
class CacheEntry:
    """The executable of a call, with facts about its program that are asked at each call."""

    runs: Runs
    graph: fx.GraphModule
    program: Program
    sizes: dict[str, int]
    """The sizes of the call for which the entry was made."""
    draws: bool
    """Whether the program draws random numbers."""
    takes_sizes: bool = field(init=False)
    """Whether a call needs its sizes: as arguments, for row numbers, or as numbers that the model returns."""
    keeps_unsharded: bool = field(init=False)
    """Whether unsharded parameters stay from call to call."""
    reads_layouts: bool = field(init=False)
    """Whether the model's code reads strides of inputs."""
    branches: bool = field(init=False)
    """Whether the program stands for one of several branches of the code."""
    returns_tensor: bool = field(init=False)
    """Whether the model returns one tensor, as its program does."""

    def __post_init__(self) -> None:
        captured = self.program.captured
        self.takes_sizes = self.runs.takes_sizes or self.runs.takes_rows or has_size_leaves(captured)
        self.keeps_unsharded = self.program.options.keeps_unsharded
        self.reads_layouts = bool(captured.layout_reads)
        self.branches = bool(captured.branches)
        self.returns_tensor = returns_tensor(captured)


@dataclass(slots=True)
class LastCall:
    """The last call of a compiled module."""

    number: int = 0
    """The number of calls so far."""
    cache_entry: CacheEntry | None = None
    """The entry that ran the last call."""


@dataclass
class GuardKey:
    """All captures and executables of one kind of call."""

    dims: tuple[tuple[int, ...], ...]
    """The dims of the first call, and of all captures that are not `dynamic`."""
    captured: dict[bool, list[CompiledVariants]] = field(default_factory=lambda: {False: [], True: []})
    """By `dynamic`: one capture for all sizes, or several if the model branches on sizes."""
    calls: LRU[Any, CacheEntry] = field(default_factory=lambda: LRU(_CALLS))
    """The entry for each set of sizes; of several branches the one that was taken last."""
    branches: LRU[Any, list[CacheEntry]] = field(default_factory=lambda: LRU(_CALLS))
    """By sizes: the entries of all branches taken so far."""
