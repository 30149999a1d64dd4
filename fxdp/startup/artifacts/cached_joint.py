"""Joint graphs cached on disk: the second start of a program traces none.

    exported forward graph, options -- text --> key      found: cached graph, constants and conditions
                                                         else:  `symbolic_joint`, and the result is stored

The key is the text of all that determines the joint graph: the nodes with sizes, strides and source lines of
the values; parameters and buffers without their values; constants with values; the facts known of each
symbol; and the modes in which torch traces. A graph that contains objects without a text, as the user's own
backward, has no key.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from fxdp.capture.captured import Captured
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import first_names
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.disk.entries import Entries, key_of
from fxdp.ir.graph.graph_form import (
    NoTextError,
    exact_text,
    graph_bytes,
    graph_of_bytes,
    node_text,
    tensor_text,
    value_text,
)
from fxdp.ir.graph.graphs import attribute_of
from fxdp.settings import CacheSettings, ShortcutSettings
from fxdp.torch_compat import REGIONS, is_on, known_of_symbols, tracing_modes

_LARGEST = 64 * 2**20
"""Largest number of bytes of constants that are hashed; reading more costs about the time that it saves."""

_SOURCE = ("stack_trace", "nn_module_stack", "custom", "is_gradient_acc")
"""Entries of a node's `meta` that become metadata of the joint graph, in addition to the value."""


_Make: TypeAlias = Callable[[Exported, JointOptions], Captured]


def cached_joint(own: _Make, exported: Exported, options: JointOptions) -> Captured:
    """Extend `symbolic_joint`: load the joint graph from disk where an earlier run has made it."""
    settings = CacheSettings.from_environment()
    entries = Entries.within(settings.folder, settings.megabytes if is_on("cached_joint") else 0)
    key = None if entries.folder is None else _key(exported, options)
    return own(exported, options) if key is None else cached_in(own, entries, key, exported, options)


def cached_in(own: _Make, entries: Entries, key: str, exported: Exported, options: JointOptions) -> Captured:
    """Load the joint graph of this key from these entries, else make and keep it."""
    constants = _constants(exported.gm)
    kept = entries.find(key)
    if isinstance(kept, Captured):
        return _restored(kept, exported, constants)
    found = own(exported, options)
    if all(value is leaf for value, leaf in zip(found.leaves, exported.leaves, strict=True)):
        entries.keep(key, found, lambda found: pickle.dumps(_kept(found, constants)))
    return found


def _kept(found: Captured, own: dict[str, torch.Tensor]) -> Captured:
    """Return the facts that the joint graph adds to an exported graph, as plain values.

    The graph is bytes; constants are names in the exported graph, or tensors made while tracing.
    """
    names = {id(tensor): name for name, tensor in own.items()}
    plain: dict[str, Any] = {
        "gm": graph_bytes(found.gm),
        "constants": {spec: names.get(id(t), t) for spec, t in found.constants.items()},
        **dict.fromkeys(("leaves", "batch", "checks", "routes"), ()),  # the exported graph's own
        "out_spec": None,
    }
    return replace(found, **plain)


def _restored(kept: Captured, exported: Exported, own: dict[str, torch.Tensor]) -> Captured:
    plain: Any = kept
    # tensors of the model must be the model's own again, not copies: the model may modify them in place
    constants = {spec: own[t] if isinstance(t, str) else t for spec, t in plain.constants.items()}
    return replace(
        kept, gm=graph_of_bytes(plain.gm, "Joint"), leaves=exported.leaves, out_spec=exported.out_spec,
        batch=exported.batch, axes=exported.axes, constants=constants, checks=exported.checks,
        routes=exported.routes,
    )  # fmt: skip


def _key(exported: Exported, options: JointOptions) -> str | None:
    """Return the key of the joint graph; None for a graph with content that has no text."""
    fakes = exported.fakes
    env = next((fake.fake_mode.shape_env for fake in fakes), None)
    if not exported.symbolic or env is None:
        return None
    try:
        return key_of(
            "joint",
            exact_text(options),
            repr(tracing_modes()),
            ShortcutSettings.from_environment().text,  # a shortcut's results are kept apart
            repr((exported.paths, exported.batch, exported.axes.names, exported.loss)),
            "\n".join(_graph_lines(exported.gm)),
            "\n".join(_tensor_lines(exported.gm)),
            repr(first_names(exported.owner)),
            known_of_symbols(env),
        )
    except NoTextError:
        return None


def _graph_lines(gm: fx.GraphModule) -> Iterable[str]:
    """Yield each node with value and source; the graph of a region follows the node that names the region."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target in REGIONS:
            yield f"region {node.name} {node.target} {exact_text(node.args)}"
        else:
            yield node_text(node)
        yield value_text(node.meta.get("val"))
        yield repr([node.meta.get(key) for key in _SOURCE])
        if node.op == "get_attr" and isinstance(inner := attribute_of(gm, node), fx.GraphModule):
            yield from _graph_lines(inner)
            yield "end of region"


def _tensor_lines(gm: fx.GraphModule) -> Iterable[str]:
    """Yield parameters and buffers with strides and aliases, and constants to the last bit."""
    first: dict[int, str] = {}
    for named in (gm.named_parameters, gm.named_buffers):
        for name, tensor in named(remove_duplicate=False):
            yield f"{named.__name__} {name} {first.setdefault(id(tensor), name)} {tensor_text(tensor)}"
    bytes_left = _LARGEST
    # values of parameters and buffers are never read while fakes are traced, but values of constants are
    buffers = {id(b) for b in gm.buffers()}
    for name, tensor in _constants(gm).items():
        if id(tensor) in buffers:
            continue
        bytes_left -= tensor.numel() * tensor.element_size()
        if bytes_left < 0:
            raise NoTextError("large constants")
        if tensor.is_meta:
            raise NoTextError("constants without values")
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(plain.numpy().tobytes()).hexdigest()
        yield f"constant {name} {first.setdefault(id(tensor), name)} {tensor_text(tensor)} {digest}"


def _constants(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Return the tensors of a graph that are not parameters, by the names in `get_attr` nodes."""
    parameters = {id(p) for p in gm.parameters()}
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        value = attribute_of(gm, node)
        if isinstance(value, torch.Tensor) and id(value) not in parameters:
            found[str(node.target)] = value
    return found
