"""`ModuleWrapper`: a module that equals a wrapped module in everything except the call."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from torch import Tensor, nn

from fxdp.errors import StateError
from fxdp.ir.graph.model_tensors import is_sharded
from fxdp.module.function_module import FunctionModule

_S = TypeVar("_S", bound="ModuleWrapper")


_GRADIENTS = "gradients are summed by the program itself, in buckets of fxdp.Communication(bucket_cap_mb=...)"
_OTHERS_HAVE = {
    "register_comm_hook": _GRADIENTS,
    "require_backward_grad_sync": _GRADIENTS + "; for accumulation there is compiled.no_sync()",
    "set_requires_gradient_sync": _GRADIENTS + "; for accumulation there is compiled.no_sync()",
    "join": "ranks may have uneven batches: one that has no more samples passes an empty batch",
    "clip_grad_norm_": "gradients are full: torch.nn.utils.clip_grad_norm_(compiled.parameters(), max_norm)",
    "summon_full_params": "parameters are full on every rank",
}
"""Attributes of `DistributedDataParallel` and FSDP, with the replacement in fxdp."""


class ModuleWrapper(nn.Module):
    """A module with parameters, buffers, children, attributes, modes and state-dict keys of `module`.

    Reading, setting or deleting an attribute that this class does not declare acts on `module`.
    """

    _model: nn.Module
    """The module that is compiled: `module`, or a function around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # not in nn.Module's own registries, so that names and state-dict keys stay the model's
        object.__setattr__(self, "_model", model)
        del self.__dict__["training"]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            pass
        model = self.module
        try:
            return getattr(model, name)
        except AttributeError as error:
            if inspect.getattr_static(model, name, None) is not None:
                raise  # a property of the model raised the error
            raise AttributeError(_missing(model, name), name=name, obj=model) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if self._declares(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if self._declares(name):
            object.__delattr__(self, name)
        else:
            delattr(self.module, name)

    def _declares(self, name: str) -> bool:
        kind = type(self)
        declared = (c.__annotations__ for c in kind.__mro__ if issubclass(c, ModuleWrapper))
        return name in self.__dict__ or hasattr(kind, name) or any(name in names for names in declared)

    @property
    def module(self) -> nn.Module:
        """The user's model, as in `DistributedDataParallel`, for direct calls and for `isinstance`."""
        return self._model.own if isinstance(self._model, FunctionModule) else self._model

    def __getitem__(self, index: Any) -> Any:
        return self._like_a_list("__getitem__")(index)

    def __len__(self) -> int:
        return int(self._like_a_list("__len__")())

    def __iter__(self) -> Iterator[Any]:
        layers: Iterator[Any] = self._like_a_list("__iter__")()
        return layers

    def __bool__(self) -> bool:
        return True  # not based on the length, which few models have

    def _like_a_list(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] | None = getattr(self.module, name, None)
        if found is None:
            raise TypeError(
                f"{type(self.module).__name__}, which is compiled here, is no list: it has no {name}"
            )
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the user's model: a file or another process gets the model as it is, without programs.

        Raises
        ------
        StateError : a function was compiled, or parameters are sharded, of which a rank has its shards only.
        """
        if isinstance(self._model, FunctionModule):
            raise StateError(
                "a compiled function cannot be pickled; expected its modules, or compiled.state_dict()"
            )
        if any(map(is_sharded, self._model.parameters())):
            raise StateError(
                "the parameters are sharded, and one rank cannot pickle them all; expected all ranks to call "
                "fxdp.save(path, compiled, optimizer) or fxdp.save_safetensors(path, compiled)"
            )
        return operator.getitem, ((self._model,), 0)  # a function that readers without fxdp have

    def __copy__(self) -> NoReturn:
        raise StateError(
            "a compiled module cannot be copied with its programs; expected copy.deepcopy(compiled), or "
            "copy.copy(compiled.module)"
        )

    def apply(self: _S, fn: Callable[[nn.Module], None]) -> _S:
        """Call a function on each of the model's modules."""
        self._model.apply(fn)
        return self

    def train(self: _S, mode: bool = True) -> _S:
        """Switch the model's mode; each mode has its own program."""
        self._model.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own state dict; a sharded parameter is a `DTensor` with this rank's shard."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load into the model; a rank takes its shard of a full tensor if the parameter is sharded.

        Raises
        ------
        InputError : shapes differ from sharded parameters' shapes; all are listed, and nothing was loaded.
        """
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the model's parameters, under their own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the model's buffers, under their own names."""
        return self.module.named_buffers(*args, **kwargs)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Return the model's children."""
        return self.module.named_children()

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Return the model's modules."""
        return iter(list(self.module.named_modules(*args, **kwargs)))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter to the model."""
        self.module.register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Add a buffer to the model."""
        self.module.register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a child to the model."""
        self.module.add_module(name, module)

    register_module = add_module


def _missing(model: nn.Module, name: str) -> str:
    text = f"neither a compiled module nor its model ({type(model).__name__}) has {name!r}"
    return f"{text}: {_OTHERS_HAVE[name]}" if name in _OTHERS_HAVE else text
