"""Cache compiled forward/backward pairs on disk: a second start traces and partitions nothing.

    emitted graph, sizes, strides -- text --> key     found: the code of forward and backward is loaded
                                              else:   `lower_inductor`, then the result is cached

Inductor's own cache is keyed by the forward and backward graphs, and producing both graphs is the largest
part of a warm start. Each rank hits or misses independently, because exchanges between ranks are outside.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx, nn

from fxdp.disk.entries import Entries, key_of
from fxdp.errors import StateError
from fxdp.ir.graph.graph_form import (
    NoTextError,
    exact_text,
    graph_bytes,
    graph_of_bytes,
    node_text,
    value_text,
)
from fxdp.ir.graph.metadata import Metadata, meta
from fxdp.ir.graph.signature import InputSpec
from fxdp.lowering.forward_backward_pair import ForwardBackward, LoweredBackward
from fxdp.lowering.inductor.collective_order import collectives
from fxdp.lowering.inductor.compile import LoweringOptions
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.shapes import Shapes
from fxdp.settings import CacheSettings, ShortcutSettings
from fxdp.startup.artifacts.compiled_code import code_environment
from fxdp.startup.regions.region_code import half_bytes, half_of_bytes
from fxdp.torch_compat import graph_module, is_on

_Lower: TypeAlias = Callable[..., ForwardBackward]


def lower_cached(
    own: _Lower, gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, device: torch.device,
    start: Start, options: LoweringOptions,
) -> ForwardBackward:  # fmt: skip
    """Extend `lower_inductor`: load the pair from disk where an earlier run has compiled it."""
    make = partial(own, gm, values, shapes, device, options=options)
    settings = CacheSettings.from_environment()
    entries = Entries.within(settings.folder, settings.megabytes if is_on("cached_pair") else 0)
    # on devices other than CPU, code is more than its source: never tried
    environment = code_environment() if entries.folder is not None and device.type == "cpu" else None
    key = None
    if environment is not None:
        zero = None if options.zero is None else tuple(sorted(options.zero))
        shortcuts = ShortcutSettings.from_environment().text  # a shortcut that is off contributes no code
        asked = exact_text((zero, replace(options, zero=None)))
        key = _key(gm, values, shapes, (environment, str(device), asked, shortcuts))
    if key is None:
        return make(start=start)
    restored = partial(_restored, make=partial(make, start=Start()), start=start)
    found: ForwardBackward | None = entries.find(key, restored)
    if found is None:
        found = make(start=start)
        entries.keep(key, found, _bytes)
    return found


def _key(
    gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes, others: tuple[str, ...]
) -> str | None:
    """Return the cache key of a pair; None for a graph that cannot be written as text."""
    _, sizes = shapes.trace_sizes()
    hints = {name: getattr(getattr(size, "node", None), "hint", size) for name, size in sizes.items()}
    try:
        return key_of(
            "pair",
            *others,
            exact_text((hints, shapes.generic, shapes.single, sorted(shapes.images))),
            "\n".join(_graph_lines(gm)),
            "\n".join(f"{exact_text(spec)} {value_text(value)}" for spec, value in values.items()),
        )
    except NoTextError:
        return None


def _graph_lines(gm: fx.GraphModule) -> Iterable[str]:
    """Yield each node as text, with all metadata that lowering reads."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NoTextError(f"%{node.name} reads an attribute of its module")
        known: Metadata = meta(node)
        read = (known.type, known.spec, known.results, known.backward, known.placement, known.draws_for)
        yield f"{node_text(node)} {exact_text((*read, known.recompute))}"


def _bytes(pair: ForwardBackward) -> bytes:
    """Serialize a pair: bytes in place of code and graphs, and a digest of the graphs."""
    backward = pair.backward_graph
    plain: dict[str, Any] = {
        "forward": half_bytes(pair.forward),
        "forward_graph": _order(pair.forward_graph),
        "backward_graph": None if backward is None else _order(backward),
        "compiled": {zero: (half_bytes(b.run), b.tangents) for zero, b in pair.compiled.items()},
        "compiled_pair": {f: tuple(map(half_bytes, both)) for f, both in pair.compiled_pair.items()},
    }
    return pickle.dumps((replace(pair, **plain, compile=None, anew=None, _full=None), _digest(pair)))


def _order(gm: fx.GraphModule) -> bytes:
    """Serialize a graph of the collectives alone, which ranks compare."""
    names, graph = frozenset(collectives(gm.graph)), fx.Graph()
    for node in gm.graph.nodes:
        if node.name in names:
            graph.create_node(node.op, node.target, name=node.name)
    graph.output(())
    return graph_bytes(graph_module(nn.Module(), graph))


def _digest(pair: ForwardBackward) -> str:
    """Return a digest of the forward and backward graphs, and so of the values passed between both."""
    graphs = (pair.forward_graph, pair.backward_graph)
    return hashlib.sha256("".join(str(gm.graph) for gm in graphs if gm is not None).encode()).hexdigest()


def _restored(content: bytes, make: Callable[[], ForwardBackward], start: Start) -> ForwardBackward:
    """Load a pair from disk; a backward that is not cached is compiled when needed."""
    kept, digest = pickle.loads(content)
    graphs = [kept.forward_graph, kept.backward_graph]
    forward, backward = (None if g is None else graph_of_bytes(g, "Collectives") for g in graphs)
    code = partial(half_of_bytes, start=start)
    found: ForwardBackward = replace(
        kept,
        forward=code(kept.forward),
        forward_graph=forward,
        backward_graph=backward,
        compiled={zero: LoweredBackward(code(b), tangents) for zero, (b, tangents) in kept.compiled.items()},
        compiled_pair={first: tuple(map(code, both)) for first, both in kept.compiled_pair.items()},
        anew=lambda: _same(make(), digest),
    )
    return found


def _same(pair: ForwardBackward, digest: str) -> ForwardBackward:
    """Return a pair compiled anew, if the backward takes the values that the cached forward saves."""
    if _digest(pair) != digest:
        raise StateError(
            "this program's backward was compiled anew and does not fit its forward, which was kept on disk; "
            "set FXDP_CACHE=0, and report it as a bug in fxdp"
        )
    return pair
