"""`Meaning`: what the values of an input say about an axis of a ragged batch."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Meaning(NamedTuple):
    """What the values of an input say: the fields of `fxdp.Rows` that have a program of their own.

    `into`: they are row numbers of `axis`. `within`: they count the rows of each sample of `axis` from 0.
    `lengths`: how many rows of `axis` each row has.
    """

    kind: Literal["into", "within", "lengths"]
    axis: str
