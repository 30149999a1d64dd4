"""Where a batch enters: each rank's part becomes global tensors, after one exchange of sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import resolve_batch_dims
from fxdp.eager.data_ranks import DataRanks, data_ranks
from fxdp.eager.local_parts import from_part
from fxdp.eager.one_device_view import show_one_device_to_modules
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.errors import InputError
from fxdp.ir.network.raw_bytes import number_of
from fxdp.ir.types.placements import R, Shard
from fxdp.ranks.generator_states import torch_generators
from fxdp.ranks.liveness.failure import everywhere, guard, refusing
from fxdp.ranks.same_order import check_order

_log = logging.getLogger("fxdp")


def global_batch(
    tree: Any, mesh: DeviceMesh | Mapping[str, int] | None = None, batch_dims: Any = None
) -> Any:
    """Return a tree of this rank's tensors as global tensors; all ranks must call this together.

    The global batch is the concatenation of the ranks' parts in rank order; parts may be uneven or empty.
    Tensors without a batch dim count as equal on all ranks.

    Parameters
    ----------
    tree : tensors in any nesting of tuples, lists and dicts; all else stays as it is.
    mesh : a DeviceMesh with data axes; None: all ranks.
    batch_dims : the batch dim of each tensor, a pytree prefix of int or None (no batch dim). None: dim 0 of
        every tensor with at least one dim.

    Raises
    ------
    InputError : tensors with different batch sizes, or trees that differ between ranks.
    AgreementError : the ranks have sent different messages before.
    """
    return _entered(tree, _ranks_of(tree, mesh), batch_dims)


class GlobalLoader:
    """Batches of a loader as global tensors; see `shard`.

    A rank whose loader ends first goes on with empty parts, so that loaders may have different lengths.
    """

    def __init__(
        self, loader: Iterable[Any], mesh: DeviceMesh | Mapping[str, int] | None, batch_dims: Any
    ) -> None:
        self._loader, self._mesh, self._batch_dims = loader, mesh, batch_dims

    def __len__(self) -> int:
        """The number of this rank's batches."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Yield the global batches; all ranks must take them together."""
        batches, last, ranks = iter(self._loader), None, None
        while True:
            batch = next(batches, None)
            if ranks is None:
                ranks = data_ranks(self._mesh, "cpu") if batch is None else _ranks_of(batch, self._mesh)
            with guard(ranks.process_mesh):
                going = ranks.exchange((int(batch is not None), int(batch is not None or last is not None)))
            if not any(row[0] for row in going):
                return
            if not all(row[1] for row in going):
                absent = [rank for rank, row in enumerate(going) if not row[1]]
                raise everywhere(InputError(
                    f"the loaders of ranks {absent} have no batch, others have; expected at least one batch, "
                    "maybe empty, on every rank, which tells the kinds of tensors"
                ))  # fmt: skip
            if batch is None:
                batch = _empty_like(last, self._batch_dims)
            last = batch
            yield _entered(batch, ranks, self._batch_dims)


def shard(
    loader: Iterable[Any], mesh: DeviceMesh | Mapping[str, int] | None = None, batch_dims: Any = None
) -> GlobalLoader:
    """Return the loader with its batches as global tensors: `for x, y in fxdp.shard(loader, mesh)`.

    Each rank's loader gives this rank's samples, as with a `DistributedSampler`. `mesh` and `batch_dims` are
    those of `global_batch`.
    """
    return GlobalLoader(loader, mesh, batch_dims)


def _ranks_of(tree: Any, mesh: DeviceMesh | Mapping[str, int] | None) -> DataRanks:
    first = next((leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)), None)
    return data_ranks(mesh, "cpu" if first is None else first.device.type)


def call_on_batch(
    ranks: DataRanks, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with this rank's tensors as global ones, with their graph.

    `batch_dims` is a pytree prefix of `(args, kwargs)`, as for `fxdp.compile`.
    """
    dims = partial(resolve_batch_dims, args, kwargs, batch_dims)
    return _made_global((args, kwargs), ranks, dims, keeps_graph=True)  # type: ignore[no-any-return]


def _entered(tree: Any, ranks: DataRanks, batch_dims: Any) -> Any:
    return _made_global(tree, ranks, partial(_dims, tree, batch_dims))


def _made_global(
    tree: Any, ranks: DataRanks, resolved: Callable[[], list[int | None]], *, keeps_graph: bool = False
) -> Any:
    show_one_device_to_modules()
    leaves, structure = pytree.tree_flatten(tree)
    with guard(ranks.process_mesh):
        with refusing(ranks.process_mesh):
            dims = resolved()
            size = _batch_size(leaves, dims)
        axis = ranks.axis(_agreed(ranks, size, _digest(leaves, dims)))
    ranks.entered.clear()
    made: list[Any] = []
    given = iter(dims)
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            made.append(leaf)
            continue
        dim = next(given)
        if isinstance(leaf, GlobalTensor):
            made.append(leaf)
            continue
        leaf = leaf.resolve_conj().resolve_neg()  # the bits are not read below the dispatch
        if dim is None or not axis.total:
            made.append(leaf if dim is None else wrapped(leaf.detach(), axis, R))
        elif keeps_graph and leaf.requires_grad:
            made.append(from_part(leaf, axis, Shard(dim), axis.total, 1))
        else:
            made.append(wrapped(leaf.detach(), axis, Shard(dim)).requires_grad_(leaf.requires_grad))
    return pytree.tree_unflatten(made, structure)


def _dims(tree: Any, batch_dims: Any) -> list[int | None]:
    prefix: Any = batch_dims if batch_dims is None or isinstance(batch_dims, int) else ((batch_dims,), {})
    return resolve_batch_dims((tree,), {}, prefix)


def _batch_size(leaves: list[Any], dims: list[int | None]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = [(t, d) for t, d in zip(tensors, dims, strict=True) if not isinstance(t, GlobalTensor)]
    sizes = {t.shape[dim] for t, dim in plain if dim is not None}
    if len(sizes) > 1:
        raise InputError(
            f"global_batch: the tensors have batches of {sorted(sizes)} samples on this rank; expected one "
            "size: give batch_dims= with None for tensors that have no batch dim"
        )
    return sizes.pop() if sizes else 0


def _agreed(ranks: DataRanks, size: int, digest: int) -> list[int]:
    """Exchange this rank's batch size, and compare the rest with all ranks."""
    comms = ranks.process_mesh.comms
    order = 0 if comms is None else comms.sequence_log.order
    generators = torch_generators(ranks.process_mesh.mesh.device_type)
    rows = ranks.exchange((size, digest, order, generators))
    if any(row[2] != order for row in rows):
        check_order(ranks.process_mesh)
    differing = [rank for rank, row in enumerate(rows) if row[1] != rows[0][1]]
    if differing:
        raise everywhere(InputError(
            f"global_batch: ranks {differing} pass other tensors than rank 0 (number, dtypes, batch dims or "
            "the sizes of further dims); expected equal ones on all ranks, the number of samples aside"
        ))  # fmt: skip
    apart = any(row[3] != rows[0][3] for row in rows)
    if apart and not ranks.generators_differ:
        _log.warning(
            "the ranks' random generators have different states where a batch enters: plain random tensors "
            "would differ between ranks, and ops that draw on global tensors are refused: seed all alike"
        )
    ranks.generators_differ = apart
    return [row[0] for row in rows]


def _digest(leaves: list[Any], dims: list[int | None]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    kinds = [
        (str(t.dtype), dim, [n for d, n in enumerate(t.shape) if d != dim])
        for t, dim in zip(tensors, dims, strict=True)
    ]
    return number_of(repr(kinds).encode())


def _empty_like(tree: Any, batch_dims: Any) -> Any:
    dims = iter(_dims(tree, batch_dims))

    def empty(leaf: Tensor) -> Tensor:
        dim = next(dims)
        return leaf if dim is None else leaf.narrow(dim, 0, 0)

    return pytree.tree_map_only(Tensor, empty, tree)
