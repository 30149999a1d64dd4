"""Run the first step twice, to find kernels of users and libraries that give other bits each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from fxdp.errors import StageError
from fxdp.ir.graph.signature import OutputSpec, result_words
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.liveness.failure import everywhere
from fxdp.ranks.process_mesh import ProcessMesh

_MOST = 5  # results that an error names


@dataclass(frozen=True)
class RepeatedStep:
    """The check of a step whose program calls ops of unknown kernels, at its first call.

    Attributes
    ----------
    block : the number of samples in a block.
    ops : a line for each of these ops.
    """

    block: int
    ops: tuple[str, ...]
    process_mesh: ProcessMesh

    def check(
        self,
        specs: Sequence[OutputSpec],
        first: Sequence[Tensor | None],
        second: Sequence[Tensor | None],
    ) -> None:
        """Compare the results of two runs of the step with the same operands and seed, bit by bit.

        All ranks call this together: a rank's part of an output may differ there alone.

        Raises
        ------
        StageError : on all ranks; names results with other bits on any of them, and the ops.
        """
        rows = zip(specs, first, second, strict=True)
        own = [result_words(spec) for spec, a, b in rows if not _alike(a, b)]
        differing = list(dict.fromkeys(chain.from_iterable(gather_objects(self.process_mesh, own))))
        if differing:
            listing = "\n  ".join(self.ops)
            more = f" and {len(differing) - _MOST} more" if len(differing) > _MOST else ""
            error = StageError(
                f"fxdp.Bitwise(block={self.block}): the first step, run twice, has other bits in "
                f"{', '.join(differing[:_MOST])}{more}. The model calls ops whose kernels fxdp does not "
                f"know:\n  {listing}\nexpected kernels without state and with equal bits for equal operands; "
                "fxdp.verify(..., numerics=fxdp.Bitwise(...)) names the one that has not"
            )
            raise everywhere(error)


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Return whether two results have equal bits; nan equals the same nan. None is on another rank."""
    if a is None or b is None:
        return a is b
    return a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(value: Tensor) -> Tensor:
    return value.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)
