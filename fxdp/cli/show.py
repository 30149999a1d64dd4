"""Printing what a command found: for people, or as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console, RenderableType


def show_json(value: Any) -> None:
    """One JSON document on standard output."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def show(*parts: RenderableType) -> None:
    """Tables and text on standard output; text is not wrapped where it goes to a file."""
    console = Console(soft_wrap=not sys.stdout.isatty(), highlight=False)
    for part in parts:
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)
