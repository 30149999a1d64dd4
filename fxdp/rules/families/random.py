"""Ops that draw random numbers.

Law, in distribution: a rank may draw the numbers of its own samples. Numbers that must be equal on all
ranks are the business of the pass that places these ops, as is bitwise agreement with one device.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten
from fxdp.ir.placements import Shard
from fxdp.ir.sizes import batch_factor
from fxdp.rules.dims import together
from fxdp.rules.families.factories import like
from fxdp.rules.families.pointwise import aligned
from fxdp.rules.registry import Alternative, Op, existing, rule


@rule(
    "random",
    aten.native_dropout.default, aten.bernoulli.default, aten.bernoulli.Tensor, aten.poisson.default,
    aten.binomial.default, aten._standard_gamma.default,
    aten.rrelu_with_noise_functional.default, aten.normal.Tensor_float, aten.normal.float_Tensor,
    aten.normal.Tensor_Tensor, *existing("_fused_dropout"),
)  # fmt: skip
def drawn_per_element(op: Op) -> Iterator[Alternative]:
    """Each element is drawn by itself, from numbers aligned with it."""
    yield from aligned(op)


@rule(
    "random",
    aten.rand_like, aten.randn_like, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.randint_like.generator, aten.randint_like.low_generator_dtype, aten.bernoulli.p,
    aten.uniform.default, aten.normal_functional.default, aten.log_normal.default, aten.cauchy.default,
    aten.exponential.default, aten.geometric.default, aten.random.default, aten.random.to,
    getattr(aten.random, "from"), *existing("randint_like.Tensor", "randint_like.Tensor_generator"),
)  # fmt: skip
def drawn_like(op: Op) -> Iterator[Alternative]:
    """Numbers of the operand's shape; its values are not read."""
    yield from like(op)


@rule("random", aten.rand, aten.randn, aten.randint, aten.normal.float_float)
def drawn(op: Op) -> Iterator[Alternative]:
    """Numbers of an explicit size; the rank draws those of its batch."""
    for dim, size in enumerate(op.output.shape):
        if batch_factor(size) is not None:
            yield op.alternative({}, Shard(dim))


@rule("random", aten.multinomial.default, aten._sample_dirichlet.default)
def drawn_per_row(op: Op) -> Iterator[Alternative]:
    """Rows are drawn by themselves, from the weights along the last dim."""
    yield from together(op, frozenset({op.operands[0].ndim - 1}))


@rule("random", aten.randperm, kind="gathered")
def permutation(op: Op) -> tuple[Alternative, ...]:
    """A permutation is one whole."""
    return ()
