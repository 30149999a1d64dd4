"""Print results for people or as JSON; of several ranks, only the first prints."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console, RenderableType

from fxdp.settings import Settings


def prints() -> bool:
    """Return whether this process prints: torchrun starts the same command on all ranks."""
    launch = Settings.from_environment().launch
    return launch is None or launch.rank == 0


def show_json(value: Any) -> None:
    """Print one JSON document to standard output."""
    if prints():
        sys.stdout.write(json.dumps(value, indent=2) + "\n")


def show(*parts: RenderableType) -> None:
    """Print tables and text to standard output; text in a file is not wrapped."""
    if not prints():
        return
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False, emoji=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def columns() -> int:
    """Return the width of the terminal; 80 without a terminal."""
    return Console().width


@contextlib.contextmanager
def working(words: str) -> Iterator[None]:
    """Show a status text on the terminal until the block ends."""
    console = Console(stderr=True)
    with console.status(words) if console.is_terminal and prints() else contextlib.nullcontext():
        yield
