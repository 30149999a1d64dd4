"""The fingerprint in a checkpoint: the machine, torch and the blocks that made the bits of its values."""

from __future__ import annotations

import json
from pathlib import Path

from fxdp.module.compiled import CompiledModule
from fxdp.ranks.rank_fingerprint import changes, fingerprint

_FILE = "fingerprint.json"
_BLOCK = "block of fxdp.Bitwise"


def write_fingerprint(folder: Path, compiled: CompiledModule) -> None:
    """Write the fingerprint of this rank into the folder of a new checkpoint."""
    (folder / _FILE).write_text(json.dumps(_fingerprint(compiled), indent=1))


def fingerprint_fault(folder: Path, compiled: CompiledModule) -> str | None:
    """Return why a module with `numerics=fxdp.Bitwise(...)` would not continue the bits of a checkpoint.

    None if it does, if the module promises no bits, and for a checkpoint of a module that promised none.
    """
    if compiled._options.block is None:
        return None
    try:
        saved = json.loads((folder / _FILE).read_text())
    except FileNotFoundError:  # written by torch
        return None
    except ValueError as error:
        return f"{folder / _FILE} cannot be read ({error}); nothing was loaded"
    found = changes(saved, _fingerprint(compiled)) if _BLOCK in saved else []
    if not found:
        return None
    listed = "\n  ".join(found)
    return (
        f"{folder} was trained with fxdp.Bitwise(...) where results have other bits than here; nothing was "
        f"loaded:\n  {listed}\nexpected the same, or fxdp.load(..., other_bits=True) to go on with other bits"
    )


def _fingerprint(compiled: CompiledModule) -> dict[str, str]:
    options = compiled._options
    found = fingerprint(compiled._process_mesh.mesh.device_type) | {"backend": options.backend}
    if options.block is not None:
        found[_BLOCK] = str(options.block)
    if options.fuses_blocks:
        found["stages of fxdp.Pipeline"] = str(options.pipeline.stages or 1)
    return found
