"""Compare the results of a virtual run with the unmodified model on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxdp.ir.graph.signature import Buffer, Gradient, Input, Mutation, OutputSpec, Parameter, result_words
from fxdp.ir.tensor_difference import difference, largest_size
from fxdp.torch_compat import aten


@dataclass(frozen=True, slots=True)
class ResultError:
    """The error of one result against one device; `what` describes a wrong result."""

    result: str
    error: float
    tolerance: float
    what: str = ""

    def __str__(self) -> str:
        return f"{self.result} {self.what}"


def compare_results(
    found: Mapping[OutputSpec, Tensor],
    expected: Mapping[OutputSpec, Tensor],
    tolerances: Mapping[OutputSpec, float],
    floors: Mapping[OutputSpec, float],
    changed: Collection[OutputSpec] = (),
) -> list[ResultError]:
    """Return one row per result; missing or superfluous gradients and missing writes are wrong.

    `changed` are the parameters, buffers and inputs that one device writes.

    A value that is zero up to rounding is compared relative to its terms, given by `floors`: a gradient (of
    the scale of a cosine's operand), a buffer (the running mean after a second BatchNorm), an output (a
    policy's loss, the mean of its normalized advantages). A gradient (of a key's bias) is also compared
    relative to the largest gradient of the model.
    """
    own = {_key(spec): (_result_name(spec), value, tolerances[spec]) for spec, value in found.items()}
    gradients = [magnitude(value) for spec, value in expected.items() if isinstance(spec, Gradient)]
    largest = max(gradients, default=0.0)
    terms = {_key(spec): floor for spec, floor in floors.items()}
    rows = []
    for spec, (name, value, tolerance) in own.items():
        if spec not in expected:
            rows.append(ResultError(name, float("inf"), tolerance, "is None on one device"))
            continue
        beside = cancelled(tolerance) * largest if isinstance(spec, Gradient) else 0.0
        floor = max(beside, terms.get(spec, 0.0))
        error = difference(value, expected[spec], floor)
        what = "" if error <= tolerance else f"differs from one device by {error:.3g} (relative)"
        rows.append(ResultError(name, error, tolerance, what))
    wanted = [spec for spec in expected if isinstance(spec, Gradient) or spec in changed]
    missing = [spec for spec in wanted if spec not in own]
    rows += [ResultError(_result_name(spec), float("inf"), 0.0, "is missing") for spec in missing]
    return rows


def _result_name(spec: OutputSpec) -> str:
    """Return `output 0`, `gradient of fc.weight`, `buffer bn.running_mean` or `input x`."""
    match spec:
        case Mutation(Buffer(name)):
            return f"buffer {name}"
        case Mutation(Parameter(name)):
            return f"parameter {name}"
        case Mutation(Input(index, path)):
            return f"input {path or index}"
        case _:
            return result_words(spec)


def _key(spec: OutputSpec) -> OutputSpec:
    """Return the spec with inputs reduced to their index."""
    if isinstance(spec, (Gradient, Mutation)) and isinstance(spec.of, Input):
        return type(spec)(Input(spec.of.index))
    return spec


_MASK = 1e30
"""Larger values stand for "never" (the least finite number in an attention mask) and are not a scale."""


def cancelled(tolerance: float) -> float:
    """Return the ratio of a sum to the terms below which rounding errors exceed the tolerance.

    A thousandth at 1e-9 in float64; at 1e-6 (float32) and above no cancellation is tolerated.
    """
    return min(1.0, 1e6 * tolerance)


def magnitude(value: Tensor) -> float:
    """Return the largest absolute value that is not a mask; 0 for integers."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    largest = largest_size(value)
    if largest < _MASK:
        return largest
    sizes = value.abs()
    return float(torch.where(sizes < _MASK, sizes, 0.0).max())


def scaled_floor(node: fx.Node, floors: Sequence[float], operands: Sequence[Tensor]) -> float:
    """Return the floor of a product or quotient from the floors of both operands; 0 for all remaining ops.

    Example: in `x - x.max()` the gradient of the maximum is zero up to rounding, is divided by the number of
    times the maximum occurs, and is multiplied by a mask of the positions.
    """
    if node.target is aten.mul.Tensor and len(operands) == 2:
        return max(floors[0] * _largest(operands[1]), floors[1] * _largest(operands[0]))
    if node.target is aten.div.Tensor and len(operands) == 2:
        sizes = operands[1].abs()
        return floors[0] / float(sizes[sizes > 0].min()) if bool((sizes > 0).any()) else floors[0]
    return 0.0


def _largest(value: Tensor) -> float:
    """Return the largest absolute value, also of masks and counts."""
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0
