"""Parameters into which the forward writes: weights that are clipped, an encoder that follows another one.

    with torch.no_grad():
        self.fc.weight.clamp_(-1, 1)        %new = clamp(%fc_weight, -1, 1)     returned as `new fc.weight`

Torch adds a tangent of the new value to the joint graph. This tangent is always zero: the write is hidden
from autograd, the parameter remains a leaf, and later reads add to the parameter's own gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx, nn

from fxdp import torch_compat
from fxdp.capture.locations import LocationIndex, module_path
from fxdp.errors import CaptureError
from fxdp.ir.graph.signature import InputSpec, Parameter
from fxdp.torch_compat import aten


def drop_gradients_of_writes(graph: fx.Graph, owner: nn.Module) -> None:
    """Remove the zero tangents of new values of trained parameters of `owner` from the graph; in place.

    Before:  %grad = add(%mm, %tangent_of_new)      After:  %mm
    """
    named = owner.named_parameters(remove_duplicate=False)
    trained = {name for name, parameter in named if parameter.requires_grad}
    for tangent, target in list(_tangents(graph)):
        if module_path(target) not in trained:
            continue
        for user in list(tangent.users):
            if user.op == "output":
                values: Any = user.args[0]
                user.args = (type(values)(None if v is tangent else v for v in values),)
            elif user.target is aten.add.Tensor and not user.kwargs:
                one, other = user.args
                kept = other if one is tangent else one
                assert isinstance(kept, fx.Node)
                user.replace_all_uses_with(kept)
                graph.erase_node(user)


def is_unread_gradient(node: fx.Node) -> bool:
    """Return whether a placeholder is an unused tangent of a value written into a parameter."""
    return not node.users and _written_parameter(node) is not None


def _tangents(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    for node in graph.find_nodes(op="placeholder"):
        target = _written_parameter(node)
        if target is not None:
            yield node, target


def _written_parameter(node: fx.Node) -> str | None:
    """Return the parameter's name, if a placeholder is the tangent of a value written into a parameter."""
    descriptor = node.meta.get("desc")
    if not isinstance(descriptor, torch_compat.TangentAOTInput):
        return None
    written = getattr(descriptor.output, "mutated_input", None)
    return str(written.target) if isinstance(written, torch_compat.ParamAOTInput) else None


def check_written(graph: fx.Graph, spec_of: Callable[[Any], InputSpec], locations: LocationIndex) -> None:
    """Raise on writes into parameters of a loss function, and on writes through which gradients flow.

    Raises
    ------
    CaptureError : with the line of the first write.
    """
    read = {target for node, target in _tangents(graph) if node.users}
    output = graph.output_node()
    values: Any = output.args[0]
    for value, descriptor in zip(values, output.meta["desc"], strict=True):
        written = getattr(descriptor, "mutated_input", None)
        if isinstance(written, torch_compat.ParamAOTInput):
            if written.target in read:
                raise _changed(written.target, _RECORDED, locations.location(value))
            if not isinstance(spec_of(written), Parameter):
                raise _changed(written.target, _OF_A_LOSS, locations.location(value))


_OF_A_LOSS = "which is the loss function's. Make the loss a part of the module"
_RECORDED = "and gradients go through what is written. Write under torch.no_grad()"


def _changed(target: str, why: str, location: Any) -> CaptureError:
    where = f"at {location}: " if location.file else ""
    return CaptureError(f"{where}the forward changes parameter {module_path(target)} in place, {why}")
