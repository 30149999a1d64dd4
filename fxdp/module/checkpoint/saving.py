"""`fxdp.save` and `fxdp.load`: model, optimizer, random state and step, safe at any interruption."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim import Optimizer

from fxdp.errors import FxdpError, InputError, StateError, a_kind
from fxdp.module.checkpoint.checkpoint_folder import (
    begin,
    find,
    new_folder,
    path_of,
    publish,
    read_metadata,
)
from fxdp.module.checkpoint.checkpoint_state import differences, state_of, take, wanted_by
from fxdp.module.checkpoint.saved_fingerprint import fingerprint_fault, write_fingerprint
from fxdp.module.compiled import CompiledModule
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.liveness.failure import everywhere, guard
from fxdp.ranks.process_mesh import ProcessMesh

_DATA = "data.pt"


def save(
    path: Path | str,
    compiled: CompiledModule,
    optimizer: Optimizer | None = None,
    *,
    step: int = 0,
    data: Any = None,
) -> None:
    """Save a compiled module, its optimizer, each rank's random state and the number of the step.

    A collective call: all ranks use the same path, on storage that all ranks see. An existing checkpoint
    stays until the new one is complete: after an interruption at any moment, `load` finds the old or the new
    checkpoint. The checkpoint can be loaded on a different number of ranks, with a different mesh and
    strategy, and by `torch.distributed.checkpoint.load`.

    Parameters
    ----------
    path : the folder, new or with an older checkpoint to be replaced.
    compiled : the module returned by `fxdp.compile`.
    optimizer : the optimizer of the module's parameters.
    step : the number of finished steps; `load` returns this number.
    data : what `fxdp.data_loader` returned, or anything with a `state_dict` that is equal on all ranks.

    Raises
    ------
    InputError : the path is not writable, or exists and is not a checkpoint.
    StateError : the checkpoint could not be written; an existing checkpoint is unchanged.
    RankFailedError : another rank failed or died.
    """
    process_mesh, folder = process_mesh_of(compiled), path_of(path)
    _check_optimizer(optimizer)
    together(process_mesh, begin(folder) if process_mesh.index == 0 else None, InputError)
    state = {**state_of(compiled, optimizer), "step": step}
    try:
        torch.save(_random_state(process_mesh), _random_file(new_folder(folder), process_mesh.index))
        if data is not None and process_mesh.index == 0:
            torch.save(data.state_dict(), new_folder(folder) / _DATA)
        if process_mesh.index == 0:
            write_fingerprint(new_folder(folder), compiled)
        _write(process_mesh, new_folder(folder), state)
        fault = None
    except (CheckpointException, OSError) as error:
        fault = f"{folder} could not be written; what was there is as it was: {error}"
    together(process_mesh, fault, StateError)
    if process_mesh.index == 0:
        try:
            publish(folder)
        except OSError as error:
            fault = f"{new_folder(folder)} is written, but cannot be renamed to {folder.name}: {error}"
    together(process_mesh, fault, StateError)


def load(
    path: Path | str,
    compiled: CompiledModule,
    optimizer: Optimizer | None = None,
    *,
    data: Any = None,
    other_bits: bool = False,
) -> int:
    """Load a checkpoint written by `save`, on any number of ranks; return the number of the step.

    A collective call. If there are more ranks than at `save`, the additional ranks take the random state of
    rank 0. With `data`, what was saved as `data` goes on at its position.

    Parameters
    ----------
    other_bits : with `numerics=fxdp.Bitwise(...)`, True: load a checkpoint of such a module even if it was
        written by another processor, torch, number of threads or block, so that training goes on with bits
        that it would not have had there.

    Raises
    ------
    InputError : not a checkpoint, an incomplete one, or one of a different model: all names that are missing,
        extra or of a different shape are listed; data of another order; or other bits, each difference
        listed. Nothing is loaded then.
    RankFailedError : another rank failed or died.
    """
    process_mesh = process_mesh_of(compiled)
    _check_optimizer(optimizer)
    folder = Path(gather_objects(process_mesh, str(find(path_of(path))))[0])
    metadata, fault = read_metadata(folder)
    together(process_mesh, fault, InputError)
    assert metadata is not None
    together(process_mesh, None if other_bits else fingerprint_fault(folder, compiled), InputError)
    state = {**wanted_by(compiled, optimizer, metadata), "step": 0}
    faults = differences(state, metadata)
    if optimizer is not None and not faults:
        faults = _group_faults(process_mesh, folder, state["optimizer"])
    listed = "\n  ".join(faults)
    fault = f"{folder} is of another model or optimizer; nothing was loaded:\n  {listed}" if faults else ""
    together(process_mesh, fault, InputError)
    position = data.state_dict() if data is not None else None
    try:
        together(process_mesh, _data_fault(folder, data), InputError)
        _read(process_mesh, folder, state)
    except BaseException:
        if position is not None:
            data.load_state_dict(position)
        raise
    take(compiled, optimizer, state)
    _set_random_state(process_mesh, folder)
    return int(state["step"])


def process_mesh_of(compiled: Any) -> ProcessMesh:
    """Return the process mesh of a compiled module.

    Raises
    ------
    InputError : the value is not a compiled module.
    """
    if not isinstance(compiled, CompiledModule):
        raise InputError(f"expected what fxdp.compile returned, got {a_kind(compiled)}")
    return compiled._process_mesh


def _check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise InputError(
            f"the optimizer is {a_kind(optimizer)}, expected the torch.optim.Optimizer that steps "
            "on the model's parameters, or None"
        )


def _write(process_mesh: ProcessMesh, folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(), _failures_named(process_mesh):
        _expect_one_rank(process_mesh)
        state_dict_saver.save(state, checkpoint_id=folder, **_among(process_mesh))


def _read(process_mesh: ProcessMesh, folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(), _failures_named(process_mesh):
        _expect_one_rank(process_mesh)
        state_dict_loader.load(state, checkpoint_id=folder, **_among(process_mesh))


@contextlib.contextmanager
def _failures_named(process_mesh: ProcessMesh) -> Iterator[None]:
    """Turn the failure of a rank in torch's own collectives into an error on all ranks that names the rank.

    Torch's errors about files are raised after the block: all ranks get such an error and continue.
    """
    of_files: BaseException | None = None
    with guard(process_mesh):
        try:
            yield
        except (CheckpointException, OSError) as error:
            of_files = error
    if of_files is not None:
        raise of_files


def _among(process_mesh: ProcessMesh) -> dict[str, Any]:
    """Return the arguments that tell `torch.distributed.checkpoint` which ranks take part."""
    if process_mesh.comms is None:
        return {"no_dist": True}
    return {"process_group": process_mesh.comms.world_group}


def _expect_one_rank(process_mesh: ProcessMesh) -> None:
    if process_mesh.comms is None:  # torch warns in a single process even with no_dist
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def together(process_mesh: ProcessMesh, fault: str | None, kind: type[FxdpError]) -> None:
    """Raise the first rank's fault on all ranks; return if no rank has a fault."""
    found = [each for each in gather_objects(process_mesh, fault) if each]
    if found:
        raise everywhere(kind(found[0]))


def _group_faults(process_mesh: ProcessMesh, folder: Path, own: Mapping[str, Any]) -> list[str]:
    """Return a fault if the optimizer's parameter groups differ from the saved groups."""
    saved: dict[str, Any] = {"optimizer": {"param_groups": copy.deepcopy(own["param_groups"])}}
    _read(process_mesh, folder, saved)
    there, here = ([g["params"] for g in o["param_groups"]] for o in (saved["optimizer"], own))
    return [] if there == here else [f"the optimizer's parameter groups are {there}, expected {here}"]


def _data_fault(folder: Path, data: Any) -> str | None:
    """Set the data to the position of a checkpoint; return the reason why it cannot be."""
    if data is None:
        return None
    try:
        data.load_state_dict(torch.load(folder / _DATA, weights_only=True))
    except FileNotFoundError:
        return f"{folder} has no position of data; expected one that was saved with data=; nothing was loaded"
    except Exception as error:
        return f"{folder}: {error}; nothing was loaded"
    return None


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank}.pt"


def _random_state(process_mesh: ProcessMesh) -> dict[str, Any]:
    """Return the state of this rank's generators as values that load with `weights_only=True`."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    if process_mesh.mesh.device_type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(process_mesh: ProcessMesh, folder: Path) -> None:
    own = _random_file(folder, process_mesh.index)
    own = own if own.is_file() else _random_file(folder, 0)
    if not own.is_file():  # written by torch, without random state
        return
    state = torch.load(own, weights_only=True)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if process_mesh.mesh.device_type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
