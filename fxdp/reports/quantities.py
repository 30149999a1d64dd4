"""Bytes and seconds as a person reads them."""

from __future__ import annotations


def format_bytes(count: int) -> str:
    """Bytes with the largest binary unit that keeps a whole number before the point."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that reads best."""
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
