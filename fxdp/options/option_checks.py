"""Checks of single options: a predicate, and the accepted values in words."""

from __future__ import annotations

import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

_MOST = 4096
"""Of micro-batches and of stages: a step is written out, a few nodes for each."""

Expected: TypeAlias = "tuple[Callable[[Any], bool], str]"
"""A predicate that an option's value must satisfy, and the accepted values in words."""


def faults_of(given: Mapping[str, Any], expected: Mapping[str, Expected]) -> list[str]:
    """Return one line for each value that is not accepted: got and expected."""
    return [
        f"{name} is {shown(given[name])}, expected {words}"
        for name, (fits, words) in expected.items()
        if name in given and not fits(given[name])
    ]


def is_size(value: Any) -> bool:
    """Return whether the value is a number of MiB that some memory could have."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 2**40


def is_count(value: Any, *, least: int = 1, most: int = _MOST) -> bool:
    """Return whether the value is an integer in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_share(value: Any) -> bool:
    """Return whether the value is a number from 0 to 1."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def are_names(value: Any) -> bool:
    """Return whether the value is a list or tuple of strings."""
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def one_of(*choices: str) -> Expected:
    """Return the check for one of several strings."""
    return lambda value: isinstance(value, str) and value in choices, f"one of {choices}"


SWITCH: Expected = lambda value: isinstance(value, bool), "True or False"
COUNT: Expected = is_count, f"an integer of at least 1 and at most {_MOST:,}"
ANY_COUNT = sys.maxsize


def folder_faults(name: str, value: Any) -> list[str]:
    """Return the fault of a folder, as far as every rank can tell: one rank writes the files."""
    if value is None:
        return []
    if not isinstance(value, (str, Path)) or not str(value) or "\0" in str(value):
        return [f"{name} is {shown(value)}, expected the path of a folder, as text or a Path"]
    folder = Path(value)
    there = next((p for p in (folder, folder.parent) if p.exists()), None)
    if there is None:  # maybe on another host, whose rank writes it
        return []
    if not there.is_dir():
        return [f"{name} is {str(value)!r}, but {there} is no folder"]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"{name} is {str(value)!r}, but {there} is not writable"]
    return []


def shown(value: Any) -> str:
    """Return a value in few words: a number may have thousands of digits."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    return reprlib.repr(value)
