"""DataLoaders of a script: their batches are global tensors, in one device's order.

    one device's batch      samples 7 2 9 4 1, by the script's own sampler, equal on all ranks
    rank 0, rank 1          7 2 9 | 4 1         default_collate: each rank loads its own samples
                            7 2 9 4 1           any other collator: each rank loads all, then keeps its own;
                                                of graphs and packed documents those where samples end

Loading its own samples alone is one device's only if loading draws no random numbers and changes nothing:
else a rank loads all samples, and has one device's draws. Samples of a batch may differ in dtype, shape or
keys (`[1, 2.5]`), or fail to load: then all ranks load all of that batch, and collate or raise as one device.

A thread beside the script's main one, which fetches batches ahead, cannot meet other ranks' threads in an
order: its batches are compared when the script ends.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from fxdp.eager.ragged.cutting import cut
from fxdp.eager.ragged.structure import Opened, tensors_in
from fxdp.eager.tensor import wrapped
from fxdp.errors import AgreementError, InputError
from fxdp.ir.types.placements import Shard
from fxdp.ranks.generator_states import generator_states, set_generator_states
from fxdp.ranks.liveness.failure import guard
from fxdp.ranks.same_order import check_order
from fxdp.run.exact_types import tell_of_exact_types
from fxdp.run.generators import digests
from fxdp.run.loading_effects import loading_has_effects
from fxdp.run.session import Session
from fxdp.run.trees import can_be_cut, leaves_of, map_tensors
from fxdp.torch_compat import MapFetcher

_COMPARED_EVERY = 100


@dataclass
class OwnSamples:
    """This rank's samples of a batch.

    Attributes
    ----------
    data : the collated samples; of one sample if this rank has none.
    count : the number of this rank's samples.
    indices : those of all samples of the batch.
    digest : a number for the indices.
    form : a number for structure, dtypes and shapes beside the batch; -1 if loading has failed.
    """

    data: Any
    count: int
    indices: Sequence[Any]
    digest: int
    form: int

    def pin_memory(self) -> OwnSamples:
        """Return the samples in pinned memory, as the DataLoader asks for them."""
        return replace(self, data=map_tensors(self.data, Tensor.pin_memory))


class GlobalBatches:
    """Iterator of a DataLoader, with global tensors."""

    def __init__(self, batches: Iterator[Any], loader: DataLoader[Any], session: Session) -> None:
        self._batches, self._loader, self._session = batches, loader, session
        self._apart: list[int] | None = None

    def __iter__(self) -> GlobalBatches:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next batch; a collective call in the main thread."""
        batch = next(self._batches)
        if threading.current_thread() is threading.main_thread():
            return entered(batch, self._session, all_of=self._all_of)
        if self._apart is None:
            self._apart = apart_of_thread(self._session)
        return entered(batch, self._session, self._apart, self._all_of)

    def _all_of(self, indices: Sequence[Any]) -> Any:
        """Load all samples of a batch in this process."""
        loader = self._loader
        fetcher: Any = MapFetcher(loader.dataset, True, loader.collate_fn, loader.drop_last)
        fetcher._all_samples = True
        return fetcher.fetch(indices)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def entered(
    batch: Any,
    session: Session,
    apart: list[int] | None = None,
    all_of: Callable[[Sequence[Any]], Any] | None = None,
    *,
    compares: bool = False,
) -> Any:
    """Return a batch with global tensors, after a comparison with all ranks; a collective call.

    With `apart` nothing is sent, and a number for the batch is kept there. `all_of` loads the samples of
    these indices, where ranks' own samples do not make one batch. `compares` has all values compared.

    Raises
    ------
    AgreementError : ranks have other batches, or have run other ops.
    """
    own = batch if isinstance(batch, OwnSamples) else None
    data = batch if own is None else own.data
    opened = Opened(data, None, in_place=True) if own is None else None
    is_ragged = opened is not None and opened.is_ragged
    leaves = tensors_in(data) if is_ragged else leaves_of(data)
    tensors = [leaf for leaf in leaves if can_be_cut(leaf)]
    if not tensors and own is None:
        return data
    total = tensors[0].shape[0] if own is None else len(own.indices)
    tell_of_exact_types()
    if apart is None:
        session.batches += 1
    number = session.batches if apart is None else len(apart) + 1
    digest = own.digest if own is not None else _checksum(tensors) if compares or _is_compared(number) else 0
    form = 0 if own is None else own.form
    if apart is not None:
        apart.append(zlib.crc32(repr((total, digest, form)).encode()))
    fits = form >= 0 if apart is not None else _fit(session, total, digest, form)
    if not fits:
        assert own is not None
        assert all_of is not None
        return entered(all_of(own.indices), session, apart, compares=True)
    if opened is not None and is_ragged:
        return cut(opened, session.axis)
    axis = session.axis(total)
    if not total:
        return data
    start, count = (axis.offset, axis.local) if own is None else (0, own.count)
    size = total if own is None else max(own.count, 1)

    def part(leaf: Tensor) -> Tensor:
        if not can_be_cut(leaf) or leaf.shape[0] != size:
            return leaf
        return wrapped(leaf.detach().narrow(0, start, count), axis, Shard(0))

    return map_tensors(data, part)


def apart_of_thread(session: Session) -> list[int]:
    """Return the list for the batches of one more loader that this thread advances."""
    name = threading.current_thread().name
    number = sum(key.startswith(f"{name}, ") for key in session.apart)
    return session.apart.setdefault(f"{name}, loader {number}", [])


def compare_apart(session: Session) -> None:
    """Compare the batches that threads have fetched, as far as all ranks have them; a collective call if any.

    Raises
    ------
    InputError : ranks had other batches.
    """
    if not session.apart:
        return
    with session.ranks.message("the script's end"):
        rows = session.ranks.gather(session.apart)
    for thread, own in rows[0].items():
        for rank, row in enumerate(rows):
            if any(one != other for one, other in zip(own, row.get(thread, ()), strict=False)):
                raise InputError(
                    f"{thread}: rank {rank} had another batch than rank 0, and the run's numbers are not one "
                    "device's; expected one order: a loader that a thread advances must not draw from the "
                    "generators that the main thread draws from: pass generator= to the DataLoader"
                )


def fetched(plain: Callable[..., Any], fetcher: MapFetcher, indices: Any, session: Session) -> Any:
    """Load this rank's samples of a batch if that is exact, else all; runs in the workers of loaders, too."""
    before, session.loads = session.loads, True
    try:
        return _fetched(plain, fetcher, indices, session)
    finally:
        session.loads = before


def _fetched(plain: Callable[..., Any], fetcher: MapFetcher, indices: Any, session: Session) -> Any:
    if session.alone or not _by_samples(fetcher, indices):
        return plain(fetcher, indices)
    indices = list(indices)
    axis = session.axis(len(indices))
    own = indices[axis.offset : axis.offset + axis.local]
    before = generator_states()
    try:
        data = plain(fetcher, own or indices[:1])
    except Exception:  # one device's error, which all ranks raise when they load all
        set_generator_states(before)
        return OwnSamples(None, 0, indices, zlib.crc32(repr(indices).encode()), -1)
    size = max(len(own), 1)
    if generator_states() == before:
        if all(can_be_cut(leaf) and leaf.shape[0] == size for leaf in leaves_of(data)):
            return OwnSamples(data, len(own), indices, _digest(plain, fetcher, indices), _form(data))
    else:
        set_generator_states(before)
    fetcher._all_samples = True  # type: ignore[attr-defined]
    return plain(fetcher, indices)


def _digest(plain: Callable[..., Any], fetcher: Any, indices: Sequence[Any]) -> int:
    """Return a number for a batch's indices and, now and then, for its first sample, which all ranks load."""
    fetcher._number = getattr(fetcher, "_number", 0) + 1
    values = leaves_of(plain(fetcher, indices[:1])) if _is_compared(fetcher._number) else ()
    return zlib.crc32(repr(indices).encode(), _checksum([one for one in values if can_be_cut(one)]))


def _form(data: Any) -> int:
    """Return a number above 0 for all that collated samples have in common with those of other ranks."""
    return zlib.crc32(repr(map_tensors(data, lambda leaf: (leaf.dtype, leaf.shape[1:]))).encode()) or 1


def _by_samples(fetcher: Any, indices: Any) -> bool:
    """Return whether a rank may load its own samples alone."""
    if not fetcher.auto_collation or not isinstance(indices, (list, tuple)) or not indices:
        return False
    if not hasattr(fetcher, "_all_samples"):
        collates = _collates_by_samples(fetcher.collate_fn)
        fetcher._all_samples = not collates or loading_has_effects(fetcher.dataset)
    return not fetcher._all_samples


def _collates_by_samples(collate: Any) -> bool:
    transformers = sys.modules.get("transformers.data.data_collator")
    known = (default_collate, getattr(transformers, "default_data_collator", None))
    return any(collate is one for one in known)


def _is_compared(number: int) -> bool:
    """Return whether ranks compare a batch's values: those of batches 1, 2, 4, 8, ... and each hundredth."""
    return not number & (number - 1) or not number % _COMPARED_EVERY


def _checksum(tensors: Sequence[Tensor]) -> int:
    found = 0
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        found = zlib.crc32(data.numpy().data, found)
    return found


def _fit(session: Session, total: int, digest: int, form: int) -> bool:
    """Compare with all ranks what must be equal where a batch enters; return whether samples' forms are."""
    ranks = session.ranks
    comms = ranks.process_mesh.comms
    if comms is None:
        return form >= 0
    own = (total, digest, comms.sequence_log.order, *digests())
    with guard(ranks.process_mesh):
        rows = ranks.exchange((*own, form))
    forms = [row[-1] for row in rows]
    fits = min(forms) >= 0 and len(set(forms)) == 1
    rows = [row[:-1] for row in rows]
    if not fits and all(forms):  # a sample that fails to load has no values to compare
        rows = [(row[0], own[1], *row[2:]) for row in rows]
    if all(row == own for row in rows):
        return fits
    if any(row[2] != own[2] for row in rows):
        check_order(ranks.process_mesh)
    differing = [rank for rank, row in enumerate(rows) if row != rows[0]]
    if any(row[:2] != rows[0][:2] for row in rows):
        raise InputError(
            f"ranks {differing} have another batch than rank 0 (their data, order or number of samples "
            "differ); expected one on all ranks, as one device has: take no random numbers from the system "
            "(np.random.default_rng() without a seed, os.urandom) and nothing from time or the process id"
        )
    kinds = zip(("random", "torch", "numpy.random"), *(row[3:] for row in rows), strict=False)
    kind = next(name for name, *found in kinds if len(set(found)) > 1)
    line = session.seeded.get(kind)
    seeded = f" ({kind} was seeded at {line})" if line else ""
    raise AgreementError(
        f"the generators of {kind} have other states on ranks {differing} than on rank 0{seeded}; "
        "expected one state, as on one device: seed by a constant, and draw on all ranks alike"
    )
