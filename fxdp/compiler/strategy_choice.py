"""Implement `strategy="auto"`: use the least sharding with which the predicted peak fits a rank's memory.

     replicate      parameters, gradients and state are full                 nothing is gathered
     optimizer      full parameters, sharded gradients and state             gathered once per step
     shard          the last layers stay unsharded until the backward        these are gathered once per call,
                                                                             earlier layers twice
     shard          all parameters are resharded after each use              gathered twice per call

The choice depends only on the program, the mesh and sizes that are equal on all ranks, so all ranks make
the same choice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from fxdp.capture.captured import Captured
from fxdp.compiler.option_combinations import check_sharding
from fxdp.compiler.planning import Planning
from fxdp.compiler.prepare import prepare
from fxdp.compiler.program import Program
from fxdp.errors import InputError, MeshError
from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.graph.parameter_buckets import gather_starts, parameter_of, unsharded_parameters
from fxdp.ir.types.mesh import Mesh
from fxdp.options import CHEAPEST_FIRST, Options
from fxdp.reports.rows import format_bytes

_LARGEST = 5
"""Number of tensors that a refusal names."""
_MOST_PARTS = 64
"""Largest number of micro-batches that a refusal proposes."""


@dataclass(frozen=True)
class _Attempt:
    """A strategy, the resulting program, and the memory that the program would need."""

    program: Program
    peak: int
    kept: int = 0
    of: int = 0
    """Number of parameter buckets that stay unsharded until the backward (`kept`), of `of` buckets."""

    @property
    def words(self) -> str:
        """Description of the strategy: `shard, the last 3 of 12 buckets unsharded until the backward`."""
        strategy = self.program.options.strategy
        if not self.kept:
            return strategy
        which = "all" if self.kept == self.of else f"the last {self.kept} of"
        return f"{strategy}, {which} {self.of} buckets unsharded until the backward"


def legal_strategies(mesh: Mesh, options: Options) -> tuple[str, ...]:
    """Return the strategies that a mesh supports, the cheapest first.

    Raises
    ------
    MeshError : the mesh supports none.
    """
    found, refused = [], None
    for strategy in CHEAPEST_FIRST if options.strategy == "auto" else (options.strategy,):
        try:
            check_sharding(mesh, replace(options, strategy=strategy))
            found.append(strategy)
        except MeshError as error:
            refused = error
    if not found and refused is not None:
        raise refused
    return tuple(found)


def choose(
    captured: Captured, mesh: Mesh, options: Options, sizes: Mapping[str, int], limit: int | None,
    *, among: Collection[str] = CHEAPEST_FIRST, cut: bool | None = None,
) -> Program:  # fmt: skip
    """Compile with the cheapest strategy that fits, or with the one that needs least memory if none fits.

    Parameters
    ----------
    sizes : sizes of the largest local batch, equal on all ranks.
    limit : bytes of memory of a rank; None: no limit.
    among : the strategies that may be chosen.

    Raises
    ------
    MeshError, StageError, PlacementError : as `prepare`.
    """
    if options.strategy != "auto" and limit is None:
        return prepare(captured, mesh, options, sizes["B"], cut=cut)
    search = _Search(captured, mesh, options, sizes, limit or 0, cut)
    attempts: list[_Attempt] = []
    for strategy in (s for s in legal_strategies(mesh, options) if s in among):
        attempts += search.attempts(strategy)
        if attempts[-1].peak <= search.limit:
            break
    best = attempts[-1] if attempts[-1].peak <= search.limit else min(attempts, key=lambda a: a.peak)
    best.program.choice = tuple(search.lines(attempts, best))
    best.program.predicted = best.peak
    return best.program


@dataclass(frozen=True)
class _Search:
    captured: Captured
    mesh: Mesh
    options: Options
    sizes: Mapping[str, int]
    limit: int
    cut: bool | None

    def attempts(self, strategy: str) -> list[_Attempt]:
        """Return the attempts with one strategy; the last one is the final choice within this strategy."""
        if strategy != "shard" or self.options.strategy != "auto":
            return [self._attempt(strategy)]
        least = self._attempt(strategy)
        buckets = _buckets(least.program)
        if least.peak > self.limit or least.program.step is not None or not buckets:
            return [least]
        return [least, *self._most_kept(buckets)]

    def _most_kept(self, buckets: list[list[str]]) -> Iterator[_Attempt]:
        """Yield an attempt with the most buckets, from the last, that can stay unsharded until the backward.

        All buckets are tried first, then bisection finds the number; nothing is yielded if none can stay.
        """
        fits, too_many, best = 0, len(buckets) + 1, None
        tried = len(buckets)  # all at first: if they fit, one attempt is enough
        while too_many - fits > 1:
            names = [name for bucket in buckets[len(buckets) - tried :] for name in bucket]
            found = replace(self._attempt("shard", frozenset(names)), kept=tried, of=len(buckets))
            if found.peak <= self.limit:
                fits, best = tried, found
            else:
                too_many = tried
            tried = (fits + too_many) // 2
        if best is not None:
            yield best

    def _attempt(self, strategy: str, kept: frozenset[str] = frozenset()) -> _Attempt:
        # passes rewrite their graph, so each attempt begins with a copy of the captured graph
        captured = replace(self.captured, gm=copy_graph(self.captured.gm))
        options = replace(self.options, strategy=strategy)
        program = prepare(captured, self.mesh, options, self.sizes["B"], cut=self.cut, kept=kept)
        return _Attempt(program, max(rank.peak.bytes for rank in Planning(program, self.sizes).memory()))

    def lines(self, attempts: list[_Attempt], best: _Attempt) -> Iterator[str]:
        """Yield the choice and the reason as lines of text, equal on all ranks."""
        fits = "the cheapest that fits" if best.peak <= self.limit else "none fits; it needs least"
        given = "memory_limit=" if self.options.memory_limit is not None else "the device's "
        if self.options.strategy == "auto":
            yield f"strategy='auto' with {given}{format_bytes(self.limit)} a rank: {best.words}, {fits}"
        else:
            verb = "fits" if best.peak <= self.limit else "does not fit"
            yield f"{given}{format_bytes(self.limit)} a rank: strategy={best.words!r} {verb}"
        for attempt in attempts:
            yield f"  {attempt.words}: at most {format_bytes(attempt.peak)} predicted"


def _buckets(program: Program) -> list[list[str]]:
    """Return the names of the parameters in each bucket that the forward gathers, in order."""
    starts = gather_starts(program.gm.graph, backward=False)
    return [[parameter_of(rows).name for rows, _ in unsharded_parameters(start)] for start in starts]


# ---- refusals --------------------------------------------------------------------------------------------


def check_fit(program: Program, sizes: Mapping[str, int], limit: int | None, others: Program | None) -> None:
    """Refuse a program with a predicted peak above the limit, before anything runs.

    `others` is the program that `strategy="auto"` would choose.

    Raises
    ------
    InputError : names the largest tensors, and an option with which the program would fit.
    """
    if limit is None or program.predicted <= limit:
        return
    largest = "\n  ".join(_largest(program, sizes))
    tried = "\n".join(program.choice[1:])
    remedies = ", or ".join(_remedies(program, sizes, limit, others))
    raise InputError(
        f"a rank's predicted peak is {format_bytes(program.predicted)} with strategy="
        f"{program.options.strategy!r}, but it has {format_bytes(limit)}:\n{tried}\nthe largest, with "
        f"gradients and Adam's state of parameters:\n  {largest}\nexpected {remedies}"
    )


def _largest(program: Program, sizes: Mapping[str, int]) -> list[str]:
    found = Planning(program, sizes).largest()
    return [f"{what}: {format_bytes(size)}" for what, size in found[:_LARGEST]]


def _remedies(
    program: Program, sizes: Mapping[str, int], limit: int, others: Program | None
) -> Iterator[str]:
    """Yield options with which the program would fit, as far as arithmetic can predict."""
    if others is not None and others.predicted <= limit:
        yield f"strategy={others.options.strategy!r} ({format_bytes(others.predicted)})"
        return
    rank = max(Planning(program, sizes).memory(), key=lambda one: one.peak.bytes)
    moving = sum(rank.at_peak.get(kind, 0) for kind in ("saved", "temporary", "inputs"))
    still = rank.peak.bytes - moving
    parts = ceil(moving / (limit - still)) if limit > still else 0
    if 0 < parts <= _MOST_PARTS and program.step is None:
        least = f"pipeline=fxdp.Pipeline(microbatches={max(parts, 2)})"
        yield f"{least}, with which about {format_bytes(moving)} come in so many parts"
    elif limit <= still and program.options.shards and program.mesh.size > 1:
        sharded = still * program.mesh.size_along(program.mesh.shard_axis)
        yield f"some {ceil(sharded / limit)} ranks along which parameters are sharded"
    yield "a smaller batch, or more memory"
