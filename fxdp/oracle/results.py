"""The results of a run beside those of the unmodified model on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from fxdp.ir.signature import Buffer, Gradient, Input, Mutation, OutputSpec, Parameter, result_words
from fxdp.ir.tensor_difference import difference
from fxdp.oracle.compare import cancelled, magnitude


@dataclass(frozen=True, slots=True)
class ResultError:
    """How far one result is from one device's; `what` is set where it is wrong."""

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
    """One row per result; gradients that are missing or too many are wrong, as are missing writes.

    `changed` are the parameters, buffers and inputs that one device writes.

    A value that is zero but for rounding counts against what it was made from, as `floors` tells: a gradient
    (of the scale of a cosine's operand), a buffer (the running mean after another BatchNorm), an output (a
    policy's loss, the mean of its normalized advantages); a gradient (a key's bias) against the others, too.
    """
    own = {_key(spec): (result_name(spec), value, tolerances[spec]) for spec, value in found.items()}
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
    rows += [ResultError(result_name(spec), float("inf"), 0.0, "is missing") for spec in missing]
    return rows


def result_name(spec: OutputSpec) -> str:
    """`output 0`, `gradient of fc.weight`, `buffer bn.running_mean` or `input x`."""
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
    """Inputs by index alone."""
    if isinstance(spec, (Gradient, Mutation)) and isinstance(spec.of, Input):
        return type(spec)(Input(spec.of.index))
    return spec
