"""The module that is exported: flat tensors in, flat tensors out, the user's structure kept aside."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxdp.capture.captured import Check, LayoutRead, OutputLeaf
from fxdp.capture.export.skip_marks import SkipPoint
from fxdp.capture.export.skip_tracker import captured_skips
from fxdp.capture.patches.checkpoints import repeated_updates
from fxdp.capture.patches.data import traced_data
from fxdp.capture.patches.functions import whole_functions
from fxdp.capture.patches.generators import noting_generators
from fxdp.capture.patches.hooks import deferred_hooks
from fxdp.capture.patches.layout_reads import noting_layouts
from fxdp.capture.patches.module_state import assigned_buffers
from fxdp.capture.patches.numbers import Number, as_numbers
from fxdp.capture.patches.patches import refuse_autograd
from fxdp.capture.patches.python_draws import refused_draws
from fxdp.capture.patches.raise_checks import Asked, noting_checks
from fxdp.capture.patches.unit_draws import answered_draws
from fxdp.capture.refusals.attributes import Attributes
from fxdp.errors import CaptureError
from fxdp.ir.notes import Site


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


@dataclass
class OutputRecord:
    """What one run of the program left aside: the output's structure and its leaves."""

    leaves: tuple[Any, ...] = ()
    spec: pytree.TreeSpec | None = None
    loss: int | None = None
    """The tensor that the model itself calls its `loss`."""
    skips: tuple[SkipPoint, ...] = ()
    """What was stashed and popped, in order."""
    checks: tuple[Check, ...] = ()
    """The checks of data, whose values follow the model's own tensors."""
    changed: tuple[str, ...] = ()
    """The Python attributes that the forward changed."""
    assigned: tuple[str, ...] = ()
    """The program's buffers to which the forward assigns another tensor."""
    layout_reads: tuple[LayoutRead, ...] = ()
    """What the code read of how tensors lie in memory."""
    seeded: tuple[tuple[str, Site], ...] = ()
    """Where the code seeds torch's generators, and by which function."""


@dataclass
class _Cell:
    """Holds the record outside of the module's attributes, which export watches."""

    record: OutputRecord = field(default_factory=OutputRecord)


class FlatModule(nn.Module):
    """`loss_fn(module(*args, **kwargs), target)` as a function of the flat tensor inputs."""

    def __init__(
        self,
        module: nn.Module,
        inputs: Inputs,
        loss_fn: Callable[..., Any] | None,
        numbers: Mapping[str, Number] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.loss_fn = loss_fn
        self._inputs = inputs
        self._numbers = numbers or {}
        self._cell = _Cell()

    @property
    def numbers(self) -> Mapping[str, Number]:
        """The buffers that count as numbers."""
        return self._numbers

    @property
    def record(self) -> OutputRecord:
        """The output structure of the latest run."""
        return self._cell.record

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the user's code and flatten what it returns."""
        args, kwargs = self._inputs.rebuild(tensors)
        asked = Asked()
        reads: list[LayoutRead] = []
        seeded: list[tuple[str, Site]] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(refuse_autograd())
            stack.enter_context(whole_functions())
            stack.enter_context(deferred_hooks())
            stack.enter_context(traced_data())
            stack.enter_context(noting_layouts(reads, tensors))
            stack.enter_context(noting_generators(seeded))
            tracker = stack.enter_context(captured_skips(self.module))
            stack.enter_context(noting_checks(asked))
            stack.enter_context(refused_draws())
            stack.enter_context(answered_draws())
            assigned = stack.enter_context(assigned_buffers(self.module))
            stack.enter_context(as_numbers(self.module, self._numbers))
            before = Attributes(self.module)
            with repeated_updates(self.module):
                results = self._run(args, kwargs)
            changed = before.changed(Attributes(self.module))
        checks = tuple(Check(i, *answer) for i, answer in enumerate(asked.answers, len(results)))
        skips = tuple(tracker.points)
        self._cell.record = replace(
            self._cell.record,
            skips=skips,
            checks=checks,
            changed=changed,
            assigned=tuple(f"module.{name}" for name in assigned),
            layout_reads=tuple(reads),
            seeded=tuple(seeded),
        )
        return (*results, *asked.tensors)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        if self.loss_fn is None:
            return self._flatten(self.module(*args, **kwargs))
        target = kwargs.pop("target")
        loss = self.loss_fn(self.module(*args, **kwargs), target)
        _check_loss(loss)
        return self._flatten(loss)

    def _flatten(self, output: Any) -> tuple[torch.Tensor, ...]:
        output = pytree.tree_map_only(torch.Size, tuple, output)
        register_containers(output)
        leaves, spec = pytree.tree_flatten(output)
        tensors: list[torch.Tensor] = []
        kept: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                kept.append(OutputLeaf(len(tensors)))
                tensors.append(leaf)
            else:
                kept.append(leaf)
        if not tensors:
            raise CaptureError(
                f"{type(self.module).__name__} returned no tensor (got {type(output).__name__}): there is "
                "nothing to compute. Return at least one tensor"
            )
        named = _named_loss(output)
        loss = next((i for i, tensor in enumerate(tensors) if tensor is named), None)
        self._cell.record = OutputRecord(tuple(kept), spec, loss)
        return tuple(tensors)


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


def _named_loss(output: Any) -> Any:
    """What a dict, or an object such as transformers' outputs, has under the name `loss`."""
    return output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)


def _check_loss(loss: Any) -> None:
    """Refuse a loss function that does not return a scalar tensor."""
    if isinstance(loss, torch.Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return
    got = (
        f"a tensor of shape {list(loss.shape)}, {loss.dtype}"
        if isinstance(loss, torch.Tensor)
        else repr(loss)
    )
    raise CaptureError(
        f"loss_fn must return a scalar floating-point tensor, but it returned {got}. "
        "Reduce it, for instance with .mean() or .sum()"
    )


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
