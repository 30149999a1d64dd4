"""`fxdp.save` and `fxdp.load`: model, optimizer, random state and step, safe from a kill at any moment."""

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
from fxdp.module.compiled import CompiledModule
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.failure import everywhere, guard
from fxdp.ranks.process_mesh import ProcessMesh


def save(
    path: Path | str, compiled: CompiledModule, optimizer: Optimizer | None = None, *, step: int = 0
) -> None:
    """Save a compiled module, its optimizer, each rank's random state and the number of the step.

    All ranks call it together with one path, which all of them see. A checkpoint that is there stays until
    the new one is complete: whenever this is killed, `load` finds the one or the other. It can be loaded on
    another number of ranks, with another mesh and strategy, and by `torch.distributed.checkpoint.load`.

    Parameters
    ----------
    path : the folder to be, in the place of an older checkpoint or new.
    compiled : what `fxdp.compile` returned.
    optimizer : the one that steps on its parameters.
    step : how many steps were taken; `load` returns it.

    Raises
    ------
    InputError : a path that is not writable, or at which there is something else.
    StateError : the checkpoint could not be written; the one before is as it was.
    RankFailedError : another rank failed or died.
    """
    process_mesh, folder = process_mesh_of(compiled), path_of(path)
    _check_optimizer(optimizer)
    together(process_mesh, begin(folder) if process_mesh.index == 0 else None, InputError)
    state = {**state_of(compiled, optimizer), "step": step}
    try:
        torch.save(_random_state(process_mesh), _random_file(new_folder(folder), process_mesh.index))
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


def load(path: Path | str, compiled: CompiledModule, optimizer: Optimizer | None = None) -> int:
    """Load what `save` has saved, on as many ranks as there are now; returns the number of the step.

    All ranks call it together. Ranks beyond those that saved take the random state of rank 0.

    Raises
    ------
    InputError : no checkpoint, a part of one, or one of another model: all names that are missing, extra or
        of another shape are listed, and nothing is loaded.
    RankFailedError : another rank failed or died.
    """
    process_mesh = process_mesh_of(compiled)
    _check_optimizer(optimizer)
    folder = Path(gather_objects(process_mesh, str(find(path_of(path))))[0])
    metadata, fault = read_metadata(folder)
    together(process_mesh, fault, InputError)
    assert metadata is not None
    state = {**wanted_by(compiled, optimizer, metadata), "step": 0}
    faults = differences(state, metadata)
    if optimizer is not None and not faults:
        faults = _group_faults(process_mesh, folder, state["optimizer"])
    listed = "\n  ".join(faults)
    fault = f"{folder} is of another model or optimizer; nothing was loaded:\n  {listed}" if faults else ""
    together(process_mesh, fault, InputError)
    _read(process_mesh, folder, state)
    take(compiled, optimizer, state)
    _set_random_state(process_mesh, folder)
    return int(state["step"])


def process_mesh_of(compiled: Any) -> ProcessMesh:
    """The ranks of a compiled module.

    Raises
    ------
    InputError : it is something else.
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
    """Around torch's own collectives: a rank that fails in them is an error on all, which names it.

    What torch says of files is raised after that: of it all ranks hear, and go on.
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
    """Who takes part, as `torch.distributed.checkpoint` wants it."""
    if process_mesh.comms is None:
        return {"no_dist": True}
    return {"process_group": process_mesh.comms.world_group}


def _expect_one_rank(process_mesh: ProcessMesh) -> None:
    if process_mesh.comms is None:  # torch warns of one process alone even where it is told so
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)


def together(process_mesh: ProcessMesh, fault: str | None, kind: type[FxdpError]) -> None:
    """Go on where no rank has a fault, else raise the first one on all."""
    found = [each for each in gather_objects(process_mesh, fault) if each]
    if found:
        raise everywhere(kind(found[0]))


def _group_faults(process_mesh: ProcessMesh, folder: Path, own: Mapping[str, Any]) -> list[str]:
    """Whether an optimizer has its parameters in the groups in which they were saved."""
    saved: dict[str, Any] = {"optimizer": {"param_groups": copy.deepcopy(own["param_groups"])}}
    _read(process_mesh, folder, saved)
    there, here = ([g["params"] for g in o["param_groups"]] for o in (saved["optimizer"], own))
    return [] if there == here else [f"the optimizer's parameter groups are {there}, expected {here}"]


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_{rank}.pt"


def _random_state(process_mesh: ProcessMesh) -> dict[str, Any]:
    """Where this rank's generators stand, as values that need no trust to be read."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    if process_mesh.mesh.device_type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(process_mesh: ProcessMesh, folder: Path) -> None:
    own = _random_file(folder, process_mesh.index)
    own = own if own.is_file() else _random_file(folder, 0)
    if not own.is_file():  # saved by torch alone
        return
    state = torch.load(own, weights_only=True)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if process_mesh.mesh.device_type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
