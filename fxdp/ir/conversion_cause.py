"""Why a value is converted: the op that needs it otherwise, and its line of code; and what it was before."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.ir.conversions import CONVERSIONS
from fxdp.ir.factors import FACTORS
from fxdp.ir.graph_text import target_text
from fxdp.ir.notes import Cause, note
from fxdp.ir.slots import Gradient, Parameter, ResultSlot, result_words
from fxdp.torch_compat import aten


def cause_of(consumer: fx.Node, producer: fx.Node, position: int) -> Cause:
    """Who needs the conversion; a gradient says whose it is, though a cast of its sum is what is returned."""
    if consumer.target is aten._to_copy.default and [u.op for u in consumer.users] == ["output"]:
        (result,) = consumer.users
        values: Any = result.args[0]
        consumer, position = result, values.index(consumer)
    if note(consumer).reason == FACTORS:
        text = f"factor of {result_words(_slot_of(consumer))}"
        return Cause(consumer.name, producer.name, note(consumer).site, text, gradient=True)
    if consumer.op == "output":
        slot = note(consumer).results[position]
        gradient = isinstance(slot, Gradient) and isinstance(slot.of, Parameter)
        return Cause("output", producer.name, note(producer).site, result_words(slot), gradient)
    site = note(consumer).site
    where = f" in `{site.code}`" if site.code else ""
    name = note(consumer).spells or target_text(consumer.target)
    return Cause(consumer.name, producer.name, site, f"{name}{where}")


def _slot_of(node: fx.Node) -> ResultSlot | None:
    """What the result is that a node makes for nobody else."""
    value = node
    while (user := next(iter(value.users))).op != "output":
        value = user
    values: Any = user.args[0]
    place: int = values.index(value)
    return note(user).results[place]


def unconverted(node: fx.Node) -> fx.Node:
    """The value before it was gathered, reduced or cut; the node itself if it was not."""
    while node.target in CONVERSIONS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node
