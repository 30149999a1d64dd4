"""What a call looks like: its tensors, and the key under which its program is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from fxdp.capture import lies_in_order, register_containers, resolve_batch_dims, several_rows
from fxdp.errors import InputError
from fxdp.module.recent import Recent
from fxdp.module.stable import stable_text
from fxdp.module.state import ModelState

_PLAIN = (Tensor, int, float, str, type(None), torch.dtype, torch.device)
"""Leaves of which it is known that they carry no tensors inside."""

_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")


@dataclass(frozen=True)
class Call:
    """One call's inputs, flattened.

    `kind` is all that decides which program to capture, but for sizes: structure, Python values, dtypes,
    ranks of tensors, modes, the model's attributes. `dims` are the sizes of all dims but the batch. `strided`
    says whether an input lies other than contiguous, where a program may depend on that.
    """

    tensors: tuple[Tensor, ...]
    batch: int
    dims: tuple[tuple[int, ...], ...]
    kind: tuple[Any, ...]
    batch_dims: tuple[int | None, ...] = ()
    strided: bool = False


class CallReader:
    """Reads calls of one model; batch dims are resolved once per structure.

    `generation` counts how often the model's tensors were replaced, which all ranks must do together;
    `whole_draws` says whether programs draw as one device, which depends on how inputs lie in memory.
    """

    def __init__(
        self,
        module: nn.Module,
        batch_dims: Any,
        device_type: str,
        generation: int = 0,
        loss_fn: Any = None,
        whole_draws: bool = False,
    ) -> None:
        self._batch_dims = batch_dims
        self._device_type = device_type
        self._casts = torch.amp.is_autocast_available(device_type)  # not on meta
        self._generation = generation
        self._whole_draws = whole_draws
        self._modules = tuple(module.modules())
        self._parameters = tuple(module.parameters())
        self._state = ModelState(module, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))
        self._known: Recent[Any, tuple[int | None, ...]] = Recent(1024)
        self._digests: Recent[Any, int] = Recent(1024)

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """The call's inputs.

        Raises
        ------
        InputError : batch sizes that differ, or an input on another device than the model.
        """
        leaves, spec = tree_flatten((args, kwargs))
        if not all(isinstance(leaf, _PLAIN) for leaf in leaves) and register_containers(leaves):
            leaves, spec = tree_flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        others = tuple(_value(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        signature = tuple((t.dtype, t.ndim, t.requires_grad, t.device.type) for t in tensors)
        batch_dims = self._batch(args, kwargs, spec, signature)
        shapes = [t.shape for t in tensors]
        batch = _common_batch(shapes, batch_dims, args, kwargs)
        dims = tuple(
            tuple(shape) if d is None else (*shape[:d], *shape[d + 1 :])
            for shape, d in zip(shapes, batch_dims, strict=True)
        )
        strided = self._whole_draws and not all(map(lies_in_order, tensors))
        return Call(tensors, batch, dims, (spec, others, signature, *self._modes()), batch_dims, strided)

    def watch(self, buffers: Iterable[str]) -> None:
        """From now on the values of these buffers decide on the kind of a call, too."""
        self._state.watch(buffers)

    def _modes(self) -> tuple[Any, ...]:
        device = self._device_type
        autocast = None
        if self._casts and torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        training = bytes(map(_training, self._modules))
        trainable = bytes(map(_requires_grad, self._parameters))
        changed = self._state.changed()
        return torch.is_grad_enabled(), autocast, training, trainable, self._generation, changed

    def _batch(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], spec: TreeSpec, signature: tuple[Any, ...]
    ) -> tuple[int | None, ...]:
        key = (spec, signature)
        found = self._known.get(key)
        if found is None:
            self._check_devices(args, kwargs)
            found = self._known[key] = tuple(resolve_batch_dims(args, kwargs, self._batch_dims))
        return found

    def _check_devices(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        wrong = [
            f"{path} is on {leaf.device}"
            for path, leaf in _named(args, kwargs)
            if leaf.device.type != self._device_type
        ]
        if wrong:
            device = self._device_type
            raise InputError(
                f"the model is on {device}, but {'; '.join(wrong)}. Move inputs with .to({device!r})"
            )

    def digest(self, value: tuple[Any, ...]) -> int:
        """A number below 2**62 for a `kind` or `dims`, equal on all ranks for equal values."""
        found = self._digests.get(value)
        if found is None:
            raw = hashlib.sha256(stable_text(value).encode()).digest()
            found = self._digests[value] = int.from_bytes(raw[:8], "little") >> 2
        return found


def call_lines(call: Call) -> list[str]:
    """What decides which program serves a call, for `agree`."""
    spec, others, signature, grad, autocast, training, trainable, generation, changed = call.kind
    lines = [
        f"structure {stable_text(spec)}",
        *(f"value {kind} {stable_text(value)}" for kind, value in others),
    ]
    for i, ((dtype, _, needs_grad, _), dims) in enumerate(zip(signature, call.dims, strict=True)):
        lines.append(f"tensor {i} {dtype} dims {list(dims)} requires_grad={needs_grad}")
    modes = f"grad={grad} autocast={autocast} training={any(training)}"
    modes += f" times that tensors were replaced={generation}"
    attributes = [f"attribute {name} {stable_text(value)}" for name, value in changed]
    return [*lines, modes, f"modules {training.hex()}", f"trainable {trainable.hex()}", *attributes]


def changing_values(
    call: Call, others: Sequence[tuple[Any, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[str]:
    """Where the call's Python values differ from those of other kinds of the same structure."""
    pairs, _ = tree_flatten_with_path((args, kwargs))
    paths = [_path(key) for key, leaf in pairs if not isinstance(leaf, Tensor)]
    return [
        f"{path} ({own[0]})"
        for i, (path, own) in enumerate(zip(paths, call.kind[1], strict=True))
        if any(kind[1][i] != own for kind in others)
    ]


def check_arguments(args: Any, kwargs: Any) -> None:
    """Refuse an example call that is not given as positional and keyword arguments.

    Raises
    ------
    InputError : `args` is a bare tensor or anything else that is no tuple or list; `kwargs` is no mapping.
    """
    if not isinstance(args, (tuple, list)):
        raise InputError(
            f"args is {_described(args)}, expected a tuple of the model's positional arguments: write (x,) "
            "for one of them"
        )
    if not isinstance(kwargs, Mapping):
        raise InputError(
            f"kwargs is {_described(kwargs)}, expected a dict of the model's keyword arguments: write "
            '{"target": y}'
        )


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _value(leaf: Any) -> Any:
    """A Python leaf as part of a key: True and 1 and 1.0 are different programs."""
    try:
        hash(leaf)
    except TypeError:
        raise InputError(
            f"an input is a {type(leaf).__name__}, which is neither a tensor, a container of tensors nor a "
            "hashable Python value; register it with torch.utils._pytree or pass plain values"
        ) from None
    return type(leaf).__name__, leaf


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Tensor]]:
    pairs, _ = tree_flatten_with_path((args, kwargs))
    return [(_path(key), leaf) for key, leaf in pairs if isinstance(leaf, Tensor)]


def _path(key: Any) -> str:
    root = "args" if key[0].idx == 0 else "kwargs"
    return root + keystr(key[1:])


def _common_batch(
    shapes: Sequence[torch.Size], dims: Sequence[int | None], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    sizes = {shape[d] for shape, d in zip(shapes, dims, strict=True) if d is not None}
    if len(sizes) > 1:
        named = _named(args, kwargs)
        listed = "\n  ".join(
            f"{path}: {leaf.shape[d]} in dim {d} of {tuple(leaf.shape)}"
            for (path, leaf), d in zip(named, dims, strict=True)
            if d is not None
        )
        raise InputError(
            f"the inputs' batch sizes differ:\n  {listed}\n"
            "Name other dims, or None for an input without a batch dim, with batch_dims= of fxdp.compile"
            f"{several_rows(sizes)}"
        )
    return next(iter(sizes), 1)
