"""The cache of a model's programs.

Kinds           GuardKey             CacheEntry
of calls    --  of one kind      --  one executable, for calls of some sizes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from fxdp.capture.captured import OutputLeaf, SizeLeaf
from fxdp.compiler.executable import CompiledVariants, Runs
from fxdp.compiler.program import Program
from fxdp.module.cache import LRU
from fxdp.module.calls.call import ProgramKey

_KINDS = 64  # kinds with cached programs
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
        returns_sizes = any(isinstance(leaf, SizeLeaf) for leaf in captured.leaves)
        self.takes_sizes = self.runs.takes_sizes or self.runs.takes_rows or returns_sizes
        self.keeps_unsharded = self.program.options.keeps_unsharded
        self.reads_layouts = bool(captured.layout_reads)
        self.branches = bool(captured.branches)
        self.returns_tensor = captured.out_spec.is_leaf() and isinstance(captured.leaves[0], OutputLeaf)


@dataclass(slots=True)
class LastCall:
    """The last call of a compiled module."""

    number: int = 0
    """The number of calls so far."""
    cache_entry: CacheEntry | None = None
    """The entry that ran the last call."""
    split: Sequence[int] = ()
    """The rows of each data rank in that call."""
    refused: str = ""
    """Why capture refused the last call that ran op by op."""
    batch: int = 0
    """The size of the global batch of that call."""


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


class _Last(NamedTuple):
    """The entry of the last call, with its key."""

    key: ProgramKey
    dims: tuple[tuple[int, ...], ...]
    batches: tuple[int, ...]
    entry: CacheEntry


class Kinds:
    """The most recently used kinds of calls of one model; equal on all ranks, which make the same calls.

    Two calls are of one kind if they differ in sizes alone. A Python value that decides on the program is
    part of the kind, so a model with a new object at each call would fill the memory with programs.
    """

    def __init__(self) -> None:
        self._kinds: LRU[ProgramKey, GuardKey] = LRU(_KINDS)
        self._last: _Last | None = None

    def __iter__(self) -> Iterator[GuardKey]:
        """Iterate over the kinds, least recently used first."""
        return (kind for _, kind in self._kinds.items())

    def entry(
        self, key: ProgramKey, dims: tuple[tuple[int, ...], ...], batches: tuple[int, ...]
    ) -> CacheEntry | None:
        """Return the entry for calls of a key and these sizes; None if nothing is compiled for them."""
        last = self._last
        # the most recent entry of the caches already: no lookup, and the LRU order stays
        if last is not None and key is last.key and dims == last.dims and batches == last.batches:
            return last.entry
        kind = self.find(key)
        found = None if kind is None else kind.calls.get((dims, batches))
        self._last = None if found is None else _Last(key, dims, batches, found)
        return found

    def find(self, key: ProgramKey) -> GuardKey | None:
        """Return the captures and entries of a key."""
        self._last = None
        return self._kinds.get(key)

    def add(self, key: ProgramKey, kind: GuardKey) -> None:
        """Keep the captures and entries of a new key."""
        self._kinds[key] = kind

    def alike(self, key: ProgramKey) -> tuple[ProgramKey, ...]:
        """Return the keys that differ from a key in Python values alone, the last used key at the end."""
        return tuple(other for other, _ in self._kinds.items() if other.differs_in_values_alone(key))
