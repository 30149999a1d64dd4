"""Test cases for op rules: every alternative of a rule runs on virtual ranks.

A `Case` is an op with its arguments in global shapes; tensors are `Sample`s, sizes may be expressions in `B`.
The operands are offered to the rule in every placement, and each alternative is verified:

    global operands --split by placement--> per rank, localized arguments --op--> local results
           |                                                                         |
           +--op--> global results  ==  concatenated, summed, or equal on all ranks--+

for uneven splits with empty and single-sample ranks. Local shapes are compared for all placements.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fxdp.errors import RuleError
from fxdp.ir.ops.parts import combine
from fxdp.ir.types.decompositions import Decomposition, DecompositionStep, Term
from fxdp.ir.types.placements import Dim, P, Partial, Placement, R, Shard
from fxdp.ir.types.sizes import batch_factor, rank_sizes
from fxdp.ir.types.value_types import TensorType, local_shape
from fxdp.rules.localize import MinusOffset, local_target, localized
from fxdp.rules.proof import samples
from fxdp.rules.proof.samples import Sample, expression
from fxdp.rules.registry import Alternative, Op, Operand, registry
from fxdp.torch_compat import OpOverload

SPLITS: tuple[tuple[int, ...], ...] = ((3, 1, 0, 2), (2, 4), (5,), (0, 1))
_PROBES = (2, 3, 5, 7)  # batch sizes for fitting the output shapes, which are at most quadratic in B

_LocalCall = tuple[OpOverload, list[Any], pytree.TreeSpec]
"""The call of a rank: the op, the leaves of its arguments as localized by an alternative, and their tree."""

_Law = Callable[[tuple[Any, ...], dict[str, Any], tuple[Any, ...]], None]


@dataclass(eq=False)
class Case:
    """An op on global arguments, both as the input of a rule and as a call of torch."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    splits: Sequence[tuple[int, ...]] = SPLITS
    random: bool = False  # results are random numbers: compare shapes only
    law: _Law | None = None  # additional check of each rank's (args, kwargs, results)
    placeholder_for: Callable[..., Any] | None = None  # computes the result of an op without a CPU kernel

    def __post_init__(self) -> None:
        self._given = pytree.tree_map(expression, samples.as_tuples((self.args, self.kwargs)))
        leaves = pytree.tree_leaves(self._given)
        self.tensors: list[Sample] = [leaf for leaf in leaves if isinstance(leaf, Sample)]
        self.outputs: tuple[TensorType | None, ...] = self._fit_outputs()
        self._globals: dict[int, tuple[list[torch.Tensor], tuple[Any, ...]]] = {}
        self._calls: dict[Alternative, _LocalCall] = {}

    def op(self, placements: Sequence[tuple[Placement, ...]] | None = None) -> Op:
        """Return the op with its operands in the given placements."""
        given = placements or [(R,)] * len(self.tensors)
        operands = tuple(
            Operand(i, TensorType(t.dtype, t.shape), tuple(p), t.pointer, counts=t.counts, selects=t.selects)
            for i, (t, p) in enumerate(zip(self.tensors, given, strict=True))
        )
        args, kwargs = self._filled(operands)
        return Op(self.target, args, tuple(kwargs.items()), operands, self.outputs)

    def _filled(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with these values for the tensors."""
        rest = iter(values)
        filled: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            Sample, lambda _: next(rest), self._given
        )
        return filled

    def alternatives(self) -> list[Alternative]:
        """Return the rule's alternatives for all placements of operands, in order, without duplicates."""
        found = registry.get(self.target)
        assert found is not None, f"{self.target} has no rule"
        choices = [[(p,) for p in placements_of(t.shape)] for t in self.tensors]
        # all combinations for up to three operands; for more, the first 512, in which the last ones vary
        offers = itertools.islice(itertools.product(*choices), 512)
        answers = (a for offer in offers for a in found.rule(self.op(offer)))
        return list(dict.fromkeys(answers))

    def verified(self) -> list[Alternative]:
        """Verify and return all alternatives."""
        alternatives = self.alternatives()
        for alternative in alternatives:
            self.verify(alternative)
        return alternatives

    def verify(self, alternative: Alternative) -> None:
        """Run the alternative on virtual ranks.

        Raises
        ------
        RuleError : the alternative is malformed or wrong; the message says where.
        """
        self._well_formed(alternative)
        for split in self.splits:
            for inputs in self._concrete_inputs(alternative):
                try:
                    self._run(alternative, inputs, split)
                except Exception as error:
                    text = f"{self.target}: {spelled(alternative)}, inputs {inputs}, split {split}\n{error}"
                    raise RuleError(text) from error

    def _well_formed(self, alternative: Alternative) -> None:
        types = [TensorType(t.dtype, t.shape) for t in self.tensors]
        for types_, placements in ((types, alternative.inputs), (self.outputs, alternative.outputs)):
            if len(types_) != len(placements):
                raise RuleError(f"{self.target}: {len(placements)} placements for {len(types_)} tensors")
            for type_, placement in zip(types_, placements, strict=True):
                combined = types_ is self.outputs and isinstance(placement, Partial) and placement != P
                if placement is None or combined:
                    continue
                if type_ is None or placement not in placements_of(type_.shape):
                    raise RuleError(f"{self.target}: {placement} is no placement of {type_}")
                if type_ is not None and placement == P and type_.dtype == torch.bool:
                    raise RuleError(f"{self.target}: P of bool")
        if all(p in (R, None) for p in (*alternative.inputs, *alternative.outputs)) and None not in (
            alternative.inputs
        ):
            raise RuleError(f"{self.target}: all R is implied")

    def _concrete_inputs(self, alternative: Alternative) -> Iterator[tuple[Placement, ...]]:
        free = [i for i, p in enumerate(alternative.inputs) if p is None]
        base = [R if p is None else p for p in alternative.inputs]
        yield tuple(base)
        for i in free:
            for placement in placements_of(self.tensors[i].shape)[1:]:
                yield (*base[:i], placement, *base[i + 1 :])

    def _localized(self, alternative: Alternative) -> _LocalCall:
        """Return the localized call of an alternative, cached for all inputs and splits."""
        if alternative not in self._calls:
            op = self.op()
            found = pytree.tree_flatten(localized(op, alternative))
            self._calls[alternative] = local_target(op, alternative), *found
        return self._calls[alternative]

    def _run(self, alternative: Alternative, inputs: tuple[Placement, ...], split: tuple[int, ...]) -> None:
        batch = sum(split)
        operands, expected = self.full(batch)
        parts = [samples.split(v, p, split) for v, p in zip(operands, inputs, strict=True)]
        if alternative.decomposition is not None:
            decomposed = _run_steps(alternative.decomposition, parts, split)
            self._compare_values(alternative, decomposed, expected, split)
            return
        target, leaves, spec = self._localized(alternative)
        results: list[tuple[Any, ...]] = []
        for rank in range(len(split)):
            sizes = rank_sizes(split, rank)
            mine = [p[rank] for p in parts]
            args, kwargs = pytree.tree_unflatten([_leaf(leaf, mine, sizes) for leaf in leaves], spec)
            results.append(self._call(target, args, kwargs))
            if self.law is not None:
                self.law(args, kwargs, results[-1])
            self._compare_shapes(alternative, results[-1], sizes)
        if not self.random:
            self._compare_values(alternative, results, expected, split)

    def _compare_shapes(self, alternative: Alternative, results: Any, sizes: Mapping[str, int]) -> None:
        for i, (type_, placement) in enumerate(zip(self.outputs, alternative.outputs, strict=True)):
            if type_ is None:
                continue
            shape = tuple(samples.on_rank(n, sizes) for n in local_shape(type_, placement))
            assert tuple(results[i].shape) == shape, f"result {i}: {tuple(results[i].shape)}, wanted {shape}"

    def _compare_values(
        self, alternative: Alternative, results: Any, expected: Any, split: tuple[int, ...]
    ) -> None:
        for i, placement in enumerate(alternative.outputs):
            if self.outputs[i] is not None and placement is not None:
                samples.assert_full([r[i] for r in results], placement, expected[i], split, f"result {i}")

    def full(self, batch: int) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
        """Return the operands and the results on one device, for a batch of this size."""
        if batch not in self._globals:
            generator = torch.Generator().manual_seed(batch)
            operands = [t.make(batch, generator) for t in self.tensors]
            self._globals[batch] = operands, self._evaluate(operands, batch)
        return self._globals[batch]

    def _evaluate(self, operands: Sequence[torch.Tensor], batch: int) -> tuple[Any, ...]:
        args, kwargs = samples.concrete(self._filled(operands), batch)
        return self._call(self.target, args, kwargs)

    def _call(self, target: OpOverload, args: Any, kwargs: Any) -> tuple[Any, ...]:
        run = self.placeholder_for if self.placeholder_for is not None and target is self.target else target
        with warnings.catch_warnings():
            # about empty parts, deprecated ops, strides: torch 2.15 issues these as Python does, and here the
            # numbers are compared
            warnings.simplefilter("ignore", UserWarning)
            result = run(*args, **kwargs)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def _fit_outputs(self) -> tuple[TensorType | None, ...]:
        runs = []
        for batch in _PROBES:
            generator = torch.Generator().manual_seed(batch)
            runs.append(self._evaluate([t.make(batch, generator) for t in self.tensors], batch))
        return tuple(samples.fit_type(results, _PROBES) for results in zip(*runs, strict=True))


def _leaf(leaf: Any, tensors: Sequence[torch.Tensor], sizes: Mapping[str, int]) -> Any:
    if isinstance(leaf, Operand):
        return tensors[leaf.index]
    if isinstance(leaf, MinusOffset):
        return tensors[leaf.operand.index] - samples.on_rank(leaf.offset, sizes)
    return samples.on_rank(leaf, sizes)


@cache
def placements_of(shape: tuple[Dim, ...]) -> tuple[Placement, ...]:
    """Return `R`, `P(sum)` and every `S(dim, outer)` that a value of this shape can have."""
    shards: list[Placement] = []
    for d, size in enumerate(shape):
        factor = batch_factor(size)
        if isinstance(factor, int):
            shards += [Shard(d, outer) for outer in range(1, factor + 1) if factor % outer == 0]
    return (R, P, *shards)


def spelled(alternative: Alternative) -> str:
    """Return an alternative as text: `S(0), R -> P(sum)`; `*` is any placement, `-` is no tensor."""
    inputs = ", ".join("*" if p is None else str(p) for p in alternative.inputs)
    outputs = ", ".join("-" if p is None else str(p) for p in alternative.outputs)
    return f"{inputs} -> {outputs}"


_Terms = dict[int, tuple[list[torch.Tensor], Any]]


def _run_steps(
    decomposition: Decomposition, parts: Sequence[list[torch.Tensor]], split: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Run a decomposition step by step; return each rank's results, from each operand's local values.

    Partial terms are combined when read.
    """
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
