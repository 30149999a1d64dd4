"""Small graphs by hand, with their notes.

    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]", S(0))
    y = g.call(aten.relu.default, x, type="f32[B, 3]", at=S(0), reads=(S(0),))
    gm = g.returns({Output(0): y})

`text` prints a graph as golden text, `mesh` is a mesh of sizes without ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.compiler.pass_manager import Pass
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.graph.metadata import Metadata, meta
from fxdp.ir.graph.signature import InputSpec, OutputSpec, Size
from fxdp.ir.types.mesh import Mesh, mesh_of
from fxdp.ir.types.placements import Placement
from fxdp.ir.types.sizes import LOCAL, OFFSET, B
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType

_DTYPES = {
    "f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "i64": torch.int64, "b8": torch.bool, "c128": torch.complex128,
}  # fmt: skip
_SYMBOLS = {"B": B, "b": LOCAL, "offset": OFFSET, "s0": sympy.Symbol("s0", integer=True, positive=True)}
_Place = Placement | tuple[Placement | None, ...] | None


def type_of(text: str | None) -> NodeType:
    """`f32[B, 3]`, `int(B*7)`, a tuple of such in parentheses, or None."""
    if text is None:
        return None
    if text.startswith("int"):
        return ScalarType(sympy.sympify(text[4:-1], locals=_SYMBOLS))
    if text.startswith("("):
        return tuple(type_of(t) for t in re.findall(r"\w+\[.*?\]", text))  # type: ignore[misc]
    dtype, sizes = text[:-1].split("[")
    shape = [sympy.sympify(n, locals=_SYMBOLS) for n in sizes.split(",") if n.strip()]
    return TensorType(_DTYPES[dtype], tuple(int(n) if n.is_Integer else n for n in shape))


class Sketch:
    """A graph in the making."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def add(self, spec: InputSpec | None, type: str | None, at: _Place = None) -> fx.Node:
        """A placeholder."""
        name = getattr(spec, "path", "") or getattr(spec, "name", "") or spec.__class__.__name__.lower()
        taken = {n.target for n in self.graph.nodes}
        node = self.graph.placeholder(f"{name}_{len(taken)}" if name in taken else re.sub(r"\W", "_", name))
        meta(node).spec, meta(node).type, meta(node).placement = spec, type_of(type), at
        return node

    def size(self, name: str) -> fx.Node:
        """A size slot of a LOCAL program."""
        return self.add(Size(name), f"int({name})")

    def call(
        self, target: Any, *args: Any, type: str | None = None, at: _Place = None,
        reads: tuple[Placement | None, ...] = (), name: str | None = None, **facts: Any,
    ) -> fx.Node:  # fmt: skip
        """An op; `facts` are further fields of its note."""
        node = self.graph.create_node("call_function", target, args, {}, name)
        node.meta["fxdp"] = Metadata(type=type_of(type), placement=at, operands=reads, **facts)
        return node

    def returns(
        self, results: Mapping[OutputSpec, fx.Node], reads: tuple[Placement | None, ...] = ()
    ) -> fx.GraphModule:
        """End the graph."""
        node = self.graph.output(tuple(results.values()))
        meta(node).results, meta(node).operands = tuple(results), reads
        return fx.GraphModule({}, self.graph)


def mesh(ranks: int = 2) -> Mesh:
    """Ranks on axis `dp`, none of which exists."""
    return mesh_of({"dp": ranks}, "cpu")


def text(gm: fx.GraphModule) -> str:
    """Golden text on two ranks; ends in a line break, as inline goldens do."""
    return graph_text(gm, {"dp": 2}) + "\n"


def after(step: Pass, gm: fx.GraphModule, ranks: int = 2) -> str:
    """The golden text after one pass, which must leave a sound graph."""
    result = step.run(gm, mesh(ranks))
    result.graph.lint()
    return text(result)
