"""Sizes in a Dynamo graph: the symbols of batch sizes, and the conditions on sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fxdp.capture.joint.conditions import asked_of_sizes
from fxdp.dynamo.dynamo_inputs import GraphInput
from fxdp.dynamo.traced_model import SizeGuard
from fxdp.errors import InputError
from fxdp.ir.graph.graphs import attribute_of
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat.dynamo import TracedFrame, ask_for_symbols, has_symbols_asked, input_source

_Place = tuple[str, int]
"""The name of an input, and one of the input's dims."""


class TracedSizes:
    """The symbols of a trace, each with a place among the inputs from which the size is read."""

    def __init__(self, nodes: Sequence[fx.Node], frame: TracedFrame) -> None:
        self._frame = frame
        self.symbols = {node for node in nodes if _is_size(node)}
        self.places: dict[sympy.Symbol, _Place] = {}
        self.batch: set[sympy.Symbol] = set()
        """The symbols of batch sizes."""

    def of(self, value: Any) -> Any:
        """Return a size as a number, or as an expression in the symbols that remain in the trace."""
        expr = self._frame.shape_env.replace(value.node.expr) if _is_symbolic(value) else sympy.sympify(value)
        return int(expr) if expr.is_Integer else expr

    def unread(self, gm: fx.GraphModule) -> set[sympy.Symbol]:
        """Return symbols that the graph does not read: offsets of inputs in their storage."""
        values = [self.of(node.meta["example_value"]) for node in self.symbols if not is_read(node, gm)]
        return {value for value in values if isinstance(value, sympy.Symbol) and value not in self.places}

    def bind(self, inputs: Sequence[GraphInput], dims: Sequence[int | None]) -> None:
        """Find a place for each symbol, in a batch dim if possible."""
        # batch dims first: a size that also is a batch size must be read from a batch dim, which becomes
        # global
        for wanted in (True, False):
            for given, dim in zip(inputs, dims, strict=True):
                for i, size in enumerate(_shape(given)):
                    expr = self.of(size)
                    if isinstance(expr, sympy.Symbol) and (i == dim) is wanted:
                        self.places.setdefault(expr, (given.operand.name, i))
                        if wanted:
                            self.batch.add(expr)

    def place(self, node: fx.Node) -> _Place:
        """Return the place from which a size among the graph's inputs is read."""
        expr = self.of(node.meta["example_value"])
        if expr not in self.places:
            raise InputError(
                f"the model's code reads a size ({node.name}) of a tensor that its graph does not use "
                "otherwise, so nobody knows the size for the global batch; expected a tensor that is "
                "computed with, or use fxdp.compile(model)"
            )
        return self.places[expr]

    def check_batch(self, inputs: Sequence[GraphInput], dims: Sequence[int | None]) -> None:
        """Raise on batch sizes that are not separate symbols, after asking torch once for symbols."""
        pairs = [(g, dim) for g, dim in zip(inputs, dims, strict=True) if dim is not None]
        other = {
            symbol
            for given, dim in zip(inputs, dims, strict=True)
            for i, size in enumerate(_shape(given))
            if i != dim
            for symbol in getattr(self.of(size), "free_symbols", ())
        }
        fixed = [(g, dim) for g, dim in pairs if not isinstance(self.of(_shape(g)[dim]), sympy.Symbol)]
        mixed = [(g, dim) for g, dim in pairs if self.of(_shape(g)[dim]) in other]
        if not fixed and not mixed:
            return
        # ask once only: a size that the code itself fixes is a number again after each trace
        if not all(has_symbols_asked(given.example, dim) for given, dim in pairs):
            ask_for_symbols([(given.example, dim) for given, dim in pairs])
        given, dim = (fixed or mixed)[0]
        if fixed:
            raise _fixed(given, dim, self._location_of(given, dim))
        raise InputError(
            f"the batch size of {given.operand.name} is the size of another dim, too, as the model's code "
            "makes them equal; expected one of its own: use fxdp.compile(model)"
        )

    def _location_of(self, given: GraphInput, dim: int) -> str:
        """Return the location at which the model's code specialized the batch size to a number."""
        env, size = self._frame.shape_env, given.example.shape[dim]
        fixed = {symbol for symbol, left in env.replacements.items() if left == size}
        asked = self._asked(replaced=False)
        return next((f" at {location}" for expr, location in asked if fixed & expr.free_symbols), "")

    def _asked(self, *, replaced: bool = True) -> Iterator[tuple[sympy.Basic, Location]]:
        """Yield the conditions on sizes; torch truncates long paths, so the file name is completed."""
        file = self._frame.code.co_filename
        for expr, location in asked_of_sizes(self._frame.shape_env, replaced=replaced):
            yield (
                expr,
                replace(location, file=file) if location.file and file.endswith(location.file) else location,
            )

    def guards(self) -> Iterator[SizeGuard]:
        """Yield the guards on sizes that are found among the inputs."""
        for expr, location in self._asked():
            symbols = expr.free_symbols
            if symbols and symbols <= self.places.keys():
                yield SizeGuard(expr, {s: self.places[s] for s in symbols}, location)
            elif symbols & self.batch:
                raise InputError(
                    f"the model's code at {location} compares the batch size with a number that is no size "
                    f"({expr}), which cannot be asked of the global batch; expected tensor operations there, "
                    "or fxdp.compile(model)"
                )

    def shape_lines(self, inputs: Sequence[GraphInput]) -> Iterator[str]:
        """Yield each input with sizes as text, equal on ranks with different batch sizes."""
        for given in inputs:
            shape = [self.text(self.of(size)) for size in _shape(given)]
            yield f"input {given.operand.name} {getattr(given.example, 'dtype', '')} {shape}"

    def text(self, size: Any) -> str:
        """Return a size as text, in terms of the inputs from which the size is read."""
        if not isinstance(size, sympy.Basic):
            return str(size)
        return str(size.xreplace({symbol: self._named(symbol) for symbol in size.free_symbols}))

    def _named(self, symbol: sympy.Symbol) -> sympy.Symbol:
        name, dim = self.places.get(symbol, ("?", 0))
        return sympy.Symbol("B" if symbol in self.batch else f"{name}.size({dim})")


def _fixed(given: GraphInput, dim: int, location: str) -> InputError:
    name, size = given.operand.name, given.example.shape[dim]
    if size < 2:
        return InputError(
            f"this rank's first batch has {size} samples in {name}, and torch.compile makes a constant of "
            "a first size of 0 or 1; expected at least 2 on each rank at the first call (parts of 1 or 0 "
            "samples may come later), or use fxdp.compile(model), which takes them at once"
        )
    return InputError(
        f"torch.compile made a constant of the batch size of {name}, which is {size} on this rank{location}; "
        "expected code that is the same for each batch size. Use fxdp.compile(model), which traces the model "
        "for the global batch; an input without a batch dim has None in batch_dims="
    )


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _is_size(node: fx.Node) -> bool:
    """Return whether a placeholder is a size, stride or offset of a tensor, not a number argument."""
    found = input_source(node)
    reads = (".size()[", ".stride()[", ".storage_offset()")
    return isinstance(node.meta.get("example_value"), torch.SymInt) and any(
        text in (found[0] if found else "") for text in reads
    )


def _shape(given: GraphInput) -> tuple[Any, ...]:
    value = given.node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def is_read(node: fx.Node, gm: fx.GraphModule) -> bool:
    """Return whether an op uses the node, here or in a region that takes the node as an argument."""
    for user in node.users:
        head: Any = user.args[0] if user.args else None
        body = attribute_of(gm, head) if isinstance(head, fx.Node) and head.op == "get_attr" else None
        if not isinstance(body, fx.GraphModule):
            return True
        inside = zip(body.graph.find_nodes(op="placeholder"), user.args[1:], strict=False)
        if any(is_read(inner, body) for inner, passed in inside if passed is node):
            return True
    return False
