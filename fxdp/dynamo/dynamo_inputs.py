"""Classification of the inputs of a Dynamo graph, by the Python expressions (sources) that Dynamo reads.

L['x']                                                      an argument: an input of each call
L['batch']['image']                                         an element of an argument
L['self']._modules['fc']._parameters['weight']              the parameter fc.weight
L['self'].mask, G['TABLE']                                  a tensor that is no argument: a constant
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from fxdp.dynamo.traced_model import GraphOperand
from fxdp.errors import InputError
from fxdp.torch_compat.dynamo import TracedFrame, input_source

_STEP = re.compile(r"\[('(?P<key>[^']*)'|(?P<index>\d+))\]|\.(?P<attribute>\w+)(?![\w(])")
_REGISTRIES = ("_modules", "_parameters", "_buffers")


@dataclass(frozen=True)
class GraphInput:
    """A placeholder of a Dynamo graph."""

    node: fx.Node
    operand: GraphOperand
    example: Any
    path: tuple[str | int, ...] = ()
    """For an argument: the name, then the path into the argument."""

    @property
    def in_tensor(self) -> bool:
        """Return whether the input is a number passed as a tensor."""
        return not isinstance(self.example, Tensor) and isinstance(self.node.meta["example_value"], Tensor)


def read_input(node: fx.Node, frame: TracedFrame) -> GraphInput:
    """Classify a placeholder.

    Raises
    ------
    InputError : an input that no program can take; the error names the source.
    """
    found = input_source(node)
    if found is None:
        raise InputError(
            f"torch.compile gave a graph with an input {node.name} that comes from nowhere: a part of a "
            "graph that another compiler split; expected the entire one"
        )
    source, example = found
    steps = _steps(source)
    if steps is None or steps[0] not in ("L", "G") or len(steps) < 2:
        raise _unknown(source)
    owners = _walk(steps, frame)
    names = tuple(step for step in steps[1:] if step not in _REGISTRIES)
    inside = any(isinstance(owner, nn.Module) or inspect.isroutine(owner) for owner in owners)
    if isinstance(example, nn.Parameter) or (inside and steps[-2] == "_buffers"):
        return GraphInput(node, GraphOperand("model", _name(names, owners, frame.code)), example)
    if not isinstance(example, (Tensor, torch.SymInt, int, float)):
        raise _unknown(source)
    if isinstance(example, Tensor) and (inside or steps[0] == "G"):
        return GraphInput(node, GraphOperand("constant", source, example), example)
    return GraphInput(node, GraphOperand("input", _spoken(names)), example, names)


def _steps(source: str) -> list[Any] | None:
    """Return `["L", "x", 0, "y"]` for `L['x'][0].y`; None if the source is not a path through containers."""
    steps: list[Any] = [source[:1]]
    at = 1
    while at < len(source):
        match = _STEP.match(source, at)
        if match is None:
            return None
        key, index, attribute = match["key"], match["index"], match["attribute"]
        steps.append(int(index) if index is not None else key if attribute is None else attribute)
        at = match.end()
    return steps


def _walk(steps: Sequence[Any], frame: TracedFrame) -> list[Any]:
    """Return the objects along the path to an input, as far as the path can be followed."""
    here: Any = frame.locals if steps[0] == "L" else frame.globals
    found = []
    for step in steps[1:-1]:
        try:
            here = here[step] if isinstance(here, (Mapping, list, tuple)) else getattr(here, str(step))
        except (AttributeError, LookupError, TypeError):
            break
        found.append(here)
    return found


def _name(names: Sequence[str | int], owners: Sequence[Any], code: CodeType) -> str:
    """Return the parameter's name, without the variable of the model if that is the first argument."""
    of_first = bool(owners) and isinstance(owners[0], nn.Module) and names[0] in (*code.co_varnames[:1], "fn")
    own = names[1:] if of_first and len(names) > 1 else names
    return ".".join(str(name).replace(".", "_") for name in own)


def _spoken(path: Sequence[str | int]) -> str:
    return str(path[0]) + "".join(f"[{step!r}]" for step in path[1:])


def _unknown(source: str) -> InputError:
    return InputError(
        f"torch.compile gave a graph that reads {source}, which is neither an argument of the compiled "
        "function nor a tensor of the model; expected these alone: pass it as an argument, or use "
        "fxdp.compile(model)"
    )


def batch_dim(given: GraphInput, prefix: Any, frame: TracedFrame) -> int | None:
    """Return the batch dim of an argument; `batch_dims` is as in `fxdp.compile`.

    Raises
    ------
    InputError : a prefix that does not fit the arguments.
    """
    tensor = given.example
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        return None
    dim = _at(prefix, _place(given.path, frame), given.operand.name) if prefix is not None else 0
    if dim is None:
        return None
    if not -tensor.dim() <= dim < tensor.dim():
        raise InputError(
            f"batch_dims gives dim {dim} for {given.operand.name}, which has shape {tuple(tensor.shape)}: "
            "give it a dim of its own, or None if it has no batch dim"
        )
    return dim % tensor.dim()


def _place(path: tuple[str | int, ...], frame: TracedFrame) -> tuple[int | None, tuple[str | int, ...]]:
    """Return an argument's position, if it may be positional, and the path to the argument by its name."""
    code = frame.code
    names = code.co_varnames[int(_is_method(frame)) : code.co_argcount]
    head = path[0]
    if head in names:
        return names.index(str(head)), path
    keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
    if head in keywords or len(path) < 2:
        return None, path
    if isinstance(path[1], int):  # of `*args`
        return len(names) + path[1], path[1:]
    return None, path[1:]  # of `**kwargs`


def _is_method(frame: TracedFrame) -> bool:
    """Return whether the first argument is the called module, which callers do not count as an argument."""
    first = frame.locals.get(next(iter(frame.code.co_varnames), ""))
    method = getattr(type(first), frame.code.co_name, None)
    return isinstance(first, nn.Module) and getattr(method, "__code__", None) is frame.code


def _at(prefix: Any, place: tuple[int | None, tuple[str | int, ...]], name: str) -> int | None:
    """Return the leaf that a pytree prefix of `(args, kwargs)` has at this place."""
    if prefix is None or isinstance(prefix, int):
        return prefix
    position, path = place
    if not isinstance(prefix, (tuple, list)) or len(prefix) != 2:
        raise _misfit(prefix, name)
    args, kwargs = prefix
    if isinstance(kwargs, Mapping) and path[0] in kwargs:
        return _inside(kwargs, path, name)
    if position is None:
        return _inside(kwargs, path, name)
    if isinstance(args, (tuple, list)):
        if position >= len(args):  # passed by keyword
            return _inside(kwargs, path, name)
        return _inside(args[position], path[1:], name)
    return _inside(args, (), name)


def _inside(prefix: Any, path: Sequence[str | int], name: str) -> int | None:
    for step in path:
        if prefix is None or isinstance(prefix, int):
            return prefix
        if isinstance(prefix, Mapping) and step not in prefix:
            return 0  # omitted keys keep the default
        try:
            prefix = prefix[step]
        except (LookupError, TypeError):
            raise _misfit(prefix, name) from None
    if prefix is not None and not isinstance(prefix, int):
        raise _misfit(prefix, name)
    return prefix


def _misfit(prefix: Any, name: str) -> InputError:
    return InputError(
        f"batch_dims is {prefix!r} where {name} stands, which is no prefix of the arguments. Expected an "
        "int, None, or a container shaped like (args, kwargs)"
    )
