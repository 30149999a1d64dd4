"""Canonical example inputs: the same on every rank, whatever its local batch is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

HINTS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97)
"""Batch sizes to trace with: odd and prime, so that the batch is seldom mistaken for another size."""

STATIC_SIZES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79)


def other_sizes(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> set[int]:
    """All sizes of the inputs but the batch."""
    pairs = zip(tensors, dims, strict=True)
    return {size for tensor, dim in pairs for i, size in enumerate(tensor.shape) if i != dim}


def batch_hint(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> int:
    """The batch size to trace with: the first hint that is no other size of the inputs."""
    return first_free(HINTS, other_sizes(tensors, dims), 1)[0]


def static_hints(tensors: Sequence[torch.Tensor], dims: Sequence[int | None]) -> tuple[int, ...]:
    """The four batch sizes of the static fallback."""
    return first_free(STATIC_SIZES, other_sizes(tensors, dims), 4)


def first_free(candidates: Iterable[int], taken: set[int], count: int) -> tuple[int, ...]:
    """The first `count` candidates that are not taken; taken ones only where nothing else is left."""
    ordered = sorted(candidates, key=lambda size: size in taken)
    return tuple(sorted(ordered[:count]))


def make_examples(
    tensors: Sequence[torch.Tensor], dims: Sequence[int | None], batch: int
) -> tuple[torch.Tensor, ...]:
    """Contiguous tensors like the inputs, with `batch` samples; nobody reads values, so none are written."""
    return tuple(_example(*given, batch) for given in zip(tensors, dims, strict=True))


def _example(tensor: torch.Tensor, dim: int | None, batch: int) -> torch.Tensor:
    shape = [batch if i == dim else size for i, size in enumerate(tensor.shape)]
    made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
    return made.requires_grad_() if tensor.requires_grad else made
