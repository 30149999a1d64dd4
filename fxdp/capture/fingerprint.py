"""Fingerprints of captured graphs, to compare two captures of one model.

A capture with a dynamic scalar input must equal, at the value of the scalar, the capture with the value as a
constant. The two may differ, because code may read more than the value (`isinstance(beta, float)`) and take
another branch without an error.
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
from fxdp.capture.python_values import SpecializationError
from fxdp.capture.request import Request
from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Input
from fxdp.ir.types.sizes import number
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.torch_compat import OpOverload

_SIZE = 7  # any number for the sizes: both captures have the same symbols
_PLACES = 9  # significant digits: expressions are evaluated in another order than in Python


@dataclass(frozen=True)
class GraphFingerprint:
    """Digest of a captured graph, and the values of the dynamic scalars for which the digest was computed."""

    digest: str
    numbers: Mapping[str, float]

    @classmethod
    def of(
        cls, captured: Captured, inputs: int, names: Sequence[str], numbers: Mapping[str, float]
    ) -> GraphFingerprint:
        """Return the fingerprint of a capture at values of the dynamic scalars, the last of all inputs."""
        at = {inputs - len(names) + i: numbers[name] for i, name in enumerate(names)}
        return cls(hashlib.sha256(repr(_fingerprint(captured, at)).encode()).hexdigest(), numbers)


def capture_open(request: Request, expected: GraphFingerprint | None) -> Captured | SpecializationError:
    """Capture a request with dynamic scalar inputs, or return an error that names scalars to be specialized.

    `expected` is the fingerprint of an earlier capture, with the values of the scalars for that fingerprint.
    """
    inputs = request.inputs
    try:
        found = capture_request(request)
    except SpecializationError as error:
        return error
    names, count = inputs.number_names, len(inputs.tensors)
    if _shapes_depend_on(found.gm, _number_symbols(found.gm, range(count - len(names), count))):
        return SpecializationError(names)
    if not names or expected is None or expected.numbers.keys() != set(names):
        return found
    own = GraphFingerprint.of(found, count, names, expected.numbers)
    return found if own.digest == expected.digest else SpecializationError(names)


def _number_symbols(gm: fx.GraphModule, inputs: Sequence[int]) -> dict[str, int]:
    """Return the symbols of numbers that are read from these inputs, each with the index of the input."""
    found: dict[str, int] = {}
    for spec, node in inputs_of(gm.graph, Input):
        if spec.index in inputs:
            read = (meta(user).type for user in node.users)
            found |= {str(type_.expr): spec.index for type_ in read if isinstance(type_, ScalarType)}
    return found


def _shapes_depend_on(gm: fx.GraphModule, symbols: Iterable[str]) -> bool:
    """Return whether the size of any value depends on one of these symbols."""
    for node in gm.graph.nodes:
        for type_ in meta(node).types:
            sizes = type_.shape if isinstance(type_, TensorType) else ()
            if any(str(s) in symbols for n in sizes if isinstance(n, sympy.Basic) for s in n.free_symbols):
                return True
    return False


def _fingerprint(captured: Captured, numbers: Mapping[int, float]) -> tuple[tuple[Any, ...], ...]:
    """Return each op with operands and floats; `numbers` maps indices of scalar inputs to values.

    Integers are left out: most are sizes, in which the two calls may differ.
    """
    symbols = _number_symbols(captured.gm, list(numbers))
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
