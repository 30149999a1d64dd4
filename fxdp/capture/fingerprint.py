"""What a captured graph computes, as a value that two captures of one model can be compared by.

A capture with a number as an input must be, at this number, the capture that has it as a constant. Code may
ask for more than a value (`isinstance(beta, float)`), and go another way without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import Inputs
from fxdp.capture.python_values import SpecializationError
from fxdp.capture.request import Request
from fxdp.ir.graphs import inputs_of
from fxdp.ir.metadata import meta
from fxdp.ir.signature import Input
from fxdp.ir.sizes import number
from fxdp.ir.types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload

_SIZE = 7  # any number for the sizes: both captures have the same symbols
_PLACES = 9  # expressions are computed in another order than Python does


@dataclass(frozen=True)
class GraphFingerprint:
    """What a capture computes, as a digest, at the numbers that it had."""

    digest: str
    numbers: Mapping[str, float]

    @classmethod
    def of(cls, captured: Captured, inputs: Inputs) -> GraphFingerprint:
        """The outline of a capture for these inputs."""
        own = {name: value for name, _, value in numbers_of(inputs)}
        return cls(digest(captured, inputs, own), own)


def capture_open(request: Request, expected: GraphFingerprint | None) -> Captured | SpecializationError:
    """The capture of a request with Python values that are no constants; or which of them must be.

    `expected` is what another capture computes, and the values that the numbers had there.
    """
    inputs = request.inputs
    try:
        found = capture_request(request)
    except SpecializationError as error:
        return error
    symbols = number_symbols(found.gm, [index for _, index, _ in numbers_of(inputs)])
    if shapes_depend_on(found.gm, symbols):
        return SpecializationError(inputs.number_names)
    names = set(inputs.number_names)
    known = expected is not None and expected.numbers.keys() == names
    if names and expected and known and digest(found, inputs, expected.numbers) != expected.digest:
        return SpecializationError(names)
    return found


def numbers_of(inputs: Inputs) -> list[tuple[str, int, float]]:
    """The name of each number that is an input, the index of its tensor, and its value."""
    names = inputs.number_names
    first = len(inputs.tensors) - len(names)
    values = [*(inputs.leaves[i] for i in inputs.dynamic_inputs), *(a.value for a in inputs.attributes)]
    return [(name, first + i, value) for i, (name, value) in enumerate(zip(names, values, strict=True))]


def digest(captured: Captured, inputs: Inputs, numbers: Mapping[str, float]) -> str:
    """The outline of a capture at these numbers."""
    at = {index: numbers[name] for name, index, _ in numbers_of(inputs)}
    return hashlib.sha256(repr(fingerprint(captured, at)).encode()).hexdigest()


def number_symbols(gm: fx.GraphModule, inputs: Sequence[int]) -> dict[str, int]:
    """The symbols of numbers that are read off these inputs, and of which."""
    found: dict[str, int] = {}
    for spec, node in inputs_of(gm.graph, Input):
        if spec.index in inputs:
            read = (meta(user).type for user in node.users)
            found |= {str(type_.expr): spec.index for type_ in read if isinstance(type_, ScalarType)}
    return found


def shapes_depend_on(gm: fx.GraphModule, symbols: Iterable[str]) -> bool:
    """Whether the size of any value depends on one of these numbers."""
    for node in gm.graph.nodes:
        for type_ in meta(node).types:
            sizes = type_.shape if isinstance(type_, TensorType) else ()
            if any(str(s) in symbols for n in sizes if isinstance(n, sympy.Basic) for s in n.free_symbols):
                return True
    return False


def fingerprint(captured: Captured, numbers: Mapping[int, float]) -> tuple[tuple[Any, ...], ...]:
    """Each op with its operands and floats; `numbers` are the values of inputs that are numbers, by index.

    Entire numbers are left out: most are sizes, in which the two calls may differ.
    """
    symbols = number_symbols(captured.gm, list(numbers))
    values = {name: numbers[index] for name, index in symbols.items()}
    places: dict[fx.Node, int] = {}

    def shown(value: Any) -> Any:
        if isinstance(value, fx.Node):
            type_ = meta(value).type
            if isinstance(type_, ScalarType):
                return shown(number(type_.expr, values, unknown=_SIZE))
            return "node", places.get(value)
        if isinstance(value, (list, tuple)):
            return tuple(map(shown, value))
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return "" if float(value).is_integer() else f"{value:.{_PLACES}g}"
        return str(value)

    rows = []
    for node in captured.gm.graph.nodes:
        spec = meta(node).spec
        if isinstance(meta(node).type, ScalarType) or (isinstance(spec, Input) and spec.index in numbers):
            continue
        places[node] = len(places)
        kwargs = tuple((name, shown(value)) for name, value in sorted(node.kwargs.items()))
        target = node.target if isinstance(node.target, OpOverload) else ""
        rows.append((str(target), shown(node.args), kwargs))
    return tuple(rows)
