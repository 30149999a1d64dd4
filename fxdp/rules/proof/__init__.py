"""Proof of a rule: run every alternative on virtual ranks and compare with the op on full values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxdp.errors import InputError
from fxdp.rules.proof.case import SPLITS, Case, spelled
from fxdp.rules.proof.samples import Sample
from fxdp.rules.registry import registry
from fxdp.torch_compat import OpOverload, overload_of

__all__ = ["Sample", "check_rule"]


def check_rule(
    op: Any, *args: Any, splits: Sequence[tuple[int, ...]] = SPLITS, **kwargs: Any
) -> tuple[str, ...]:
    """Verify the rule registered for `op` on generated values, on each rank and recombined.

    Every alternative that the rule gives for these arguments, for any placements of the operands, is run on
    virtual ranks and compared with the op on the global batch, to 1e-9: use float64.

        fxdp.check_rule(torch.ops.mylib.scale.default, fxdp.Sample("B", 3), fxdp.Sample(3))
            -> ("S(0), R -> S(0)",)

    Parameters
    ----------
    op : an op overload, or the result of `torch.library.custom_op`.
    args, kwargs : the op's arguments; tensors are `fxdp.Sample`s, and sizes that count the batch are strings
        such as `"B"` or `"2*B"`.
    splits : local batch sizes of the ranks, per trial; try 0 and 1.

    Returns the alternatives as text, `operands -> results`: `R` full, `S(d)` split on dim d, `P(sum)` terms
    of a sum, `*` not read, `-` no tensor.

    Raises
    ------
    RuleError : an alternative differs from the op; the message has the alternative, the split and the
        difference.
    InputError : the op has no rule, or does not take the arguments.
    """
    target = overload_of(op)
    if not isinstance(target, OpOverload) or registry.get(target) is None:
        raise InputError(
            f"check_rule: got {op}, expected an op overload that has a rule, such as "
            "torch.ops.mylib.f.default. Register one with fxdp.register_rule"
        )
    try:
        case = Case(target, args, kwargs, splits=splits)
    except (RuntimeError, TypeError, ValueError) as error:  # raised by the op, which ran on samples
        raise InputError(
            f"check_rule: {target} does not take these arguments: {str(error).splitlines()[0]}. Expected its "
            'own arguments, with a fxdp.Sample("B", 3) in the place of each tensor'
        ) from error
    return tuple(spelled(a) for a in case.verified())
