"""The inputs of a call: the tensors, their names in errors, and their batch dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import by_axis, by_sample, read_batch_dims
from fxdp.capture.input_axes import ONE_AXIS, InputAxes
from fxdp.capture.leaves import flat_leaves, leaf_names, plain_tensors
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.capture.python_values import AttributeNumber, unread
from fxdp.errors import InputError


@dataclass(frozen=True, slots=True)
class Inputs:
    """The leaves of `(args, kwargs)`: tensors by index; leaves that are not tensors are program constants."""

    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec
    tensors: tuple[torch.Tensor, ...]
    names: tuple[str, ...]
    """Name of each leaf in errors: `x`, `batch['image']`."""
    batch_dims: tuple[int | None, ...]
    """The batch dim of each tensor."""
    dynamic_inputs: tuple[int, ...] = ()
    """Indices of leaves that are dynamic scalar inputs; each has a tensor after the caller's tensors."""
    attributes: tuple[AttributeNumber, ...] = ()
    """Attributes of the model that are dynamic scalar inputs; their tensors come last."""
    unread: tuple[int, ...] = ()
    """Indices of leaves that the model should not read."""
    rows: tuple[int, ...] = ()
    """Rows per sample, for each of the model's tensors.

    Tensors with more than 1 have here a dim of this size behind the batch dim.
    """
    axes: InputAxes = ONE_AXIS
    """The batch axis of each tensor."""

    def grouped(self) -> Inputs:
        """Return the inputs of which rows that form one sample have a dim of their own.

        Raises
        ------
        InputError : a number of rows is not a multiple of the rows per sample.
        """
        given = zip(self.tensors, self.batch_dims, self.rows, self.paths, strict=True)
        return replace(self, tensors=tuple(by_sample(*tensor) for tensor in given))

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the names of the tensors."""
        pairs = zip(self.names, self.leaves, strict=True)
        own = (name for name, leaf in pairs if isinstance(leaf, torch.Tensor))
        return (*own, *self.number_names)

    @property
    def open(self) -> bool:
        """Return whether some of the Python values are not constants of the program."""
        return bool(self.dynamic_inputs or self.attributes or self.unread)

    @property
    def number_names(self) -> tuple[str, ...]:
        """Return the names of the dynamic scalar inputs."""
        return tuple(name for name, _ in self.scalars)

    @property
    def scalars(self) -> tuple[tuple[str, Any], ...]:
        """Return the dynamic scalar inputs with their values; each has one of the last tensors."""
        own = ((self.names[i], self.leaves[i]) for i in self.dynamic_inputs)
        return (*own, *((a.name, a.value) for a in self.attributes))

    @property
    def python_leaves(self) -> list[tuple[str, Any]]:
        """Return the leaves that are not tensors, with their names."""
        pairs = zip(self.names, self.leaves, strict=True)
        return [(name, leaf) for name, leaf in pairs if not isinstance(leaf, torch.Tensor)]

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` as the caller has given them."""
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def numbers(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Read the values of the dynamic scalar inputs from the last tensors."""
        return [tensor.item() for tensor in tensors[len(tensors) - len(self.scalars) :]]

    @property
    def batch(self) -> int | None:
        """Return the batch size that all tensors share; None if no tensor has a batch dim.

        Of a ragged batch, the size of its own axis.

        Raises
        ------
        InputError : the batch sizes differ.
        """
        sizes = self.sizes
        return sizes.get("")

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each axis, in the order in which tensors have these.

        Raises
        ------
        InputError : tensors with one axis differ in its size.
        """
        found: dict[str, set[int]] = {}
        for i, (tensor, dim) in enumerate(zip(self.tensors, self.batch_dims, strict=True)):
            if dim is not None:
                found.setdefault(self.axes.axis(i).name, set()).add(tensor.shape[dim])
        for name, sizes in found.items():
            if len(sizes) > 1:
                raise self._batches_differ(sizes, name)
        return {name: next(iter(sizes)) for name, sizes in found.items()}

    @property
    def fixed_sizes(self) -> set[int]:
        """Return all sizes of the tensors except the batch size."""
        pairs = zip(self.tensors, self.batch_dims, strict=True)
        return {size for tensor, dim in pairs for i, size in enumerate(tensor.shape) if i != dim}

    def _batches_differ(self, sizes: Iterable[int], axis: str) -> InputError:
        rows = zip(self.paths, self.tensors, self.batch_dims, strict=True)
        listed = "\n  ".join(
            f"{path}: {tensor.shape[dim]} in dim {dim} of {tuple(tensor.shape)}"
            for i, (path, tensor, dim) in enumerate(rows)
            if dim is not None and self.axes.axis(i).name == axis
        )
        if self.axes.names:
            return InputError(
                f"the inputs differ in the size of one axis of batch_dims=:\n  {listed}\n"
                "Expected one number of rows along an axis; fxdp.Rows of other rows names another axis"
            )
        if told := _not_tensors(self.given):
            return InputError(
                f"the inputs' batch sizes differ, as one is {told}, or fxdp.compile(..., fallback='eager'), "
                f"which runs it op by op:\n  {listed}"
            )
        return InputError(
            f"the inputs' batch sizes differ:\n  {listed}\n"
            "Every input must have the same size in its batch dim; name other dims, or None for an input "
            f"without a batch dim, with batch_dims= of fxdp.compile{_several_rows(sizes)}"
        )

    def rebuild(
        self, tensors: Iterable[torch.Tensor], numbers: Sequence[Any] = (), touched: list[str] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with `tensors` and `numbers` in place of the tensors and dynamic scalars.

        If `touched` is a list, leaves that should not be read are replaced by objects that append their names
        to the list when they are read.
        """
        dims = zip(self.batch_dims, self.rows, strict=False)
        rest = (
            self.axes.from_lengths(i, x) if dim is None or rows == 1 else x.flatten(dim, dim + 1)
            for i, (x, (dim, rows)) in enumerate(zip(tensors, dims, strict=False))
        )
        leaves = [next(rest) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        for i, number in zip(self.dynamic_inputs, numbers, strict=False):
            leaves[i] = number
        if touched is not None:
            for i in self.unread:
                leaves[i] = unread(self.names[i], type(self.leaves[i]), touched)
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs

    def starts_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `rebuild` that say where rows of the global batch begin."""
        tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
        pairs = zip(tensors, self.axes.rows, strict=False)
        return tuple(x for x, rows in pairs if rows is not None and rows.meaning in ("starts", "bounds"))

    def copies(self, tensors: Iterable[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `(args, kwargs)` with copies of the given tensors, by default of the inputs' own."""
        given = self.tensors if tensors is None else tensors
        return self.rebuild(tensor.clone() for tensor in given)


def _not_tensors(given: Any) -> str:
    """Say which input is none of one row for each sample, and what is expected; empty if none is."""
    leaves = pytree.tree_leaves(given, lambda one: isinstance(one, PackedSequence) or _is_targets(one))
    for one in leaves:
        if isinstance(one, PackedSequence):
            return (
                "a PackedSequence: torch's recurrent kernels read in Python how many samples each of its "
                "steps has. Expected the padded batch and its lengths"
            )
        if _is_targets(one):
            return (
                "a list with a dict of each sample, over which code loops in Python. Expected tensors of all "
                "samples' rows, with batch_dims= of fxdp.Rows that say whose these are"
            )
    return ""


def _is_targets(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(one) is dict for one in value)


def samples(inputs: Inputs, count: int) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a batch of `count` samples, which repeats the given samples in order."""
    made = []
    for tensor, dim in zip(inputs.tensors, inputs.batch_dims, strict=True):
        rows = torch.arange(count, device=tensor.device) % (1 if dim is None else tensor.shape[dim])
        made.append(tensor if dim is None else tensor.detach().index_select(dim, rows))
    return tuple(made)


def read_inputs(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any = None
) -> Inputs:
    """Return the inputs of a call of the module; `batch_dims` is as in `resolve_batch_dims`.

    Raises
    ------
    InputError : nested or quantized tensors, batch sizes that differ, or `batch_dims` that do not fit.
    """
    args, kwargs = by_axis(args, kwargs, batch_dims)
    leaves, spec = flat_leaves(args, kwargs)
    names = leaf_names(module, args, kwargs)
    tensors = plain_tensors(leaves, names)
    told = read_batch_dims(args, kwargs, batch_dims, [name for name, _ in tensors])
    own = tuple(tensor for _, tensor in tensors)
    found = Inputs(tuple(leaves), spec, own, names, told.dims, rows=told.rows, axes=told.axes).grouped()
    found = replace(found, tensors=told.axes.to_lengths(found.tensors, found.batch_dims))
    found.batch  # noqa: B018  (checks)
    return found


def run_model(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    loss_fn: Callable[..., Any] | None,
    precision: MixedPrecision | None = None,
) -> Any:
    """Return `module(*args, **kwargs)`, or the loss of that output and the keyword `target`, if given."""
    rest = dict(kwargs)
    target = rest.pop("target") if loss_fn is not None and "target" in kwargs else None
    output = module(*args, **rest) if precision is None else precision.run(module, args, rest)
    return output if loss_fn is None or "target" not in kwargs else loss_fn(output, target)


def _several_rows(sizes: Iterable[int]) -> str:
    """Return the hint of an error for inputs with several rows per sample, at a fixed or a varying number."""
    least, *others = sorted(set(sizes))
    # a batch size of 1 divides all sizes and proves nothing: a few boxes may belong to one image among many
    if least and all(size % least == 0 for size in others) and (least > 1 or len(others) == 1):
        return (
            ". For an input with several rows for each sample (its queries, its patches) say how many, as in "
            f"fxdp.RowsPerSample({others[-1] // least})"
        )
    return (
        ". Where each sample has as many rows as it likes (bags with offsets, boxes, a graph's edges) the "
        "batch is ragged, and no rank's part of it has a size: pad each sample to one length, with a mask "
        "for what counts (nn.EmbeddingBag takes indices [batch, length] without offsets, and a padding_idx); "
        "or describe it by fxdp.Rows in batch_dims="
    )
