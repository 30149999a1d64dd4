"""Marks of skip connections in an exported graph, and the pass that reads and erases them.

While a model is traced, each tensor that is stashed or popped goes through `fxdp::mark`, which says which
skip it is and returns an alias. A popped tensor *is* the stashed one, so in the graph a skip already is an
edge; the marks only give it a name, and `route_skips` turns them into routes before the joint graph is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxdp.capture.captured import Route
from fxdp.errors import CaptureError
from fxdp.ir.metadata import Location
from fxdp.torch_compat import aten

_LABEL = "fxdp_skip"

torch.library.define("fxdp::mark", "(Tensor(a) x, str key) -> Tensor(a)")


@torch.library.impl("fxdp::mark", "CompositeImplicitAutograd")
def _mark(x: Tensor, key: str) -> Tensor:
    return x.view_as(x)


MARK = torch.ops.fxdp.mark.default
fx.node.has_side_effect(MARK)  # a stash that nobody pops must stay to be reported


@dataclass(frozen=True, slots=True)
class SkipPoint:
    """A stash or a pop that was traced; `namespace` counts the namespaces of the model, None the default."""

    kind: str
    namespace: int | None
    name: str
    location: Location

    @property
    def skip(self) -> str:
        """The skip's name: `name`, or `name@1` in a namespace."""
        return skip_key(self.namespace, self.name)

    @property
    def key(self) -> str:
        """What its mark carries: `stash name@1`."""
        return f"{self.kind} {self.skip}"


def skip_key(namespace: int | None, name: str) -> str:
    """`name` in the default namespace, `name@1` in the first other one."""
    return name if namespace is None else f"{name}@{namespace}"


def mark(tensor: Tensor, point: SkipPoint) -> Tensor:
    """The tensor, marked in the graph that is being traced."""
    marked: Tensor = torch.ops.fxdp.mark(tensor, point.key)
    return marked


def route_skips(gm: fx.GraphModule, points: Sequence[SkipPoint]) -> tuple[Route, ...]:
    """After it no mark is left, and each skip is a route; its value keeps a label (`label_of`).

    before: `%m = fxdp.mark(%x, stash a)`, `%m_1 = fxdp.mark(%m, pop a)`, `%sin = aten.sin(%m_1)`
    after:  `%alias = aten.alias(%x)`, `%sin = aten.sin(%alias)`

    The alias carries the label through the joint export and is dropped after it (`joint/annotate_joint.py`).

    Raises
    ------
    CaptureError : a skip is not stashed once and then popped once; all are listed.
    """
    marks = gm.graph.find_nodes(op="call_function", target=MARK)
    keys = [node.args[1] for node in marks]
    if keys != [point.key for point in points]:
        raise CaptureError(
            f"the exported graph has the skip marks {keys}, but the model's forward made "
            f"{[point.key for point in points]}: is torch.ops.fxdp.mark called by hand, or a stash inside of "
            "torch.cond or another op with a body? Move it out"
        )
    routes = _pair(points)
    for node, point in zip(marks, points, strict=True):
        _erase(node, point)
    gm.recompile()
    return routes


def _pair(points: Sequence[SkipPoint]) -> tuple[Route, ...]:
    """The routes, in the order of their stashes."""
    routes: dict[int, Route] = {}
    waiting: dict[str, int] = {}
    faults: list[str] = []
    for i, point in enumerate(points):
        if point.kind == "stash":
            if point.skip in waiting:
                faults.append(f"{point.location}: '{point.skip}' is stashed again before it was popped")
            waiting[point.skip] = i
        elif point.skip in waiting:
            start = waiting.pop(point.skip)
            routes[start] = Route(point.namespace, point.name, points[start].location, point.location)
        else:
            faults.append(f"{point.location}: '{point.skip}' is popped but not stashed before")
    faults += [
        f"{points[i].location}: '{points[i].skip}' is stashed but never popped" for i in waiting.values()
    ]
    if faults:
        raise skip_error(faults)
    return tuple(routes[start] for start in sorted(routes))


def skip_error(faults: Sequence[str]) -> CaptureError:
    """The error that lists what is wrong with the skips of a model."""
    listing = "\n".join(f"  * {fault}" for fault in faults)
    return CaptureError(
        f"the model's skip connections do not match:\n{listing}\n"
        "Each declared name must be stashed once and popped once by a later module; "
        "fxdp.skip.verify_skippables checks a model without running it"
    )


def _erase(node: fx.Node, point: SkipPoint) -> None:
    """Drop a mark; that of a stash leaves an alias with the label."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if point.kind == "stash":
        with node.graph.inserting_before(node):
            alias = node.graph.call_function(aten.alias.default, (source,))
        alias.meta = dict(node.meta)
        alias.meta["custom"] = {**node.meta.get("custom", {}), _LABEL: point.skip}
        source = alias
    node.replace_all_uses_with(source)
    node.graph.erase_node(node)


def label_of(node: fx.Node) -> str | None:
    """The name of the skip, if a node of the joint graph is the alias that `route_skips` left."""
    if node.target is not aten.alias.default or node.meta.get("partitioner_tag") == "is_backward":
        return None
    label: str | None = node.meta.get("custom", {}).get(_LABEL)
    return label
