"""Marks of skip connections in an exported graph, and the pass that reads and erases the marks.

While a model is traced, each stashed or popped tensor passes through `fxdp::mark`, which records the skip's
name and returns an alias. A popped tensor *is* the stashed one, so a skip already is an edge of the graph.
The marks only name the edge, and `route_skips` turns marks into routes before the joint graph is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from fxdp.capture.captured import Route
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import aten

_LABEL = "fxdp_skip"

torch.library.define("fxdp::mark", "(Tensor(a) x, str key) -> Tensor(a)")


@torch.library.impl("fxdp::mark", "CompositeImplicitAutograd")
def _mark(x: Tensor, key: str) -> Tensor:
    return x.view_as(x)


MARK = torch.ops.fxdp.mark.default
fx.node.has_side_effect(MARK)  # a stash without a pop must stay to be reported


@dataclass(frozen=True, slots=True)
class SkipPoint:
    """A traced stash or pop; `namespace` counts the namespaces of the model, None is the default one."""

    kind: str
    namespace: int | None
    name: str
    location: Location

    @property
    def skip(self) -> str:
        """Return the skip's name: `name`, or `name@1` in a namespace."""
        return skip_key(self.namespace, self.name)

    @property
    def key(self) -> str:
        """Return the text of the mark: `stash name@1`."""
        return f"{self.kind} {self.skip}"


def skip_key(namespace: int | None, name: str) -> str:
    """Return the name of a skip: `name` in the default namespace, `name@1` in namespace 1."""
    return name if namespace is None else f"{name}@{namespace}"


def mark(tensor: Tensor, point: SkipPoint) -> Tensor:
    """Mark a tensor in the graph that is being traced, and return an alias."""
    marked: Tensor = torch.ops.fxdp.mark(tensor, point.key)
    return marked


def route_skips(gm: fx.GraphModule, points: Sequence[SkipPoint]) -> tuple[Route, ...]:
    """Replace all marks by routes; the value of each skip keeps a label (`label_of`).

    before: `%m = fxdp.mark(%x, stash a)`, `%m_1 = fxdp.mark(%m, pop a)`, `%sin = aten.sin(%m_1)` after:
    `%alias = aten.alias(%x)`, `%sin = aten.sin(%alias)`

    The alias carries the label through the joint export and is dropped afterwards
    (`joint/annotate_joint.py`).

    Raises
    ------
    CaptureError : skips that are not stashed once and then popped once; all are listed.
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
    """Return the routes, in the order of their stashes."""
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
    """Return the error that lists all faults of a model's skips."""
    listing = "\n".join(f"  * {fault}" for fault in faults)
    return CaptureError(
        f"the model's skip connections do not match:\n{listing}\n"
        "Each declared name must be stashed once and popped once by a later module; "
        "fxdp.skip.verify_skippables checks a model without running it"
    )


def _erase(node: fx.Node, point: SkipPoint) -> None:
    """Erase a mark; the mark of a stash is replaced by an alias with the label."""
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
    """Return the name of the skip, if a node of the joint graph is an alias from `route_skips`; else None."""
    if node.target is not aten.alias.default or node.meta.get("partitioner_tag") == "is_backward":
        return None
    label: str | None = node.meta.get("custom", {}).get(_LABEL)
    return label
