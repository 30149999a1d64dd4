"""The user's lines as reports show them: paths relative to the current folder, or their last two parts."""

from __future__ import annotations

import os
from dataclasses import replace

from fxdp.ir.graph.metadata import Location


def shown(location: Location) -> str:
    """Return a location as `models.py:12 `code` in module`."""
    return str(replace(location, file=short_path(location.file)) if location.file else location)


def short_path(file: str) -> str:
    """Return a file name relative to its package or to the current folder, or else its last two parts."""
    for folder in ("site-packages", "dist-packages"):  # first: an environment may be below the current folder
        _, found, rest = file.partition(f"{folder}{os.sep}")
        if found:
            return rest
    here = os.path.join(os.getcwd(), "")
    if file.startswith(here):
        return file.removeprefix(here)
    return os.sep.join(file.split(os.sep)[-2:])


def place(location: Location) -> str:
    """Return a location as `models.py:12`, cut to at most 60 characters."""
    name = f"{short_path(location.file)}:{location.line}"
    return name if len(name) <= 60 else f"…{name[-59:]}"


def shortened(code: str, room: int) -> str:
    """Cut code to `room` characters; return an empty text if fewer than 12 characters are available."""
    if len(code) <= room:
        return code
    return "" if room < 12 else code[: room - 1] + "…"
