"""`fxdp.save_safetensors`: write a model's full values into one file, tensor by tensor.

    length of the header | header: name, dtype, shape and place of each tensor | tensors, one after another

The format is simple, but the safetensors library writes a file from all tensors at once. Here rank 0 writes
its own shard of a tensor and then the shards of the remaining ranks, rank by rank: rank 0 never holds more
than one shard beyond its own, and the senders hold nothing extra.

Tied tensors are one tensor in the file, under the name that transformers and `safetensors.torch.load_model`
expect; further names are in the metadata, as `save_model` writes them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxdp.errors import InputError, StateError, a_kind
from fxdp.ir.graph.model_tensors import local_of, sharding_of
from fxdp.ir.ops.parameter_shards import shard_range
from fxdp.module.checkpoint.checkpoint_folder import path_of
from fxdp.module.checkpoint.saving import process_mesh_of, together
from fxdp.module.compiled import CompiledModule
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.liveness.failure import guard
from fxdp.ranks.process_mesh import ProcessMesh

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNED = 8  # of the header's end, as in the library: tensors start at multiples of their item size


def save_safetensors(path: Path | str, compiled: CompiledModule) -> None:
    """Write the model's unsharded parameters and buffers into one safetensors file, under the model's names.

    A collective call: all ranks call it with the same path, and rank 0 writes. No rank holds more than one
    shard of one tensor beyond its own. An existing file stays until the new file is complete. `safetensors`
    need not be installed; `safetensors.torch.load_file` and `load_model` read the file, and transformers
    finds tied weights.

    Parameters
    ----------
    path : the file, new or to be replaced.
    compiled : the module returned by `fxdp.compile`.

    Raises
    ------
    InputError : the path is not writable, or a value does not fit into the format or is not initialized.
    StateError : the file could not be written; an existing file is unchanged.
    RankFailedError : another rank failed or died.
    """
    process_mesh, file = process_mesh_of(compiled), path_of(path)
    state = compiled.state_dict()
    together(process_mesh, _fault(compiled, state), InputError)
    kept, tied = _kept_names(compiled.module, state)
    part = file.with_name(file.name + ".new")
    there = process_mesh.index == 0 and file.is_dir()
    together(process_mesh, f"{file} is a folder; expected the name of a file" if there else None, InputError)
    fault = None
    try:
        output = part.open("wb") if process_mesh.index == 0 else None
    except OSError as error:
        fault = f"{part} is not writable ({error}); expected a folder in which files can be made"
    together(process_mesh, fault, InputError)
    fault = _written_completely(process_mesh, output, part, {name: state[name] for name in kept}, tied)
    if output is not None and fault is None:
        fault = _published(part, file)
    together(process_mesh, fault, StateError)


def _fault(compiled: CompiledModule, state: Mapping[str, Any]) -> str | None:
    """Return the reason why the state cannot be stored in a safetensors file; None if there is no reason."""
    if compiled._options.pipeline.gradients == "owner" and compiled._mesh.pipeline.size > 1:
        return (
            "fxdp.Pipeline(gradients='owner'): each pipeline rank has the new values of its own stages "
            "alone; expected gradients='everywhere' or strategy='shard'"
        )
    lines = [
        f"{name}: {a_kind(value) if not isinstance(value, Tensor) else value.dtype}"
        for name, value in state.items()
        if not isinstance(value, Tensor) or value.dtype not in _DTYPES or value.layout != torch.strided
    ]
    if lines:
        listed = "\n  ".join(lines)
        return f"a safetensors file holds dense tensors of the usual dtypes; these are none:\n  {listed}"
    unset = ", ".join(sorted(compiled._unset & state.keys()))
    return f"nobody has given these a value yet: {unset}; load a checkpoint first" if unset else None


def _kept_names(model: nn.Module, state: Mapping[str, Tensor]) -> tuple[list[str], dict[str, str]]:
    """Return the names in the file, largest items first, and for each further tied name the stored name."""
    every = (model.named_parameters, model.named_buffers)
    stored_as = {name: id(tensor) for named in every for name, tensor in named(remove_duplicate=False)}
    groups: dict[object, list[str]] = {}
    for name in state:  # a state dict may create values, tied or not
        groups.setdefault(stored_as.get(name, name), []).append(name)
    made = _made_from_others(model)
    kept, tied = [], dict[str, str]()
    for names in groups.values():
        first = next((name for name in names if not any(re.search(one, name) for one in made)), names[0])
        kept.append(first)
        tied |= {name: first for name in names if name != first}
    return sorted(kept, key=lambda name: (-state[name].itemsize, name)), tied


def _made_from_others(model: nn.Module) -> list[str]:
    """Return patterns of the names that transformers ties to a different name on loading."""
    found = []
    for path, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None) or ()
        found += [(re.escape(path) + r"\." if path else "") + key for key in keys]
    return found


def _written_completely(
    process_mesh: ProcessMesh,
    output: BinaryIO | None,
    part: Path,
    state: Mapping[str, Tensor],
    tied: Mapping[str, str],
) -> str | None:
    """Call `_written`, and remove an incomplete file, because the disk may be full."""
    full = False
    try:
        with guard(process_mesh):
            fault = _written(process_mesh, output, state, tied)
        full = fault is None
    finally:
        if output is not None and not full:
            with contextlib.suppress(OSError):
                output.close()
            part.unlink(missing_ok=True)
    return fault


def _written(
    process_mesh: ProcessMesh, output: BinaryIO | None, state: Mapping[str, Tensor], tied: Mapping[str, str]
) -> str | None:
    """Write header and tensors; return a description of a failure, after all ranks have sent all tensors."""
    fault = None
    for piece in chain([_header(state, tied)], _pieces(process_mesh, state)):
        if output is not None and fault is None:
            try:
                output.write(piece)
            except OSError as error:  # the senders continue, so this rank must receive
                fault = f"{output.name} could not be written; what was there is as it was: {error}"
        del piece  # free the piece before the next one arrives
    if output is not None:
        try:
            output.close()
        except OSError as error:  # no space for buffered data
            fault = fault or f"{output.name} could not be written; what was there is as it was: {error}"
    return fault


def _pieces(process_mesh: ProcessMesh, state: Mapping[str, Tensor]) -> Iterator[Any]:
    """Yield the bytes of all tensors in order on rank 0; holders of shards send them to rank 0."""
    sharded = [_own_rows(value) for value in state.values()]
    group = None if process_mesh.comms is None else process_mesh.comms.world_group
    place = 0 if group is None else dist.get_rank(group)
    everywhere = gather_objects(process_mesh, (place, sharded))
    for number, value in enumerate(state.values()):
        holders: dict[int, tuple[int, int]] = {}
        for place_of_rank, rows in everywhere:
            first, last = rows[number]
            if last > first:  # replicas hold equal rows: one of them sends
                holders.setdefault(first, (last, place_of_rank))
        for first, (last, holder) in sorted(holders.items()):
            mine = holder == place
            if process_mesh.index == 0:
                shape = (last - first, *value.shape[1:]) if isinstance(value, DTensor) else value.shape
                yield _in_memory(_own_bytes(value) if mine else _received(value, shape, holder, group))
            elif mine and isinstance(value, DTensor):
                dist.send(_own_bytes(value), group=group, group_dst=everywhere[0][0])


def _received(value: Tensor, shape: Sequence[int], holder: int, group: Any) -> Tensor:
    size = prod(shape) * value.itemsize
    got = torch.empty(size, dtype=torch.uint8, device=local_of(value).device)
    dist.recv(got, group=group, group_src=holder)
    return got


def _own_bytes(value: Tensor) -> Tensor:
    return local_of(value).detach().contiguous().view(-1).view(torch.uint8)


def _in_memory(data: Tensor) -> Any:
    return data.cpu().numpy().data


def _own_rows(value: Tensor) -> tuple[int, int]:
    """Return the range of rows that this rank holds; one row for a tensor that is not sharded."""
    return shard_range(value.shape[0], sharding_of(value)) if isinstance(value, DTensor) else (0, 1)


def _header(state: Mapping[str, Tensor], tied: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", **tied}}
    place = 0
    for name, value in state.items():
        end = place + value.numel() * value.itemsize
        entries[name] = {
            "dtype": _DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [place, end],
        }  # fmt: skip
        place = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return struct.pack("<Q", len(text)) + text


def _published(part: Path, file: Path) -> str | None:
    try:
        with part.open("rb") as written:
            os.fsync(written.fileno())
        part.replace(file)
    except OSError as error:
        return f"{part} is written, but cannot be renamed to {file.name}: {error}"
    return None
