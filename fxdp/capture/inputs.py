"""The inputs of a call: its tensors, what errors call them, and which dim of which is the batch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxdp.errors import InputError

_DEFAULT = object()


@dataclass(frozen=True)
class Inputs:
    """The leaves of `(args, kwargs)`: tensors by index, everything else a constant of the program."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    """One readable path per tensor: `x`, `batch['image']`."""

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with these tensors in place of the given ones."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def copies(self, tensors: Iterable[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with copies of the tensors, or of others in their place."""
        given = self.tensors if tensors is None else tensors
        return self.rebuild(tensor.clone() for tensor in given)


def run_model(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
) -> Any:
    """`module(*args, **kwargs)`, or what a loss function makes of that and the keyword `target`."""
    if loss_fn is None:
        return module(*args, **kwargs)
    rest = dict(kwargs)
    target = rest.pop("target")
    return loss_fn(module(*args, **rest), target)


def flatten_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Split `(args, kwargs)` into tensors with readable paths, and constants."""
    register_containers((args, kwargs))
    with_paths, spec = pytree.tree_flatten_with_path((args, kwargs))
    names = _argument_names(module, len(args))
    tensors, paths = [], []
    for path, leaf in with_paths:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            paths.append(_path_text(path, names))
    return Inputs(tuple(leaf for _, leaf in with_paths), spec, tuple(tensors), tuple(paths))


def register_containers(tree: Any) -> bool:
    """Teach torch's pytree the classes in `tree` that carry tensors and that it takes for leaves.

    Such are plain dataclasses and objects like transformers' caches, whose attributes hold tensors. Returns
    whether there were any.
    """
    found = False
    while unknown := {type(leaf) for leaf in pytree.tree_leaves(tree) if _carries_tensors(leaf)}:
        found = True
        for cls in unknown:
            pytree.register_pytree_node(
                cls, _flatten_object, _unflattener(cls), flatten_with_keys_fn=_flatten_with_keys
            )
    return found


def _carries_tensors(value: Any, depth: int = 3) -> bool:
    """Whether an object that pytree takes for a leaf has tensors among its attributes."""
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


def resolve_batch_dims(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any = None
) -> list[int | None]:
    """The batch dim of each tensor leaf of `(args, kwargs)`, in order; None where it has none.

    `batch_dims` is None (dim 0 of every tensor with a dim), one int for all tensors, or a pytree prefix
    of `(args, kwargs)` whose leaves are an int or None. A dict in the prefix may leave keys out: they
    keep the default.
    """
    found: list[int | None] = []
    _spread(_DEFAULT if batch_dims is None else batch_dims, (args, kwargs), "", found)
    return found


def batch_size(
    leaves: Sequence[torch.Tensor], dims: Sequence[int | None], paths: Sequence[str]
) -> int | None:
    """The batch size that all inputs agree on; None where no input has a batch dim."""
    sizes = {
        path: leaf.shape[dim] for leaf, dim, path in zip(leaves, dims, paths, strict=True) if dim is not None
    }
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{path}: {size}" for path, size in sizes.items())
        raise InputError(
            f"the inputs' batch sizes differ ({listed}). Every input must have the same size in its batch "
            "dim; name other dims, or None for an input without a batch dim, with batch_dims="
            f"{several_rows(sizes.values())}"
        )
    return next(iter(sizes.values()), None)


def several_rows(sizes: Iterable[int]) -> str:
    """What to do with inputs of several rows for each sample; empty where the sizes are none of such."""
    least, *others = sorted(set(sizes))
    if least < 2 or any(size % least for size in others):
        return ""
    return (
        ". An input with several rows for each sample (its queries, its patches) needs a dim for them: pass "
        "rows.unflatten(0, (batch, -1)), and flatten it in a module around the model"
    )


def _spread(prefix: Any, tree: Any, path: str, found: list[int | None]) -> None:
    """Append the batch dims of the tensors in `tree` under this part of the prefix."""
    if prefix is None or prefix is _DEFAULT or isinstance(prefix, int):
        leaves = (leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))
        found.extend(_leaf_dim(prefix, leaf, path) for leaf in leaves)
        return
    if isinstance(prefix, Mapping) and isinstance(tree, Mapping):
        _check_keys(prefix, tree, path)
        for key, value in tree.items():
            _spread(prefix.get(key, _DEFAULT), value, f"{path}[{key!r}]", found)
        return
    if isinstance(prefix, (tuple, list)) and isinstance(tree, (tuple, list)) and len(prefix) == len(tree):
        for index, (part, value) in enumerate(zip(prefix, tree, strict=True)):
            _spread(part, value, f"{path}[{index}]", found)
        return
    raise InputError(
        f"batch_dims{path} is {prefix!r}, which is no prefix of the inputs there ({type(tree).__name__}). "
        "Expected an int, None, or a container shaped like (args, kwargs)"
    )


def _check_keys(prefix: Mapping[Any, Any], tree: Mapping[Any, Any], path: str) -> None:
    """Refuse keys of the prefix that the inputs do not have."""
    unknown = [key for key in prefix if key not in tree]
    if unknown:
        raise InputError(f"batch_dims{path} names {unknown}, but the inputs there have {list(tree)}")


def _leaf_dim(prefix: Any, leaf: torch.Tensor, path: str) -> int | None:
    """The batch dim of one tensor, counted from the front."""
    if prefix is None or leaf.dim() == 0:
        return None
    if prefix is _DEFAULT:
        return 0
    if not -leaf.dim() <= prefix < leaf.dim():
        raise InputError(
            f"batch_dims{path} is {prefix}, but a tensor there has shape {tuple(leaf.shape)}: give it a dim "
            "of its own, or None if it has no batch dim"
        )
    dim: int = prefix % leaf.dim()
    return dim


def _argument_names(module: nn.Module, count: int) -> list[str]:
    """The names of the positional arguments of the module's forward, as far as it names them."""
    try:
        parameters = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [named[i] if i < len(named) else f"input_{i}" for i in range(count)]


def _path_text(path: tuple[Any, ...], names: list[str]) -> str:
    """`x`, `batch['image']`, `pair[1]` of a pytree path into `(args, kwargs)`."""
    positional = path[0].idx == 0
    head = names[path[1].idx] if positional else str(path[1].key)
    return head + "".join(str(key) for key in path[2:])
