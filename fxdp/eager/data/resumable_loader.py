"""`data_loader`: a rank's rows of one device's batches, from a position that a checkpoint keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.data.full_batches import Cutting, part_of_rank
from fxdp.eager.data.loader_workers import batches_of_workers, options_of_a_stream
from fxdp.eager.data.own_draws import OwnDraws, SeededCollate, SeededSamples
from fxdp.eager.data.sample_order import SampleOrder, digest_of_weights, sample_weights, seed_of
from fxdp.eager.data_ranks import DataRanks, data_ranks
from fxdp.eager.loader import global_batch
from fxdp.errors import InputError
from fxdp.ir.network.raw_bytes import number_of
from fxdp.ranks.liveness.failure import everywhere, guard

_OURS = ("sampler", "batch_sampler", "generator", "batch_size", "shuffle", "drop_last")


class ResumableLoader:
    """Batches in one device's order, of which each rank loads its rows; see `data_loader`.

    Attributes
    ----------
    epoch : the number of the running epoch, or of the next one between two.
    """

    def __init__(
        self, data: Any, order: SampleOrder, mesh: DeviceMesh | Mapping[str, int] | None, batch_dims: Any,
        local: bool, block: int, options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self._data, self._order, self._options = data, order, dict(options)
        self._kind = _kind_of(data)
        self._mesh, self._batch_dims, self._local = mesh, batch_dims, local
        self._block, self._cutting = block, Cutting(mesh, batch_dims, block, local)
        self._by_rows = self._options.get("collate_fn") in (None, default_collate)
        self.epoch, self._given, self._resumes = 0, 0, False

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        if self._kind == "stateful":
            return len(self._data)
        return replace(self._order, length=len(self._data)).batches

    def __iter__(self) -> Iterator[Any]:
        """Yield an epoch's batches, those left after `load_state_dict`; all ranks must take them together."""
        if self._given and not self._resumes:  # the epoch before was left early
            self.epoch, self._given = self.epoch + 1, 0
        self._resumes = False
        ranks = data_ranks(self._mesh, "cpu")
        self._agree(ranks)
        batches = self._map_style(ranks) if self._kind == "map-style" else self._iterated(ranks)
        for part in batches:
            self._given += 1
            yield part
        self.epoch, self._given = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position: epoch, batches given in it, and what defines the order; equal on all ranks."""
        state = {**self._defined_by(), "epoch": self.epoch, "given": self._given}
        if self._kind == "stateful":
            state["loader"] = self._data.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the position of a state, on any number of ranks, of a map-style data set with any workers.

        Raises
        ------
        InputError : the state is of other data or of another order; nothing is changed.
        """
        faults = [
            f"{name} is {own!r} here, {state.get(name)!r} in the state"
            for name, own in self._defined_by().items()
            if state.get(name) != own
        ]
        faults += [f"{name} is missing" for name in ("epoch", "given") if name not in state]
        if faults:
            raise InputError(
                "the position is of other data or another order; expected the data set and the options with "
                "which it was saved, so that no sample is seen twice or never:\n  " + "\n  ".join(faults)
            )
        if self._kind == "stateful":
            self._data.load_state_dict(state["loader"])
        self.epoch, self._given, self._resumes = state["epoch"], state["given"], True

    def _agree(self, ranks: DataRanks) -> None:
        """Compare the order and the position with all ranks; a collective call.

        Raises
        ------
        InputError : they differ, as of a data set with another length on one rank.
        """
        own = self._defined_by() | {"epoch": self.epoch, "given": self._given, "block": self._block}
        with guard(ranks.process_mesh):
            rows = ranks.enter("an epoch of data", (number_of(repr(own).encode()),))
            if any(row != rows[0] for row in rows):
                told = ranks.gather(list(own.items()))
                faults = [
                    f"{name} is {[dict(of_rank).get(name) for of_rank in told]} by rank"
                    for name in own
                    if len({repr(dict(of_rank).get(name)) for of_rank in told}) > 1
                ]
                raise everywhere(InputError(
                    "the ranks' data or positions differ; expected one data set, seed and position, of which "
                    "each rank loads its rows:\n  " + "\n  ".join(faults)
                ))  # fmt: skip

    def _defined_by(self) -> dict[str, Any]:
        order = self._order
        found: dict[str, Any] = {"kind": self._kind}
        if self._kind != "stateful":
            found |= {"seed": order.seed, "batch_size": order.batch_size, "drop_last": order.drop_last}
        if self._kind == "map-style":
            found |= {"samples": order.length, "shuffle": order.shuffle}
            found["weights"] = digest_of_weights(order.weights)
        if self._kind == "iterable":  # each worker has its own share of the sequence, or all of it
            found["num_workers"] = self._options.get("num_workers", 0)
        return found

    def _map_style(self, ranks: DataRanks) -> Iterator[Any]:
        """Yield this rank's rows; it loads them alone where collating is row by row."""
        while True:
            batches = self._order.from_batch(self.epoch, self._given)
            for samples, data in zip(batches, self._loaded(ranks if self._by_rows else None), strict=False):
                axis = self._axis(samples, ranks)
                if not self._by_rows:
                    yield part_of_rank(data, ranks, axis, self._cutting)
                elif all(_has_rows(leaf, max(axis.local, 1)) for leaf in pytree.tree_leaves(data)):
                    own = pytree.tree_map(partial(torch.narrow, dim=0, start=0, length=axis.local), data)
                    yield own if self._local else global_batch(own, self._mesh, self._batch_dims)
                else:  # strings and numbers, say: one device's batch has those of all samples
                    self._by_rows = False
                    break
            else:
                return

    def _loaded(self, ranks: DataRanks | None) -> Iterable[Any]:
        """Load the remaining batches of the epoch, with `ranks` this rank's rows only."""

        def rows(samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
            if ranks is None:
                return samples
            axis = self._axis(samples, ranks)
            own = samples[axis.offset : axis.offset + axis.local]
            return own or samples[:1]  # one tells the kinds of tensors

        numbers = self._order.seed, self.epoch
        options = {**self._options, "collate_fn": SeededCollate(self._options.get("collate_fn"), *numbers)}
        loader = DataLoader(
            SeededSamples(self._data, *numbers),
            batch_sampler=(rows(samples) for samples in self._order.from_batch(self.epoch, self._given)),
            generator=torch.Generator(),  # else it draws from the run's
            **options,
        )
        return batches_of_workers(loader, self.epoch, self._given)

    def _axis(self, samples: Sequence[tuple[int, int]], ranks: DataRanks) -> BatchAxis:
        return ranks.axis(self._order.parts(samples, ranks.world, self._block))

    def _iterated(self, ranks: DataRanks) -> Iterator[Any]:
        """Yield this rank's rows of batches that each rank loads in full."""
        numbers = self._order.seed, self.epoch
        draws, batches = OwnDraws(*numbers), self._data
        if self._kind == "iterable":
            loader = DataLoader(
                self._data, batch_size=self._order.batch_size, drop_last=self._order.drop_last,
                generator=torch.Generator().manual_seed(seed_of(*numbers)),
                **options_of_a_stream(self._data, self._options),
            )  # fmt: skip
            batches = batches_of_workers(loader, self.epoch, 0)
        with guard(ranks.process_mesh), draws():
            iterator = iter(batches)
            for number in range(self._given if self._kind == "iterable" else 0):
                if next(iterator, None) is None:
                    raise InputError(
                        f"the data ended after batch {number} of epoch {self.epoch}, the position is behind "
                        f"batch {self._given}; expected the data set with which the position was saved"
                    )
        while True:
            with draws():
                data = next(iterator, None)
            with guard(ranks.process_mesh):
                going = [row[0] for row in ranks.enter("the next batch", (data is not None,))]
            if not all(going):
                break
            yield part_of_rank(data, ranks, None, self._cutting)
        if any(going):
            ended = [rank for rank, goes in enumerate(going) if not goes]
            raise everywhere(InputError(
                f"the data of ranks {ended} ended, others have more; expected one sequence on all ranks, "
                "of which each takes its rows: do not split it by rank"
            ))  # fmt: skip


def data_loader(
    data: Any, batch_size: int | None = None, *, mesh: DeviceMesh | Mapping[str, int] | None = None,
    batch_dims: Any = None, local: bool = False, block: int = 1, shuffle: bool = False,
    drop_last: bool = False, seed: int = 0, weights: Sequence[float] | Callable[[int], float] | None = None,
    **options: Any,
) -> ResumableLoader:  # fmt: skip
    """Return a loader of one device's batches, of which each rank loads its rows, and that resumes anywhere.

    `fxdp.save(..., data=loader)` keeps the position, and `fxdp.load` finds it on any number of ranks: over
    all of the run the samples, and their order, are those of one device that was never stopped.

    Parameters
    ----------
    data : a map-style data set; an iterable one, which each rank reads in full; or a loader with `state_dict`
        and `load_state_dict` (torchdata's `StatefulDataLoader`), equal on all ranks.
    batch_size : the samples of a batch of all ranks together; None: the loader makes its batches.
    mesh, batch_dims : those of `global_batch`.
    local : True: this rank's rows as plain tensors, as a compiled module takes them. False: global tensors.
    block : the samples that stay together on a rank, as of `fxdp.Bitwise(block=4)`.
    shuffle : whether an epoch has an order of its own, defined by `seed` and the epoch alone.
    drop_last : whether a shorter last batch is left out.
    seed : of the order, and of random numbers: each sample draws from a state of its own, by seed, epoch and
        place in the epoch.
    weights : what each sample weighs (its tokens, nodes or pixels), a number for each or a function of a
        sample's index. A batch has the same samples then, in an order whose parts weigh the same on any
        number of ranks.
    options : further options of torch's DataLoader: `num_workers`, `collate_fn`, `pin_memory` ...

    Raises
    ------
    InputError : options that do not fit the data; a data set without a length. In an epoch: an iterable of
        which several workers load the same samples; a worker that died; ranks whose data differ.
    """
    kind = _kind_of(data)
    faults = [f"{name}= is given by the loader's own options" for name in options if name in _OURS]
    if kind == "stateful":
        given = {
            "batch_size": batch_size,
            "shuffle": shuffle or None,
            "drop_last": drop_last or None,
        } | options
        faults += [
            f"{name}= is the wrapped loader's own" for name, value in given.items() if value is not None
        ]
    elif not _is_count(batch_size, 1):
        faults.append(f"batch_size={batch_size!r}; expected at least 1, the samples of all ranks together")
    if kind == "iterable" and shuffle:
        faults.append("shuffle=True of an iterable; expected a map-style data set, or one that shuffles")
    if kind == "iterable" and not isinstance(data, IterableDataset):
        faults.append(f"{type(data).__name__} has no __getitem__; expected one, or an IterableDataset")
    if kind == "map-style" and not hasattr(data, "__len__"):
        faults.append(f"{type(data).__name__} has no __len__; expected one, or an IterableDataset")
    if weights is not None and kind != "map-style":
        faults.append("weights= of samples that have no index; expected a map-style data set")
    if not _is_count(block, 1):
        faults.append(f"block={block!r}; expected at least 1 sample")
    if not _is_count(seed, 0):
        faults.append(f"seed={seed!r}; expected an integer of at least 0")
    if faults:
        raise InputError("data_loader: " + "; ".join(faults))
    length = len(data) if kind == "map-style" else 0
    weighed = None if weights is None else sample_weights(weights, length)
    order = SampleOrder(length, batch_size or 1, shuffle, drop_last, seed, weighed)
    return ResumableLoader(data, order, mesh, batch_dims, local, block, options)


def _kind_of(data: Any) -> str:
    if isinstance(data, IterableDataset):
        return "iterable"
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict") and hasattr(data, "__iter__"):
        return "stateful"
    return "map-style" if hasattr(data, "__getitem__") else "iterable"


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == rows


def _is_count(value: Any, least: int) -> bool:
    return hasattr(value, "__index__") and value >= least
