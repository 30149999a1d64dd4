"""`enum.StrEnum`, which Python 3.10 lacks."""

from __future__ import annotations

import enum
import sys

__all__ = ["StrEnum"]

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:

    class StrEnum(str, enum.Enum):
        """Members that are texts."""

        __str__ = str.__str__

        def __format__(self, specification: str) -> str:
            """Return the text in this format."""
            return format(self.value, specification)
