"""Describe this environment for `fxdp doctor`: versions, settings, shortcuts, workarounds, caches."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

import fxdp
from fxdp import __version__, torch_compat
from fxdp.cli.doctor.section import Row, Section
from fxdp.reports.rows import format_bytes
from fxdp.settings import CacheSettings, compiler_asked, inductor_cache_asked, settings_given
from fxdp.torch_compat import releases

_LIBRARIES = ("numpy", "sympy", "networkx", "triton", "transformers", "accelerate", "lightning")
_COMPILER_S = 10.0


def versions() -> Section:
    """Return the versions of fxdp, torch, and the libraries that they build on."""
    return Section("versions", tuple(_versions()))


def _versions() -> Iterator[Row]:
    yield Row("fxdp", __version__)
    known = "proven" if releases.is_proven() else f"not proven (proven: {', '.join(releases.PROVEN)})"
    yield Row("torch", f"{releases.installed()}, {known}")
    yield Row("", f"git {torch.version.git_version[:12]}")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield Row("CUDA", f"{torch.version.cuda or 'none'}, {devices} devices")
    yield Row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Row("C++", _compiler())
    for name in _LIBRARIES:
        try:
            yield Row(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue


def _compiler() -> str:
    """Return the version line of the C++ compiler that Inductor would use."""
    asked = compiler_asked()
    path = shutil.which(asked)
    if path is None:
        return f'no {asked}: install g++, or set CXX; without one backend="eager" is used'
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_COMPILER_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}: {error}"
    return said.stdout.partition("\n")[0] or f"{path}: says nothing of its version"


def settings() -> Section:
    """Return the environment variables that configure fxdp."""
    return Section("settings", tuple(Row(name, value) for name, value in settings_given().items()))


def shortcuts() -> Section:
    """Return the shortcuts that are off, with the reasons."""
    known = torch_compat.shortcuts()
    off = [(one.name, why) for one in known if (why := torch_compat.why_off(one)) is not None]
    count = f"{len(known) - len(off)} of {len(known)} on"
    return Section(f"shortcuts: {count}", tuple(Row(name, f"off: {why}") for name, why in off))


def caches(warned: Iterable[str] = ()) -> Section:
    """Return the folders and sizes of the caches, and the warnings of a folder that can be used."""
    chosen = CacheSettings.from_environment()
    inductor = inductor_cache()
    own = Path(chosen.folder) if chosen.folder else inductor / "fxdp"
    rows = [Row("fxdp", _folder(own, chosen.megabytes))]
    if not own.is_file():  # else the row has said so
        rows += [Row("", text) for text in dict.fromkeys(warned)]
    return Section("caches", (*rows, Row("Inductor", _folder(inductor, None)), _plans_of_global_tensors()))


def _plans_of_global_tensors() -> Row:
    report = fxdp.eager_report()
    most = "at most {:,} and {:,}".format(*report.bounds)
    text = f"{report.plans:,} plans, {report.families:,} for all batch sizes; {most}, in memory"
    return Row("global tensors", text)


def inductor_cache() -> Path:
    """Return the folder in which Inductor keeps compiled code."""
    return Path(inductor_cache_asked() or torch_compat.inductor_folder())


def _folder(path: Path, megabytes: float | None) -> str:
    if megabytes == 0:
        return "off"
    if path.is_file():
        return f"{path}: a file, not a folder: nothing is kept"
    size = format_bytes(sum(_size(file) for file in path.rglob("*"))) if path.is_dir() else "not made yet"
    most = "" if megabytes is None else f" of at most {megabytes:g} MiB"
    writable = "" if os.access(_nearest(path), os.W_OK) else ", cannot be written"
    return f"{path}: {size}{most}{writable}"


def _size(file: Path) -> int:
    try:
        return file.stat().st_size if file.is_file() else 0
    except OSError:  # another process has removed the file
        return 0


def _nearest(path: Path) -> Path:
    """Return the folder itself, or the nearest existing parent."""
    return next((one for one in (path, *path.parents) if one.exists()), Path("/"))
