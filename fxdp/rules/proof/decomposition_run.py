"""Execution of decompositions on virtual ranks, step by step; partial terms are combined when read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxdp.ir.ops.parts import combine
from fxdp.ir.types.decompositions import Decomposition, DecompositionStep, Term
from fxdp.ir.types.placements import Partial, R
from fxdp.ir.types.sizes import rank_sizes
from fxdp.ir.types.value_types import local_shape
from fxdp.rules.proof import samples

_Terms = dict[int, tuple[list[torch.Tensor], Any]]


def run(
    decomposition: Decomposition, parts: Sequence[list[torch.Tensor]], split: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Return each rank's results, from each operand's local values."""
    terms: _Terms = {i: (part, None) for i, part in enumerate(parts)}
    for number, step in enumerate(decomposition.steps, 1):
        terms[-number] = [_step(step, terms, rank, split) for rank in range(len(split))], step.at
    return [tuple(None if t is None else terms[t.index][0][rank] for t in decomposition.results)
            for rank in range(len(split))]  # fmt: skip


def _step(step: DecompositionStep, terms: _Terms, rank: int, split: Sequence[int]) -> torch.Tensor:
    sizes = rank_sizes(split, rank)

    def concrete(leaf: Any) -> Any:
        if not isinstance(leaf, Term):
            return samples.on_rank(leaf, sizes)
        own, at = terms[leaf.index]
        if isinstance(at, Partial):
            assert leaf.at == R, "a step reads a partial term as it is"
            return combine(own, at, split)
        assert at in (leaf.at, None), f"a step reads {at} as {leaf.at}"
        return own[rank]

    is_leaf = lambda leaf: isinstance(leaf, Term)  # noqa: E731
    args, kwargs = pytree.tree_map(concrete, (step.args, dict(step.kwargs)), is_leaf=is_leaf)
    result: torch.Tensor = step.target(*args, **kwargs)
    shape = tuple(samples.on_rank(n, sizes) for n in local_shape(step.type, step.at))
    assert tuple(result.shape) == shape, f"{step.target}: {tuple(result.shape)}, wanted {shape}"
    assert result.dtype == step.type.dtype, f"{step.target}: {result.dtype}, wanted {step.type.dtype}"
    return result
