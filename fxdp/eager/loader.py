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
from fxdp.capture.input_axes import SAMPLES
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.data_ranks import DataRanks, data_ranks
from fxdp.eager.local_parts import entered
from fxdp.eager.message_report import COUNTS
from fxdp.eager.one_device_view import show_one_device_to_modules
from fxdp.eager.ragged.cutting import cut
from fxdp.eager.ragged.entering import emptied, enter
from fxdp.eager.ragged.lists import joined_lists
from fxdp.eager.ragged.structure import Opened, tensors_in
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import InputError
from fxdp.ir.network.raw_bytes import number_of
from fxdp.ranks.generator_states import torch_generators
from fxdp.ranks.liveness.failure import everywhere, guard, refusing

_log = logging.getLogger("fxdp")
_RAGGED = -1
"""In the place of a batch size: the batch is ragged."""


def global_batch(
    tree: Any, mesh: DeviceMesh | Mapping[str, int] | None = None, batch_dims: Any = None
) -> Any:
    """Return a tree of this rank's tensors as global tensors; all ranks must call this together.

    The global batch is the concatenation of the ranks' parts in rank order; parts may be uneven or empty.
    Tensors without a batch dim count as equal on all ranks. Lists of text or numbers and tuples of text that
    differ between ranks, with an element for each sample (captions), are concatenated, too.

    Parameters
    ----------
    tree : tensors in any nesting of tuples, lists and dicts; what is neither stays as it is.
    mesh : a DeviceMesh with data axes; None: all ranks.
    batch_dims : the batch dim of each tensor, a pytree prefix of int, `fxdp.Rows` (of a ragged batch) or
        None (no batch dim). None: dim 0 of every tensor with at least one dim, and what is recognised:
        graphs, packed sequences, jagged tensors, images, lists of boxes (docs/ragged.md).

    Raises
    ------
    InputError : tensors with different batch sizes, or trees that differ between ranks; a ragged batch
        whose axes, lengths or pointers contradict one another.
    AgreementError : the ranks have sent different messages before.
    """
    return _entered(tree, _ranks_of(tree, mesh), batch_dims)


def global_parts(opened: Opened, ranks: DataRanks, samples: BatchAxis | None) -> Any:
    """Return a ragged batch of one device, opened in place on each rank, as global tensors.

    All ranks must call this together, with equal batches.

    Parameters
    ----------
    samples : the ranks' samples, where all axes are cut; None: where these are nearest to even rows.
    """
    show_one_device_to_modules()
    with guard(ranks.process_mesh):
        _agreed(ranks, _RAGGED, 0, {})
        ranks.let_go_of_parameters()
        return cut(opened, ranks.even_axis, samples)


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
                has_any = batch is not None or last is not None
                going = ranks.enter("the next batch", (batch is not None, has_any))
            if not any(row[0] for row in going):
                return
            if not all(row[1] for row in going):
                absent = [rank for rank, row in enumerate(going) if not row[1]]
                raise everywhere(InputError(
                    f"the loaders of ranks {absent} have no batch, others have; expected at least one batch, "
                    "maybe empty, on every rank, which tells the kinds of tensors"
                ))  # fmt: skip
            ended, last = batch is None, last if batch is None else batch
            yield _entered(last, ranks, self._batch_dims, ended=ended)


def shard(
    loader: Iterable[Any], mesh: DeviceMesh | Mapping[str, int] | None = None, batch_dims: Any = None
) -> GlobalLoader:
    """Return the loader with its batches as global tensors: `for x, y in fxdp.shard(loader, mesh)`.

    Each rank's loader gives this rank's samples, as with a `DistributedSampler`. `mesh` and `batch_dims` are
    those of `global_batch`.
    """
    return GlobalLoader(loader, mesh, batch_dims)


def _ranks_of(tree: Any, mesh: DeviceMesh | Mapping[str, int] | None) -> DataRanks:
    first = next(tensors_in(tree), None)
    return data_ranks(mesh, "cpu" if first is None else first.device.type)


def call_on_batch(
    ranks: DataRanks, args: tuple[Any, ...], kwargs: dict[str, Any], batch_dims: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with this rank's tensors as global ones, with their graph.

    `batch_dims` is a pytree prefix of `(args, kwargs)`, as for `fxdp.compile`.
    """
    dims = partial(resolve_batch_dims, args, kwargs, batch_dims)
    opened = partial(Opened, (args, kwargs), batch_dims)
    return _made_global(opened, ranks, lambda tree: dims(), keeps_graph=True)  # type: ignore[no-any-return]


def _entered(tree: Any, ranks: DataRanks, batch_dims: Any, *, ended: bool = False) -> Any:
    def opened() -> Opened:
        found = Opened(tree, batch_dims)
        return emptied(found) if ended else found

    return _made_global(opened, ranks, lambda tree: batch_dims_of(tree, batch_dims))


def _made_global(
    opening: Callable[[], Opened],
    ranks: DataRanks,
    resolved: Callable[[Any], list[int | None]],
    *,
    keeps_graph: bool = False,
) -> Any:
    show_one_device_to_modules()
    tree: Any = None
    dims: list[int | None] = []
    size, digest = _RAGGED, 0
    with guard(ranks.process_mesh):
        with refusing(ranks.process_mesh):
            opened = opening()
            if not opened.is_ragged:
                tree = opened.make({})
                dims = resolved(tree)
                leaves = pytree.tree_leaves(tree)
                size, digest = _batch_size(leaves, dims), _digest(leaves, dims)
        sizes, lists_differ = _agreed(ranks, size, digest, opened.lists)
        ranks.let_go_of_parameters()
        if sizes is None:
            return enter(opened, ranks, lists_differ=lists_differ, keeps_graph=keeps_graph)
        if lists_differ:
            tree = opened.make(joined_lists(ranks.gather(opened.lists), [sizes]))
    axis, given = ranks.axis(sizes), iter(dims)
    COUNTS.add_batch({SAMPLES: axis.sizes})

    def made(leaf: Any) -> Any:
        dim = next(given) if isinstance(leaf, Tensor) else None
        if dim is None or isinstance(leaf, GlobalTensor):
            return leaf
        return entered(leaf, axis, dim, keeps_graph=keeps_graph)

    return pytree.tree_map(made, tree)


def batch_dims_of(tree: Any, batch_dims: Any) -> list[int | None]:
    """Return the batch dim of each tensor of a batch."""
    prefix: Any = batch_dims if batch_dims is None or isinstance(batch_dims, int) else ((batch_dims,), {})
    return resolve_batch_dims((tree,), {}, prefix)


def _batch_size(leaves: list[Any], dims: list[int | None]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    plain = [(t, d) for t, d in zip(tensors, dims, strict=True) if not isinstance(t, GlobalTensor)]
    sizes = {t.shape[dim] for t, dim in plain if dim is not None}
    if len(sizes) > 1:
        raise InputError(
            f"global_batch: the tensors have batches of {sorted(sizes)} samples on this rank; expected one "
            "size: give batch_dims= with None for tensors that have no batch dim, or fxdp.Rows(...) where "
            "samples have rows of their own (nodes, tokens, boxes)"
        )
    return sizes.pop() if sizes else 0


def _agreed(
    ranks: DataRanks, size: int, digest: int, lists: Mapping[str, Any]
) -> tuple[list[int] | None, bool]:
    """Exchange this rank's batch size, and compare the rest with all ranks.

    Returns
    -------
    The batch sizes, None if a rank's is ragged; and whether the lists of text or numbers differ.
    """
    generators = torch_generators(ranks.process_mesh.mesh.device_type)
    of_lists = number_of(repr(lists).encode()) if lists else 0
    rows = ranks.enter("a batch", (size, digest, generators, of_lists))
    is_ragged = any(row[0] == _RAGGED for row in rows)
    differing = [rank for rank, row in enumerate(rows) if row[1] != rows[0][1]]
    if differing and not is_ragged:
        raise everywhere(InputError(
            f"global_batch: ranks {differing} pass other tensors than rank 0 (number, dtypes, batch dims or "
            "the sizes of further dims); expected equal ones on all ranks, the number of samples aside"
        ))  # fmt: skip
    apart = any(row[2] != rows[0][2] for row in rows)
    if apart and not ranks.generators_differ:
        _log.warning(
            "the ranks' random generators have different states where a batch enters: plain random tensors "
            "would differ between ranks, and ops that draw on global tensors are refused: seed all alike"
        )
    ranks.generators_differ = apart
    lists_differ = any(row[3] != rows[0][3] for row in rows)
    return None if is_ragged else [row[0] for row in rows], lists_differ


def _digest(leaves: list[Any], dims: list[int | None]) -> int:
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    kinds = [
        (str(t.dtype), dim, [n for d, n in enumerate(t.shape) if d != dim])
        for t, dim in zip(tensors, dims, strict=True)
    ]
    return number_of(repr(kinds).encode())
