"""The text of Python's language reference, in batches that are equal on all ranks.

With a global batch of five on two ranks:

    global batch of step 3      row 0  row 1  row 2 | row 3  row 4
    part of                     rank 0              | rank 1
"""

from __future__ import annotations

from functools import cache
from pydoc_data import topics
from typing import NamedTuple

import torch
from torch import Tensor


class TextBatch(NamedTuple):
    """Sequences of bytes, with the next byte for each byte."""

    tokens: Tensor
    targets: Tensor

    def part(self, rank: int, ranks: int) -> TextBatch:
        """Return the rows of one rank; the first ranks have one row more if the rows do not divide."""
        return TextBatch(*(rows.tensor_split(ranks)[rank] for rows in self))


@cache
def text() -> Tensor:
    """Return the help texts of `pydoc_data.topics` as bytes: about 450,000 of English and Python."""
    joined = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return torch.frombuffer(bytearray(joined.encode()), dtype=torch.uint8).long()


def text_batch(step: int, size: int, length: int) -> TextBatch:
    """Return the global batch of a step: `size` passages drawn from the step number alone."""
    starts = torch.randint(len(text()) - length, (size,), generator=torch.Generator().manual_seed(step))
    passages = text()[starts[:, None] + torch.arange(length + 1)]
    return TextBatch(passages[:, :-1].contiguous(), passages[:, 1:].contiguous())
