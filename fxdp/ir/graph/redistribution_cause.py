"""The cause of a redistribution: the consumer that needs a different placement, and its line of code."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.ir.graph.factors import SUFFICIENT_FACTORS
from fxdp.ir.graph.graph_text import target_text
from fxdp.ir.graph.metadata import Cause, meta
from fxdp.ir.graph.signature import Gradient, OutputSpec, Parameter, result_words
from fxdp.ir.redistributions import REDISTRIBUTIONS
from fxdp.torch_compat import aten


def cause_of(consumer: fx.Node, producer: fx.Node, position: int) -> Cause:
    """Return the cause of a redistribution of `producer` for `consumer`, which reads it at `position`.

    A gradient's cause names the parameter, even if the program returns a cast of the reduced gradient.
    """
    if consumer.target is aten._to_copy.default and [u.op for u in consumer.users] == ["output"]:
        (result,) = consumer.users
        values: Any = result.args[0]
        consumer, position = result, values.index(consumer)
    if meta(consumer).reason == SUFFICIENT_FACTORS:
        text = f"factor of {result_words(_spec_of(consumer))}"
        return Cause(consumer.name, producer.name, meta(consumer).location, text, gradient=True)
    if consumer.op == "output":
        spec = meta(consumer).results[position]
        gradient = isinstance(spec, Gradient) and isinstance(spec.of, Parameter)
        return Cause("output", producer.name, meta(producer).location, result_words(spec), gradient)
    location = meta(consumer).location
    where = f" in `{location.code}`" if location.code else ""
    name = meta(consumer).decomposed_from or target_text(consumer.target)
    return Cause(consumer.name, producer.name, location, f"{name}{where}")


def _spec_of(node: fx.Node) -> OutputSpec | None:
    """Return the output spec of the only result that a node serves."""
    value = node
    while (user := next(iter(value.users))).op != "output":
        value = user
    values: Any = user.args[0]
    place: int = values.index(value)
    return meta(user).results[place]


def unconverted(node: fx.Node) -> fx.Node:
    """Return the value before it was gathered, reduced or sliced; the node itself if it was not."""
    while node.target in REDISTRIBUTIONS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
