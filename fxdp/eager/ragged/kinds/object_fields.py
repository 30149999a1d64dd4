"""What a kind of structure says of its values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fxdp.capture.ragged_rows import Rows


@dataclass(frozen=True, slots=True)
class Largest:
    """In the place of `Rows`: an integer whose global value is the largest of all ranks'."""


@dataclass(frozen=True, slots=True)
class ObjectFields:
    """The values of an object, and how to make such an object of other values.

    Attributes
    ----------
    values : name, value and description of each; the names of axes are those of this object alone.
    make : returns an object with other values in the same order.
    """

    values: list[tuple[str, Any, Rows | Largest | None]]
    make: Callable[[list[Any]], Any]
