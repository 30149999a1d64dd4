"""Printing what a command found: for people, or as JSON; of several ranks the first one alone prints."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType

from fxdp.settings import Settings


def prints() -> bool:
    """Whether this process is the one that prints: torchrun starts the same command on all ranks."""
    launch = Settings.from_environment().launch
    return launch is None or launch.rank == 0


def show_json(value: Any) -> None:
    """One JSON document on standard output."""
    if prints():
        sys.stdout.write(json.dumps(value, indent=2) + "\n")


def show(*parts: RenderableType) -> None:
    """Tables and text on standard output; text is not wrapped where it goes to a file."""
    if not prints():
        return
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def columns() -> int:
    """The width of the terminal; 80 where there is none."""
    return Console().width


@contextlib.contextmanager
def working(words: str) -> Iterator[None]:
    """Say what takes its time, on a terminal; gone when it is done."""
    console = Console(stderr=True)
    with console.status(words) if console.is_terminal and prints() else contextlib.nullcontext():
        yield
