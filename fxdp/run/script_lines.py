"""Which code asks: the script's own, or a library's; and at which line."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from types import FrameType

_PATHS = tuple({sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGES = ("/site-packages/", "/dist-packages/")


def script_line() -> str:
    """Return the innermost line of the script's own code, as `train.py:12`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_own(frame):
        frame = frame.f_back
    return "the script" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_asked_by_script(through: tuple[str, ...] = ()) -> bool:
    """Return whether the script's own code asks, directly or by these modules of Python's library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not (name in through or name.startswith("fxdp.")):
            return _is_own(frame)
        frame = frame.f_back
    return False


def _is_own(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return not name.startswith("fxdp.") and is_own_file(frame.f_code.co_filename)


@cache
def is_own_file(file: str) -> bool:
    """Return whether a file is the script, or a module beside it, and of no installed package."""
    installed = any(folder in file for folder in _PACKAGES)  # by another Python or `pip install --user`, too
    return not (installed or file.startswith((*_PATHS, "<frozen")))
