"""Compare the results of a virtual run with the unmodified model on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from fxdp.ir.graph.signature import Buffer, Gradient, Input, Mutation, OutputSpec, Parameter, result_words
from fxdp.ir.tensor_difference import difference
from fxdp.oracle.compare import cancelled, magnitude


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
