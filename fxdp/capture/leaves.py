"""The leaves of a call's arguments: flat values, and the name of each in errors."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxdp.capture.graph_objects import is_graph, register_graph
from fxdp.errors import InputError

_PLAIN = (torch.Tensor, int, float, str, type(None), torch.dtype, torch.device, list)
"""Classes of leaves that are known to contain no further tensors."""
_FLAT = frozenset((torch.Tensor, nn.Parameter, bool, *_PLAIN)) - {list}


@lru_cache(maxsize=1024)
def _flat_spec(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """Return the structure of a call whose arguments are leaves: a number of them, and named ones."""
    return pytree.tree_flatten(((None,) * count, dict.fromkeys(names)))[1]


def flat_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """Return the leaves of `(args, kwargs)`, including tensors inside of objects; called at each step.

    Raises
    ------
    InputError : an input contains itself.
    """
    if _FLAT.issuperset(map(type, args)) and _FLAT.issuperset(map(type, kwargs.values())):
        return [*args, *kwargs.values()], _flat_spec(len(args), tuple(kwargs))
    try:
        leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_names)
        # classes that carry tensors are rare, and each is registered once
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves) and register_containers(leaves):
            leaves, spec = pytree.tree_flatten((args, kwargs), is_leaf=_is_names)
    except RecursionError as error:
        named = {**{f"args[{i}]": value for i, value in enumerate(args)}, **kwargs}
        endless = ", ".join(name for name, value in named.items() if _is_endless(value))
        if not endless:  # the caller's stack is already that deep
            raise
        raise InputError(
            f"the input {endless} contains itself, or is nested too deeply; expected lists, dicts and "
            "objects that end in tensors and plain values"
        ) from error
    return leaves, spec


def _is_endless(value: Any) -> bool:
    try:
        register_containers(pytree.tree_leaves(value, is_leaf=_is_names))
    except RecursionError:
        return True
    return False


def _is_names(node: Any) -> bool:
    """Return whether a node is a list of strings, which is one leaf: the length may differ between ranks."""
    return type(node) is list and all(type(item) is str for item in node)


def leaf_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Return the name of each leaf in errors, from the parameters of the model's forward, or as `args[0]`."""
    heads = _argument_names(module, len(args))
    leaves, _ = pytree.tree_flatten_with_path((args, kwargs), _is_names)
    return tuple(_path_text(path, heads) for path, _ in leaves)


def _argument_names(module: nn.Module, count: int) -> list[str]:
    """Return the names of the positional arguments of the module's forward: `x`, `others[1]` of `*others`."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # a builtin
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    beyond = [f"args[{i}]" if rest is None else f"{rest}[{i - len(named)}]" for i in range(count)]
    return [*named[:count], *beyond[len(named) :]]


def _path_text(path: tuple[Any, ...], heads: list[str]) -> str:
    """Return `x`, `batch['image']` or `pair[1]` for a pytree path into `(args, kwargs)`."""
    positional = path[0].idx == 0
    head = heads[path[1].idx] if positional else str(path[1].key)
    return head + "".join(str(key) for key in path[2:])


def plain_tensors(leaves: Iterable[Any], names: Iterable[str]) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors among the leaves, with their names; ranks cannot divide those without plain sizes.

    Raises
    ------
    InputError : nested, sparse or quantized tensors, all named.
    """
    pairs = zip(names, leaves, strict=True)
    tensors = [(name, leaf) for name, leaf in pairs if isinstance(leaf, torch.Tensor)]
    for is_so, words in _NOT_PLAIN:
        if found := [name for name, tensor in tensors if is_so(tensor)]:
            raise InputError(f"{', '.join(found)}: {words}")
    return tensors


_NOT_PLAIN: tuple[tuple[Callable[[torch.Tensor], bool], str], ...] = (
    (
        lambda tensor: tensor.is_nested,
        "a nested tensor (torch.nested), whose samples have lengths of their own; expected a tensor with one "
        "size per dim: pass torch.nested.to_padded_tensor(...) and a mask",
    ),
    (
        lambda tensor: tensor.layout != torch.strided,
        "a sparse tensor; expected a dense one, which has rows that ranks could divide: pass x.to_dense()",
    ),
    (
        lambda tensor: tensor.is_quantized,
        "a quantized tensor, which cannot be trained on; expected a tensor of plain numbers: pass "
        "x.dequantize()",
    ),
)
"""Kinds of tensors that ranks cannot divide, each with the explanation and the remedy."""


def register_containers(tree: Any) -> bool:
    """Register with torch's pytree the classes in `tree` that carry tensors but that pytree treats as leaves.

    Examples are plain dataclasses, and objects with tensors among their attributes, as transformers' caches.
    Returns whether any class was registered.
    """
    found = False
    while unknown := {type(leaf): leaf for leaf in pytree.tree_leaves(tree) if _carries_tensors(leaf)}:
        found = True
        for cls, example in unknown.items():
            if is_graph(example):
                register_graph(cls)
                continue
            pytree.register_pytree_node(
                cls, _flatten_object, _unflattener(cls), flatten_with_keys_fn=_flatten_with_keys
            )
    return found


def _carries_tensors(value: Any, depth: int = 3) -> bool:
    """Return whether an object that pytree treats as a leaf has tensors among its attributes."""
    if isinstance(value, (torch.Tensor, nn.Module, type)) or not hasattr(value, "__dict__") or depth == 0:
        return False
    held = pytree.tree_leaves(list(vars(value).values()))
    return any(isinstance(leaf, torch.Tensor) or _carries_tensors(leaf, depth - 1) for leaf in held)


def _flatten_object(value: Any) -> tuple[list[Any], tuple[str, ...]]:
    names = tuple(f.name for f in dataclasses.fields(value)) if dataclasses.is_dataclass(value) else None
    names = names or tuple(vars(value))
    return [getattr(value, name) for name in names], names


def _flatten_with_keys(value: Any) -> tuple[list[tuple[pytree.KeyEntry, Any]], tuple[str, ...]]:
    values, names = _flatten_object(value)
    return [(pytree.GetAttrKey(name), one) for name, one in zip(names, values, strict=True)], names


def _unflattener(cls: type) -> Callable[[Iterable[Any], Any], Any]:
    def unflatten(values: Iterable[Any], names: Any) -> Any:
        made: Any = object.__new__(cls)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return unflatten
