"""The results of a run beside those of the unmodified model on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from fxdp.ir.slots import Buffer, Gradient, Input, Mutation, Parameter, ResultSlot, result_words
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
    found: Mapping[ResultSlot, Tensor],
    expected: Mapping[ResultSlot, Tensor],
    tolerances: Mapping[ResultSlot, float],
    floors: Mapping[ResultSlot, float],
    changed: Collection[ResultSlot] = (),
) -> list[ResultError]:
    """One row per result; gradients that are missing or too many are wrong, as are missing writes.

    `changed` are the parameters, buffers and inputs that one device writes.

    A value that is zero but for rounding counts against what it was made from, as `floors` tells: a gradient
    (of the scale of a cosine's operand), a buffer (the running mean after another BatchNorm), an output (a
    policy's loss, the mean of its normalized advantages); a gradient (a key's bias) against the others, too.
    """
    own = {_key(slot): (result_name(slot), value, tolerances[slot]) for slot, value in found.items()}
    gradients = [magnitude(value) for slot, value in expected.items() if isinstance(slot, Gradient)]
    largest = max(gradients, default=0.0)
    terms = {_key(slot): floor for slot, floor in floors.items()}
    rows = []
    for slot, (name, value, tolerance) in own.items():
        if slot not in expected:
            rows.append(ResultError(name, float("inf"), tolerance, "is None on one device"))
            continue
        beside = cancelled(tolerance) * largest if isinstance(slot, Gradient) else 0.0
        floor = max(beside, terms.get(slot, 0.0))
        error = difference(value, expected[slot], floor)
        what = "" if error <= tolerance else f"differs from one device by {error:.3g} (relative)"
        rows.append(ResultError(name, error, tolerance, what))
    wanted = [slot for slot in expected if isinstance(slot, Gradient) or slot in changed]
    missing = [slot for slot in wanted if slot not in own]
    rows += [ResultError(result_name(slot), float("inf"), 0.0, "is missing") for slot in missing]
    return rows


def result_name(slot: ResultSlot) -> str:
    """`output 0`, `gradient of fc.weight`, `buffer bn.running_mean` or `input x`."""
    match slot:
        case Mutation(Buffer(name)):
            return f"buffer {name}"
        case Mutation(Parameter(name)):
            return f"parameter {name}"
        case Mutation(Input(index, path)):
            return f"input {path or index}"
        case _:
            return result_words(slot)


def _key(slot: ResultSlot) -> ResultSlot:
    """Inputs by index alone."""
    if isinstance(slot, (Gradient, Mutation)) and isinstance(slot.of, Input):
        return type(slot)(Input(slot.of.index))
    return slot
