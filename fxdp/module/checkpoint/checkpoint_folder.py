"""The folder of a checkpoint on disk: written next to the previous checkpoint, then renamed.

    run.new         written by all ranks                       a kill here leaves `run`
    run             -> run.previous      \\  by rank 0          a kill between leaves `run.previous`,
    run.new         -> run               /                     which `find` returns if `run` is missing
    run.previous    removed

A folder under the requested name, or under `.previous`, is therefore complete, at whatever moment a saver was
killed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from fxdp.errors import InputError

_METADATA = ".metadata"  # torch writes it last


def path_of(given: object) -> Path:
    """Return the absolute path given by a user.

    Raises
    ------
    InputError : the value is not a path.
    """
    if not isinstance(given, (str, os.PathLike)) or not str(given) or "\0" in str(given):
        raise InputError(f"the path of a checkpoint is {given!r}, expected text or a Path")
    return Path(given).absolute()


def new_folder(path: Path) -> Path:
    """Return the folder in which a checkpoint is written before the renaming."""
    return path.with_name(path.name + ".new")


def _previous_folder(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def begin(path: Path) -> str | None:
    """Make the new folder; return None, or a description of the reason for a failure."""
    if path.exists() and not (path / _METADATA).is_file() and (not path.is_dir() or any(path.iterdir())):
        return f"{path} is there already and is no checkpoint; expected a path that does not exist"
    try:
        if new_folder(path).exists():  # left by a saver that was killed
            shutil.rmtree(new_folder(path))
        new_folder(path).mkdir(parents=True)
    except OSError as error:
        return f"{path.parent} is not writable ({error}); expected a folder in which files can be made"
    return None


def publish(path: Path) -> None:
    """Rename the new folder to the final name, and remove the previous checkpoint."""
    previous = _previous_folder(path)
    if path.exists():
        if previous.exists():
            shutil.rmtree(previous)
        path.rename(previous)
    new_folder(path).rename(path)
    if previous.exists():
        shutil.rmtree(previous)


def find(path: Path) -> Path:
    """Return the folder to load: the previous one if a saver was killed between two renamings."""
    previous = _previous_folder(path)
    return previous if previous.is_dir() and not path.exists() else path


def read_metadata(folder: Path) -> tuple[Metadata | None, str]:
    """Return the metadata of a folder, or None, and a description of faults, or an empty text."""
    if not (folder / _METADATA).is_file():
        there = "is no checkpoint, or a part of one: it has no" if folder.is_dir() else "does not exist, nor"
        return None, f"{folder} {there} {_METADATA}"
    try:
        found = FileSystemReader(folder).read_metadata()
    except Exception as error:  # unpickling a file that is not metadata may raise any exception
        return None, f"{folder / _METADATA} cannot be read ({type(error).__name__}: {error})"
    cut = _cut_files(folder, found)
    return found, f"{folder} is a part of a checkpoint: {', '.join(cut)} missing or cut off" if cut else ""


def _cut_files(folder: Path, metadata: Metadata) -> list[str]:
    """Return the files that are shorter than their contents require."""
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    sizes = {name: (folder / name).stat().st_size if (folder / name).is_file() else -1 for name in ends}
    return sorted(name for name, end in ends.items() if sizes[name] < end)
