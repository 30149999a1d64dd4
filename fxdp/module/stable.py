"""Python values as text that is equal on all ranks where the values are meant to be equal."""

from __future__ import annotations

import re
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def stable_text(value: Any) -> str:
    """`repr(value)` without the addresses of objects and with sets in order.

    Objects that show nothing but their class and address are equal to this text if their classes are.
    """
    if isinstance(value, tuple) and type(value) is tuple:
        return f"({', '.join(map(stable_text, value))},)"
    if isinstance(value, frozenset):
        return f"frozenset({sorted(map(stable_text, value))})"
    return _ADDRESS.sub("", repr(value))
