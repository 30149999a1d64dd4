"""Compiled halves that are kept on disk: the second start of a program traces and partitions nothing.

    emitted graph, sizes, strides -- text --> key     found: both halves' code is loaded
                                              else:   `lower_inductor`, and what it compiled is kept

Inductor finds its code again by the graphs of both halves; to have these costs more than all else of a warm
start. Ranks take the same way or not, each for itself: the exchanges are around it.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from fxdp.disk.entries import Entries, key_of
from fxdp.errors import StateError
from fxdp.ir.graph_form import NoTextError, exact_text, graph_bytes, graph_of_bytes, node_text, value_text
from fxdp.ir.notes import Note, note
from fxdp.ir.slots import Slot
from fxdp.lowering.halves import Halves, LoweredBackward
from fxdp.lowering.inductor.collective_order import collectives
from fxdp.lowering.inductor.compile import LoweringOptions, lower_inductor
from fxdp.lowering.inductor.segment_code import half_bytes, half_of_bytes
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.shapes import Shapes
from fxdp.settings import CacheSettings, ShortcutSettings
from fxdp.torch_compat import code_environment, graph_module, is_on


def lower_kept(
    gm: fx.GraphModule, values: Mapping[Slot, Any], shapes: Shapes, device: torch.device, start: Start,
    options: LoweringOptions,
) -> Halves:  # fmt: skip
    """`lower_inductor`, from the disk where it was done before."""
    options = replace(options, by_layer=is_on("repeated_layers"))
    make = partial(lower_inductor, gm, values, shapes, device, options=options)
    settings = CacheSettings.from_environment()
    entries = Entries.within(settings.folder, settings.megabytes if is_on("kept_halves") else 0)
    # on other devices than CPU code is more than its source: never tried there
    environment = code_environment() if entries.folder is not None and device.type == "cpu" else None
    key = None
    if environment is not None:
        zero = None if options.zero is None else tuple(sorted(options.zero))
        shortcuts = ShortcutSettings.from_environment().text  # who leaves one out gets nothing that it made
        asked = exact_text((zero, replace(options, zero=None)))
        key = _key(gm, values, shapes, (environment, str(device), asked, shortcuts))
    if key is None:
        return make(start=start)
    restored = partial(_restored, make=partial(make, start=Start()), start=start)
    found: Halves | None = entries.find(key, restored)
    if found is None:
        found = make(start=start)
        entries.keep(key, found, _bytes)
    return found


def _key(
    gm: fx.GraphModule, values: Mapping[Slot, Any], shapes: Shapes, others: tuple[str, ...]
) -> str | None:
    """The name of the halves; None for a graph that no text can say."""
    _, sizes = shapes.trace_sizes()
    hints = {name: getattr(getattr(size, "node", None), "hint", size) for name, size in sizes.items()}
    try:
        return key_of(
            "halves",
            *others,
            exact_text((hints, shapes.generic, shapes.single)),
            "\n".join(_graph_lines(gm)),
            "\n".join(f"{exact_text(slot)} {value_text(value)}" for slot, value in values.items()),
        )
    except NoTextError:
        return None


def _graph_lines(gm: fx.GraphModule) -> Iterable[str]:
    """Each node with all that lowering reads of it."""
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output"):
            raise NoTextError(f"%{node.name} reads an attribute of its module")
        known: Note = note(node)
        read = (known.type, known.slot, known.results, known.backward, known.placement, known.draws_for)
        yield f"{node_text(node)} {exact_text((*read, known.again))}"


def _bytes(halves: Halves) -> bytes:
    """The halves with bytes in the place of code and of graphs, and what tells them from others."""
    backward = halves.backward_graph
    plain: dict[str, Any] = {
        "forward": half_bytes(halves.forward),
        "forward_graph": _order(halves.forward_graph),
        "backward_graph": None if backward is None else _order(backward),
        "compiled": {zero: (half_bytes(b.run), b.tangents) for zero, b in halves.compiled.items()},
        "compiled_halves": {f: tuple(map(half_bytes, both)) for f, both in halves.compiled_halves.items()},
    }
    return pickle.dumps((replace(halves, **plain, compile=None, anew=None, _whole=None), _digest(halves)))


def _order(gm: fx.GraphModule) -> bytes:
    """A graph of a half's collectives alone, which ranks compare."""
    names, graph = frozenset(collectives(gm.graph)), fx.Graph()
    for node in gm.graph.nodes:
        if node.name in names:
            graph.create_node(node.op, node.target, name=node.name)
    graph.output(())
    return graph_bytes(graph_module(nn.Module(), graph))


def _digest(halves: Halves) -> str:
    """Of what both halves hand one another."""
    graphs = (halves.forward_graph, halves.backward_graph)
    return hashlib.sha256("".join(str(gm.graph) for gm in graphs if gm is not None).encode()).hexdigest()


def _restored(content: bytes, make: Callable[[], Halves], start: Start) -> Halves:
    """Halves of code from the disk; a backward that is not among it is compiled when it is needed."""
    kept, digest = pickle.loads(content)
    graphs = [kept.forward_graph, kept.backward_graph]
    forward, backward = (None if g is None else graph_of_bytes(g, "Collectives") for g in graphs)
    code = partial(half_of_bytes, start=start)
    found: Halves = replace(
        kept,
        forward=code(kept.forward),
        forward_graph=forward,
        backward_graph=backward,
        compiled={zero: LoweredBackward(code(b), tangents) for zero, (b, tangents) in kept.compiled.items()},
        compiled_halves={first: tuple(map(code, both)) for first, both in kept.compiled_halves.items()},
        anew=lambda: _same(make(), digest),
    )
    return found


def _same(halves: Halves, digest: str) -> Halves:
    """What was made anew, if its backward takes what the kept forward saves."""
    if _digest(halves) != digest:
        raise StateError(
            "this program's backward was compiled anew and does not fit its forward, which was kept on disk; "
            "set FXDP_CACHE=0, and report it as a bug in fxdp"
        )
    return halves
