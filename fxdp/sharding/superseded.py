"""Parameters that were replaced by sharded ones, for code that still holds them: optimizers, users' lists.

    optimizer.param_groups   w: SupersededParameter ──> w: DTensor   the model's

No public API tells which optimizers hold a parameter, so fxdp does not search. Each replaced parameter
forwards all functions of torch to the sharded one, by `__torch_function__`: `zero_grad()` clears the sharded
gradient, and `clip_grad_norm_` clips it. At the first step an optimizer gets the sharded parameters
themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from fxdp.errors import InputError
from fxdp.sharding.optimizer_counterpart import as_dtensor, rows_of


class _SupersededParameter(nn.Parameter):
    """A parameter without values that forwards all functions of torch to its successor."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch with successors in the place of superseded parameters."""
        args, kwargs = pytree.tree_map(_current, (args, dict(kwargs or {})))
        if func == _SET_DATA:  # a sharded parameter handles this by itself
            args[0].data = args[1]
            return None
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the successor."""
        return copy.deepcopy(_current(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the successor."""
        return _current(self).__reduce_ex__(protocol)


_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def _current(value: Any) -> Any:
    """Replace a superseded parameter by its successor; leave any other value as it is."""
    return vars(value)["successor"] if type(value) is _SupersededParameter else value


def supersede(made: Mapping[nn.Parameter, Tensor]) -> None:
    """Make parameters forward all access to their successors, and free the parameters' memory."""
    for parameter, successor in made.items():
        parameter.grad = None
        parameter.data = parameter.data.new_empty(0)
        parameter.__class__ = _SupersededParameter  # as torch's own lazy parameters become plain ones
        vars(parameter)["successor"] = successor


def check_classes(module: nn.Module) -> None:
    """Raise if a parameter cannot be superseded, before anything is changed.

    Raises
    ------
    InputError : parameters of classes with `__slots__`; the message names all.
    """
    sharded = [(name, p) for name, p in module.named_parameters() if p.dim() > 0]
    refused = [f"{name} ({type(p).__name__})" for name, p in sharded if _is_fixed(p)]
    if refused:
        raise InputError(
            f"parameters of classes with __slots__ cannot be sharded: {', '.join(refused)}; expected "
            'torch.nn.Parameter, or strategy="replicate"'
        )


def _is_fixed(parameter: nn.Parameter) -> bool:
    """Return whether Python refuses to assign a new class to an object of this class."""
    own = type(parameter)
    try:
        parameter.__class__ = _SupersededParameter
    except TypeError:
        return True
    parameter.__class__ = own
    return False


def adopt_successors(optimizer: Optimizer) -> None:
    """Replace an optimizer's superseded parameters by successors, and shard their states."""
    for group in optimizer.param_groups:
        params = group["params"]
        if _SupersededParameter not in map(type, params):
            continue
        for i, parameter in enumerate(params):
            params[i] = new = _current(parameter)
            if new is not parameter and parameter in optimizer.state:
                optimizer.state[new] = _sharded_states(new, optimizer.state.pop(parameter))


def _sharded_states(parameter: DTensor, states: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the states that have the parameter's full shape like the parameter."""
    found = dict(states)
    for name, value in states.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
            found[name] = as_dtensor(parameter, rows_of(parameter, value), len(parameter))
    return found
