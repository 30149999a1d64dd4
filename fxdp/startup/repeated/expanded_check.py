"""Check an expanded program against the full emitted program before use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.signature import Gradient, Mutation
from fxdp.lowering.eager import backward_inputs, backward_results, forward_inputs, forward_results
from fxdp.lowering.inductor.forward_backward import Pair
from fxdp.lowering.inductor.strides import results
from fxdp.startup.regions.call_text import value_text


class WrongLayersError(Exception):
    """Raised if an expanded program does not match the full program."""


def check_expanded(full: fx.GraphModule, pair: Pair) -> None:
    """Compare the signature of an expanded pair with the signature of the full emitted program.

    Raises
    ------
    WrongLayersError : inputs, outputs or saved values differ in number, order or type, or a call reads a
        value before the value is computed.
    """
    forward, backward, saved_order = pair
    specs = results_of(full.graph)
    visible = len(forward_results(full.graph)) + sum(isinstance(s, Mutation) for s, _ in specs)
    given = _taken(forward, len(forward_inputs(full.graph)), "forward")
    saved = results(forward)[visible:]
    _check_results(forward, visible + len(saved), "forward")
    if backward is None:
        if saved or saved_order:
            raise WrongLayersError("values are saved for no backward")
        return
    taken = _taken(backward, len(saved_order) + len(backward_inputs(full.graph)), "backward")
    for i, node in zip(saved_order, taken, strict=False):
        if not 0 <= i < len(saved) or _type(saved[i]) != _type(node):
            raise WrongLayersError(f"the backward takes %{node.name}, {_type(node)}, for saved value {i}")
    _check_results(backward, len(backward_results(full.graph)), "backward")
    if any(isinstance(spec, Gradient) for spec, _ in specs):
        _check_gradients(given, results(backward))


def _taken(half: fx.GraphModule, expected: int, name: str) -> list[fx.Node]:
    try:
        half.graph.lint()
    except RuntimeError as error:
        raise WrongLayersError(f"{name}: {error}") from error
    found = half.graph.find_nodes(op="placeholder")
    if len(found) != expected:
        raise WrongLayersError(f"the {name} takes {len(found)} values; expected {expected}")
    return list(found)


def _check_results(half: fx.GraphModule, expected: int, name: str) -> None:
    if (found := len(results(half))) != expected:
        raise WrongLayersError(f"the {name} gives {found} values; expected {expected}")


def _check_gradients(inputs: Sequence[fx.Node], gradients: Sequence[Any]) -> None:
    """Check that the gradients, first among a backward's results, have the shapes of the forward's inputs."""
    for node, gradient in zip(inputs, gradients, strict=False):
        if not isinstance(gradient, fx.Node):
            continue
        value, grad = node.meta.get("val"), gradient.meta.get("val")
        if isinstance(value, Tensor) and isinstance(grad, Tensor) and str(value.shape) != str(grad.shape):
            raise WrongLayersError(f"%{gradient.name}: {grad.shape}, is the gradient of {value.shape}")


def _type(value: Any) -> str:
    return value_text(value.meta.get("val") if isinstance(value, fx.Node) else value)
