"""`CallReader`: reads the tensors, sizes and key of each call of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec

from fxdp.capture.batch_dims import BatchDims, by_axis, has_columns, read_batch_dims
from fxdp.capture.graph_objects import has_graphs
from fxdp.capture.inputs import Inputs
from fxdp.capture.leaves import flat_leaves, leaf_names, plain_tensors
from fxdp.capture.python_values import AttributeNumber, number_tensor, stable_text
from fxdp.capture.sample_cuts import SampleCuts, sample_cuts
from fxdp.errors import InputError
from fxdp.ir.network.raw_bytes import number_of
from fxdp.module.cache import LRU
from fxdp.module.calls.call import Call, ProgramKey, kind_of
from fxdp.module.guards.guards import GuardedState, Guards
from fxdp.module.guards.values import Open, RecompileLog, Values, liftable


@dataclass(frozen=True, slots=True)
class _Structure:
    """Names and batch dims of all calls with one nesting of inputs and one signature of tensors."""

    names: tuple[str, ...]
    """The names of the leaves."""
    told: BatchDims
    grouped: bool
    """Whether several rows of a tensor form one sample."""


@dataclass(frozen=True, slots=True)
class _Lookup:
    """The results of the last lookup, valid for calls that differ in sizes and values only."""

    spec: TreeSpec
    signature: list[tuple[torch.dtype, int, bool, str]]
    state: GuardedState
    structure: _Structure
    values: Values
    kind: ProgramKey
    """The key of such a call without Python values."""


class CallReader:
    """Reads calls of one model; batch dims are resolved once per structure."""

    def __init__(
        self,
        module: nn.Module,
        batch_dims: Any,
        device_type: str,
        guards: Guards | None = None,
        microbatches: int = 1,
        block: int | None = None,
        *,
        recognises: bool = True,
    ) -> None:
        self.module = module
        self._batch_dims, self.recognises = batch_dims, recognises and batch_dims is None
        self._has_columns = has_columns(batch_dims)
        self._by_keys: dict[Any, Any] = {}
        """`batch_dims` of the kinds of calls that are ragged by their keys."""
        self._device_type = device_type
        self._microbatches, self._block = microbatches, block
        self._guards = Guards(module, device_type) if guards is None else guards
        self._known: LRU[Any, _Structure] = LRU(1024)
        self._digests: LRU[Any, int] = LRU(1024)
        self._values: LRU[Any, Values] = LRU(1024)
        self._told = RecompileLog()
        self._last: _Lookup | None = None

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Read a call.

        Raises
        ------
        InputError : batch sizes differ, or an input is on a different device than the model.
        """
        if self._has_columns:
            known_dims = self._by_keys.get(kind_of(args, kwargs), self._batch_dims)
            args, kwargs = by_axis(args, kwargs, known_dims)
        leaves, spec = flat_leaves(args, kwargs)
        tensors, signature = [], []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                signature.append((leaf.dtype, leaf.ndim, leaf.requires_grad, leaf.device.type))
        state, last = self._guards.state(), self._last
        # a call like the last one is the most recent entry already: no lookup, and the LRU order stays
        if not (
            last is not None
            and last.state is state
            and last.signature == signature
            and (last.spec is spec or last.spec == spec)
        ):
            key = spec, tuple(signature)
            structure, told = self._known.get(key), self._by_keys.get(key, self._batch_dims)
            is_new = structure is None and key not in self._by_keys
            if is_new and has_graphs((args, kwargs)) and self.take_rows(args, kwargs):
                return replace(self.read(args, kwargs), is_news=True)  # until all ranks' sizes are compared
            structure = structure or self._structure_of(args, kwargs, leaves, told)
            last = self._last = self._looked_up(structure, spec, signature, state)
        known, values, kind = last.structure, last.values, last.kind
        told, axes = known.told, known.told.axes
        given = Inputs(tuple(leaves), spec, tuple(tensors), known.names, told.dims, rows=told.rows, axes=axes)
        inputs = given.grouped() if known.grouped else given
        further: tuple[int, ...] = ()
        cuts: SampleCuts | None = None
        if axes.names:
            inputs, further, cuts = self._ragged(inputs, kind, args, kwargs)
        batch: int | None = None
        dims: list[tuple[int, ...]] = []
        for i, (tensor, dim) in enumerate(zip(inputs.tensors, told.dims, strict=True)):
            shape = tensor.shape
            if dim is None:
                dims.append(tuple(shape))
                continue
            if axes.axis(i).name:  # a further axis, of which `check_together` has compared the sizes
                pass
            elif batch is None:
                batch = shape[dim]
            elif batch != shape[dim]:
                if not axes.names and self.take_rows(args, kwargs):
                    return replace(self.read(args, kwargs), is_news=True)
                inputs.batch  # noqa: B018  (raises)
            dims.append((*shape[:dim], *shape[dim + 1 :]))
        if len(tensors) < len(leaves) or values.dynamic_inputs:
            inputs, kind = self._with_values(inputs, values, kind)
            dims += [()] * (len(inputs.tensors) - len(tensors))
        strided = self._guards.strided(tensors)
        return Call(inputs, 1 if batch is None else batch, tuple(dims), kind, values, strided, further, cuts)

    def _ragged(
        self, inputs: Inputs, kind: ProgramKey, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Inputs, tuple[int, ...], SampleCuts | None]:
        """Return checked inputs of several axes, the sizes of the further ones, and where samples are cut."""
        from fxdp.eager.ragged.faults import check_together
        from fxdp.eager.ragged.recognised import recognised_dims

        # of graphs the structure has the keys
        is_told = kind.by_keys and not has_graphs((args, kwargs))
        if is_told and recognised_dims(args, kwargs) != self._by_keys[kind.structure, kind.tensors]:
            raise InputError(
                "an earlier call with such inputs was ragged by their keys, this one is not, or by others; "
                "expected one kind of batch, or batch_dims= that says what dims are"
            )
        axes = inputs.axes
        check_together(inputs.paths, inputs.tensors, axes.rows)
        inputs = replace(inputs, tensors=axes.to_lengths(inputs.tensors, inputs.batch_dims))
        further = tuple(inputs.sizes[name] for name in axes.further)
        is_cut = self._microbatches > 1 or self._block is not None
        return inputs, further, sample_cuts(inputs, self._microbatches, self._block) if is_cut else None

    def _looked_up(
        self,
        structure: _Structure,
        spec: TreeSpec,
        signature: list[tuple[torch.dtype, int, bool, str]],
        state: GuardedState,
    ) -> _Lookup:
        """Look up all that calls of this structure and state have in common."""
        tensors = tuple(signature)
        self._known[spec, tensors] = structure
        mode = (spec, tensors, *state[:-1])
        if (values := self._values.get(mode)) is None:
            values = self._values[mode] = Values()
        kind = ProgramKey(spec, (), tensors, *state, by_keys=(spec, tensors) in self._by_keys)
        return _Lookup(spec, signature, state, structure, values, kind)

    def _with_values(self, inputs: Inputs, values: Values, kind: ProgramKey) -> tuple[Inputs, ProgramKey]:
        """Add tensors for numbers to the inputs, and the Python values to the key."""
        dynamic_inputs, unread, tokens = [], [], []
        for i, (leaf, name) in enumerate(zip(inputs.leaves, inputs.names, strict=True)):
            if isinstance(leaf, Tensor):
                continue
            tokens.append(values.in_key(name, leaf))
            if tokens[-1][1] is Open.INPUT:
                dynamic_inputs.append(i)
            elif tokens[-1][1] is Open.UNREAD:
                unread.append(i)
        attributes = tuple(
            found for name in sorted(values.dynamic_inputs) if (found := self._guards.number(name))
        )
        numbers = [*(inputs.leaves[i] for i in dynamic_inputs), *(a.value for a in attributes)]
        added = tuple(map(number_tensor, numbers))
        changed, are_inputs = kind.attributes, {a.name for a in attributes}
        return replace(
            inputs,
            tensors=(*inputs.tensors, *added),
            batch_dims=(*inputs.batch_dims, *[None] * len(numbers)),
            dynamic_inputs=tuple(dynamic_inputs),
            attributes=attributes,
            unread=tuple(unread),
        ), replace(
            kind,
            values=tuple(tokens),
            tensors=(*kind.tensors, *((t.dtype, 0, False, "cpu") for t in added)),
            attributes=tuple(row for row in changed if row[0] not in are_inputs),
        )

    def make_dynamic(
        self, call: Call, others: Sequence[ProgramKey]
    ) -> tuple[ProgramKey | None, dict[str, float]]:
        """Make inputs of the numbers that had different values in the last of these calls.

        Return the key of the last call and the values of these numbers in it.
        """
        own, rows = self._rows(call.inputs.python_leaves, (call.kind, *others[-1:]), call.inputs.attributes)
        before = rows[0] if rows else {}
        names = liftable(own, before, call.values)
        call.values.dynamic_inputs |= names
        return (others[-1] if names else None), {name: before[name][1] for name in names}

    def tell(self, call: Call, others: Sequence[ProgramKey]) -> None:
        """Log the values that make the model compile repeatedly."""
        self._told.compiled(
            *self._rows(call.inputs.python_leaves, (call.kind, *others), call.inputs.attributes)
        )

    def _rows(
        self,
        named: Sequence[tuple[str, Any]],
        kinds: Sequence[ProgramKey],
        attributes: Sequence[AttributeNumber],
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Return types and values of Python values and attributes under a call's key and further keys."""
        names = [name for name, _ in named]
        changed = {name for kind in kinds for name, _ in kind.attributes}
        first = self._guards.first(changed)
        pairs = [(dict(zip(names, kind.values, strict=True)), dict(kind.attributes)) for kind in kinds]
        own, *rows = [{**values, **first, **attributes} for values, attributes in pairs]
        own |= {a.name: (type(a.value).__name__, Open.INPUT) for a in attributes}
        return own, rows

    def take_rows(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], gather: Callable[[Any], list[Any]] | None = None
    ) -> bool:
        """Read calls like this one as ragged from now on, if the keys of its inputs tell how.

        `gather` returns all ranks' values, by which the axes of tensors beside graphs are told apart.
        """
        if not self.recognises:
            return False
        from fxdp.eager.ragged.recognised import recognised_dims

        if (told := recognised_dims(args, kwargs, gather)) is None:
            return False
        self._by_keys[kind_of(args, kwargs)], self._last = told, None
        self._has_columns |= has_columns(told)
        args, kwargs = by_axis(args, kwargs, told)
        key = kind_of(args, kwargs)
        self._by_keys[key] = told
        self._known[key] = self._structure_of(args, kwargs, flat_leaves(args, kwargs)[0], told)
        return True

    def reads_as_ragged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether calls of this kind are ragged by the keys of their inputs."""
        return kind_of(args, kwargs) in self._by_keys

    def _structure_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any], batch_dims: Any
    ) -> _Structure:
        """Find out the names and batch dims of a structure; its own `batch_dims` may be told by keys."""
        names, device = leaf_names(self.module, args, kwargs), self._device_type
        tensors = plain_tensors(leaves, names)
        if wrong := [f"{name} is on {t.device}" for name, t in tensors if t.device.type != device]:
            raise InputError(
                f"the model is on {device}, but {'; '.join(wrong)}. Move inputs with .to({device!r})"
            )
        found = read_batch_dims(args, kwargs, batch_dims, [name for name, _ in tensors])
        return _Structure(names, found, any(count > 1 for count in found.rows))

    def digest(self, value: ProgramKey | tuple[Any, ...]) -> int:
        """Return a number below 2**62 for a key or sizes, equal on all ranks for equal values."""
        found = self._digests.get(value)
        if found is None:
            parts = value.parts() if isinstance(value, ProgramKey) else value
            found = self._digests[value] = number_of(stable_text(parts).encode())
        return found
