"""Exchange and compare data between ranks: integers of each step, lines of text, and the first parameters.

Everything here is a round on the mesh's control channel, except `broadcast_tensors`, which makes a few large
broadcasts on the mesh's process group. At world size 1 nothing is sent.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxdp.errors import AgreementError, RankFailedError
from fxdp.ir.graph.model_tensors import local_of
from fxdp.ir.network.raw_bytes import as_bytes, plain
from fxdp.ir.types.value_types import dtype_name
from fxdp.ranks.comms import harmless, not_understood
from fxdp.ranks.liveness.failure import convert
from fxdp.ranks.plain_values import decode, encode
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.ranks.tree.rank_parts import RankParts
from fxdp.torch_compat import broadcast_coalesced

_BUCKET_BYTES = 25 * 1024 * 1024
_SPEAKERS = 16  # ranks that send all lines if some differ


class Agreement:
    """Exchange of a few integers between all ranks, once per call of a compiled module.

    Between `start` and `finish` the caller must not take part in any further exchange.

    Raises
    ------
    RankFailedError : a rank refused an input (only this round fails), failed, or died.
    """

    def __init__(self, process_mesh: ProcessMesh) -> None:
        self._control = process_mesh.comms.control if process_mesh.comms else None
        self._size = process_mesh.mesh.world
        self._own: tuple[int, ...] = ()

    def exchange(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """Return all ranks' integers, in rank order. Ranks may give different numbers of integers."""
        self.start(values)
        return self.finish()

    def columns(self, values: Sequence[int], least: int) -> RankColumns:
        """Exchange at least so many integers on each rank, and return the result by column.

        Zeros stand where a rank sends fewer than another one.

        Raises
        ------
        ValueError : a rank has sent fewer than the least.
        """
        self.start(values)
        if self._control is None:
            return RankColumns(self._size, self._own)
        found = self._control.finish()
        # test for a list first: `isinstance` with our `Sequence` takes as long as all the rest
        if type(found) is not list and isinstance(found, RankParts) and found.columns is not None:
            return RankColumns(self._size, found.columns)
        rows = self._rows(found)
        try:
            return RankColumns(self._size, tuple(zip(*rows, strict=True)))
        except ValueError:
            if min(map(len, rows)) < least:
                raise
            return RankColumns(self._size, tuple(zip_longest(*rows, fillvalue=0)))

    def start(self, values: Sequence[int]) -> None:
        """Send this rank's integers without waiting."""
        self._own = tuple(values)
        if self._control is not None:
            self._control.start(struct.pack(f"<{len(values)}q", *values))

    def finish(self) -> list[tuple[int, ...]]:
        """Wait for all ranks' integers, and return the integers in rank order."""
        if self._control is None:
            return [self._own] * self._size
        return self._rows(self._control.finish())

    @staticmethod
    def _rows(found: Sequence[bytes]) -> list[tuple[int, ...]]:
        return [_understood(_integers, rank, data) for rank, data in enumerate(found)]


class RankColumns:
    """Integers of all ranks by column, without a Python loop over ranks."""

    def __init__(self, ranks: int, columns: Sequence[Any]) -> None:
        self._ranks, self._columns = ranks, columns

    def __getitem__(self, column: int) -> tuple[int, ...]:
        """Return one integer of each rank."""
        found = self._columns[column]
        if type(found) is tuple:
            return found
        return (found,) * self._ranks if isinstance(found, int) else tuple(found.tolist())

    def same(self, column: int) -> bool:
        """Return whether the integer is equal on all ranks."""
        found = self._columns[column]
        if type(found) is tuple:
            return found.count(found[0]) == len(found)
        return isinstance(found, int) or bool((found == found[0]).all())

    def settled(self, same: Iterable[int], zero: Iterable[int]) -> bool:
        """Return whether some columns are equal on all ranks and others 0; False if that is slow to tell."""
        columns = self._columns
        for column in (*same, *zero):
            found = columns[column]
            if type(found) is tuple:
                if found.count(found[0]) != len(found):
                    return False
            elif not isinstance(found, int):
                return False
        for column in zero:
            found = columns[column]
            if found[0] if type(found) is tuple else found:
                return False
        return True

    def any(self, column: int) -> bool:
        """Return whether the integer is nonzero on any rank."""
        found = self._columns[column]
        if type(found) is tuple:
            return any(found)
        return bool(found) if isinstance(found, int) else bool(found.any())


def gather_objects(process_mesh: ProcessMesh, value: Any) -> list[Any]:
    """Return every rank's `value` in rank order; `plain_values.encode` lists the supported types.

    Raises
    ------
    RankFailedError : a rank failed or died, or sent data that cannot be decoded.
    """
    if process_mesh.comms is None:
        return [value] * process_mesh.mesh.world
    found = process_mesh.comms.control.exchange(encode(value))
    return [_understood(decode, rank, data) for rank, data in enumerate(found)]


def _understood(read: Callable[[bytes], Any], rank: int, data: bytes) -> Any:
    try:
        return read(data)
    except (ValueError, struct.error) as error:
        raise RankFailedError(not_understood(rank, str(error))) from error


def _integers(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}q", data)


def agree(process_mesh: ProcessMesh, lines: Sequence[str], what: str, among: int = 0) -> None:
    """Check that all ranks have equal `lines`; `what` names these lines, as in "models" or "options".

    All ranks call this together. Only ranks with equal `among` are compared with one another.

    Raises
    ------
    AgreementError : raised on every rank, with the first line that differs and the ranks of each version.
    RankFailedError : a rank failed or died.
    """
    text = "\n".join(lines)
    digests = gather_objects(process_mesh, (among, hashlib.sha256(text.encode()).hexdigest()))
    # one digest per group: all ranks see the same digests, so all or none go on to compare lines
    if len(set(digests)) == len({group for group, _ in digests}):
        return
    groups: dict[int, dict[int, str]] = {}
    for rank, (group, digest) in enumerate(digests):
        groups.setdefault(group, {})[rank] = digest
    different = next(g for g in groups.values() if len(set(g.values())) > 1)
    first = {digest: rank for rank, digest in reversed(different.items())}
    speakers = sorted(first.values())[:_SPEAKERS]  # one rank per version: texts are long
    said = gather_objects(process_mesh, list(lines) if process_mesh.index in speakers else [])
    texts = {rank: said[first[own]] for rank, own in different.items() if first[own] in speakers}
    raise AgreementError(_difference(texts, what))


def broadcast_tensors(
    process_mesh: ProcessMesh, tensors: Sequence[Tensor], bucket_bytes: int = _BUCKET_BYTES
) -> None:
    """Overwrite `tensors` in place by the tensors of the mesh's rank 0, with few large broadcasts.

    A tensor that already equals rank 0's is not written: autograd may have saved the tensor, for a penalty
    on weights.

    All ranks pass tensors of the same shapes and dtypes in the same order, of any dtype and strides,
    including 0-dim and empty ones. Tensors that share all memory (tied weights) may be passed more than
    once. For a `DTensor` the local shard is sent and overwritten: pass one only where all ranks hold the
    same shard.

    Raises
    ------
    RankFailedError : a rank failed or died.
    """
    comms, distinct = process_mesh.comms, _distinct(map(local_of, tensors))
    if comms is None or comms.world_group is None or not distinct:
        return
    ends = accumulate(tensor.nbytes for tensor in distinct)
    for _, bucket in groupby(zip(distinct, ends, strict=True), lambda row: row[1] // bucket_bytes):
        own = [tensor for tensor, _ in bucket]
        rows = [as_bytes(plain(tensor)).clone() for tensor in own]
        try:
            broadcast_coalesced(comms.world_group, rows, bucket_bytes)
        except RankFailedError:
            raise
        except RuntimeError as error:
            raise convert(comms, error) from error
        for tensor, row in zip(own, rows, strict=True):
            if not torch.equal(row, as_bytes(plain(tensor))):
                tensor.copy_(row.view(tensor.dtype).view(tensor.shape))


def model_lines(module: nn.Module) -> list[str]:
    """Return class, parameters and buffers of a model with their types, for `agree`."""
    lines = [f"model {type(module).__qualname__}"]
    for kind, named in (("parameter", module.named_parameters()), ("buffer", sorted_buffers(module))):
        for name, t in named:
            frozen = "" if t.requires_grad or kind == "buffer" else " frozen"
            dtype = dtype_name(t.dtype)
            lines.append(f"{kind} {name} {dtype}{list(t.shape)}{frozen}{_cut(t)}")
    return lines


def sorted_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return named buffers sorted by name, as the order of registration may differ between processes."""
    return sorted(module.named_buffers(), key=lambda pair: pair[0])


def _cut(tensor: Tensor) -> str:
    """Return the placements of a `DTensor` as text, to be compared along with the full shape.

    Local shapes may differ from rank to rank.
    """
    return f" as {tensor.placements}" if isinstance(tensor, DTensor) else ""


def content_digest(tensor: Tensor) -> str:
    """Return a hash of a tensor's values."""
    return hashlib.sha256(as_bytes(plain(tensor.detach())).cpu().numpy().tobytes()).hexdigest()[:16]


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return `tensors` without empty ones and without repetitions of the same memory."""
    seen: set[tuple[Any, ...]] = set()
    distinct: list[Tensor] = []
    for tensor in tensors:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key not in seen:
            seen.add(key)
            distinct.append(tensor.detach())
    return distinct


def _difference(lines: Mapping[int, Sequence[str]], what: str) -> str:
    """Return a message with the first line that differs between ranks, and the ranks of each version."""
    longest = max(len(part) for part in lines.values())
    columns = [{r: part[i] if i < len(part) else None for r, part in lines.items()} for i in range(longest)]
    at = next((i for i, column in enumerate(columns) if len(set(column.values())) > 1), None)
    if at is None:  # line breaks inside lines
        return (
            f"ranks were given different {what}, split into different lines; expected equal ones on all ranks"
        )
    owners: dict[str | None, list[int]] = {}
    for rank, line in columns[at].items():
        owners.setdefault(line, []).append(rank)
    parts = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} " + _has(line, len(ranks))
        for line, ranks in owners.items()
    ]
    return (
        f"ranks were given different {what}: line {at + 1}: {'; '.join(parts)}\n"
        f"expected the same {what} on all ranks: build them from the same code and configuration everywhere"
    )


def _has(line: str | None, ranks: int) -> str:
    if line is None:
        return "ends before it" if ranks == 1 else "end before it"
    return f"has `{harmless(line)}`" if ranks == 1 else f"have `{harmless(line)}`"
