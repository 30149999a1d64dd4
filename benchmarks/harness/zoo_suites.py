"""What suites over models of the catalogue have in common: their arguments, and the line of an error."""

from __future__ import annotations

import argparse
from collections.abc import Iterable


def zoo_arguments(
    description: str | None, ways: Iterable[str], *, models: str, timeout: float
) -> argparse.Namespace:
    """Read the models and ways of a run; `models` describes the default ones."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"names in the catalogue (default: {models})")
    parser.add_argument("--ways", nargs="+", default=list(ways), choices=list(ways))
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds per model and way")
    parser.add_argument("--missing", action="store_true", help="only what has no result yet")
    return parser.parse_args()


def error_line(error: Exception) -> str:
    """Return the last line of an error of ranks that names its class."""
    lines = [line for line in str(error).splitlines() if "Error" in line]
    return (lines or [str(error)])[-1][:300]
