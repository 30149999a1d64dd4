"""Every op with a rule, on operands that lie otherwise in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxdp.ir.ops.layouts import READ_AS_THEY_LIE, arguments_in_format, in_format_of, in_rows
from fxdp.rules.registry import registry
from fxdp.torch_compat import OpOverload
from tests.rules.harness import Case, shown
from tests.rules.samples import STAND_INS, all_samples
from tests.rules.samples.draw import Draw

SAMPLES = all_samples()
STRIDES_ARE_ARGUMENTS = {"as_strided", "as_strided_copy", "as_strided_scatter", "_reshape_alias",
                         "_reshape_alias_copy"}  # fmt: skip
VIEWS = {"view", "_unsafe_view"}
"""A program reshapes instead."""
RAISE = {"pixel_shuffle", "pixel_unshuffle"}
"""Of volumes in channels_last_3d, as in eager."""
CRASHES = {"_int_mm", "_stack", "linalg_ldl_solve", "linalg_lu_solve", "native_batch_norm_backward"}
"""Torch's own kernels are wrong on operands that are fine, or on any."""


def name(target: OpOverload) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default")


def lying(x: Tensor) -> Iterator[Tensor]:
    """The same values in memory of other orders, with gaps, and with any strides of dims of size 1."""
    count = x.dim()
    orders = permutations(range(count)) if count < 5 else [(0, *range(2, count), 1)]
    for order in orders:
        inverse = [order.index(d) for d in range(count)]
        laid = torch.empty([x.shape[d] for d in order], dtype=x.dtype).permute(inverse).copy_(x)
        yield laid
        if 1 in x.shape:
            strides = [7 if n == 1 else step for n, step in zip(x.shape, laid.stride(), strict=True)]
            yield laid.as_strided(x.shape, strides)
    if count and x.numel():
        wide = torch.zeros([2 * n for n in x.shape], dtype=x.dtype)
        yield wide[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or one.is_quantized:
        return True
    one, other = one.resolve_conj(), other.resolve_conj()
    return bool(torch.allclose(one, other, rtol=1e-6, atol=1e-8, equal_nan=True))


def check(case: Case, batch: int) -> None:
    """Laid as its kernel reads it, any operand gives the same results."""
    operands, wanted = case.full(batch)
    for i, operand in enumerate(operands):
        for other in lying(operand):
            given = [other if n == i else value for n, value in enumerate(operands)]
            found = pytree.tree_leaves(run(case, given, batch))
            pairs = zip(found, pytree.tree_leaves(wanted), strict=True)
            assert all(same(*pair) for pair in pairs), (i, tuple(other.shape), other.stride())


def run(case: Case, operands: list[Tensor], batch: int) -> Any:
    def laid(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = arguments_in_format(case.target, args, kwargs)
        return case.target(*args, **kwargs)

    case.placeholder_for = laid
    return case._evaluate(operands, batch)


def cases(target: OpOverload, draws: int) -> Iterator[Case]:
    for seed in range(draws):
        drawn = SAMPLES[name(target)](Draw(seed))
        yield Case(target, drawn.args, dict(drawn.kwargs), **drawn.options)


HERE = [t for t in READ_AS_THEY_LIE if name(t) in SAMPLES and name(t) not in STAND_INS]


@pytest.mark.parametrize("target", HERE, ids=shown)
def test_what_a_kernel_reads_as_it_lies_is_laid_so(target: OpOverload) -> None:
    for case in cases(target, 4):
        for batch in (3, 1):
            check(case, batch)


def test_no_other_kernel_reads_its_operands_as_they_lie() -> None:
    """One draw each, with a single sample and more."""
    skipped = {*STAND_INS, *STRIDES_ARE_ARGUMENTS, *VIEWS, *RAISE, *CRASHES, *map(name, READ_AS_THEY_LIE)}
    faults = []
    for target in registry.targets():
        if name(target) in SAMPLES and name(target) not in skipped:
            for case in cases(target, 1):
                if case.random:
                    continue
                try:
                    check(case, 3)
                    check(case, 1)
                except (AssertionError, RuntimeError) as error:
                    faults.append(f"{name(target)}: {str(error)[:200]}")
    assert "\n".join(faults) == ""


def test_the_table_names_arguments_that_there_are() -> None:
    for target, branches in READ_AS_THEY_LIE.items():
        names = {argument.name for argument in target._schema.arguments}
        if not name(target).startswith(("_embedding_bag", "_scaled_dot_product")):  # a row for the family
            assert branches.keys() <= names, target
        assert branches.keys() & names, target


def test_a_format_is_that_of_another_value() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert in_format_of(torch.randn(2, 3, 4, 5), x).stride() == x.stride()
    assert in_format_of(x, x) is x


def test_rows_that_lie_together_stay() -> None:
    x = torch.randn(2, 3, 4).transpose(0, 1)
    assert in_rows(x) is x
    assert in_rows(x.transpose(1, 2)).is_contiguous()
