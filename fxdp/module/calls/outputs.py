"""Return flat outputs in the model's own structure, after the model's own checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_unflatten

from fxdp.capture.captured import Captured, Check, OutputLeaf, SizeLeaf
from fxdp.errors import InputError
from fxdp.ir.types.sizes import number
from fxdp.ranks.liveness.failure import everywhere


def packed(captured: Captured, outputs: Sequence[Tensor], sizes: dict[str, int]) -> Any:
    """Arrange flat outputs in the model's own output structure."""
    leaves = [_leaf(leaf, outputs, sizes) for leaf in captured.leaves]
    return tree_unflatten(leaves, captured.out_spec)


def _leaf(leaf: Any, outputs: Sequence[Tensor], sizes: dict[str, int]) -> Any:
    if isinstance(leaf, OutputLeaf):
        return outputs[leaf.index]
    if isinstance(leaf, SizeLeaf):
        return number(leaf.expr, sizes)
    return leaf


def raise_if_checked(
    checks: Sequence[Check],
    outputs: Sequence[Tensor],
    assertion_attribution: Callable[[Sequence[Check]], str],
) -> None:
    """Raise on all ranks if the model's own code would raise; the checks see the global batch.

    `assertion_attribution` names the ranks with a part that fails; a collective call.

    Raises
    ------
    InputError : names the lines that failed, and the ranks.
    """
    failed = [c for c in checks if not c.branch and bool(outputs[c.output]) != c.passes]
    if not failed:
        return
    listing = "\n  ".join(str(check.location) for check in failed)
    parts = assertion_attribution(failed)
    whose = f"By rank, for its own part:{parts}" if parts else "No rank's part fails by itself"
    raising = (
        f"the model refuses this batch: its own code raises an error at\n  {listing}\n{whose}\n"
        "Check the inputs of all ranks, or call the model itself to see its message"
    )
    other_branch = (
        f"values that are not finite, for which the model's own code branches off at\n  {listing}\n{whose}\n"
        "The program has the way for finite values only. Lower the learning rate or clip gradients, or write "
        "the branch with torch.where"
    )
    other_number = (
        f"a number that the model's code reads of its data is another one in this batch, at\n  {listing}\n"
        "The program was made for the number that it was in the first call, or for how it followed from the "
        "size of the batch there. Bring the samples to one size, or pass the number as a Python int: each "
        "value of that has a program of its own"
    )
    said = {"raises": raising, "not finite": other_branch, "other number": other_number}
    worst = next(kind for kind in said if any(check.otherwise == kind for check in failed))
    raise everywhere(InputError(said[worst]))
