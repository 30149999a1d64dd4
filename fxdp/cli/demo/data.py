"""The text of Python's language reference, in batches that are equal on all ranks.

With a global batch of five on two ranks:

    global batch of step 3      row 0  row 1  row 2 | row 3  row 4
    part of                     rank 0              | rank 1
"""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data import topics

import torch

VOCABULARY = 256  # bytes


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Sequences of bytes, with the next byte for each byte."""

    tokens: torch.Tensor
    targets: torch.Tensor

    def to(self, device: torch.device) -> TextBatch:
        """Return the batch on `device`."""
        return TextBatch(self.tokens.to(device), self.targets.to(device))

    def part(self, rank: int, ranks: int) -> TextBatch:
        """Return the rows of one rank."""
        rows = share(len(self.tokens), rank, ranks)
        return TextBatch(self.tokens[rows], self.targets[rows])


@dataclass(frozen=True, slots=True)
class Corpus:
    """A text as one long row of byte values."""

    text: torch.Tensor

    @classmethod
    def from_standard_library(cls) -> Corpus:
        """Return the help texts of `pydoc_data.topics`: about 450,000 bytes of English and Python."""
        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        return cls(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long())

    def batch(self, step: int, size: int, length: int) -> TextBatch:
        """Return the global batch of a step: `size` passages drawn from the step number alone."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.text) - length, (size,), generator=generator)
        passages = self.text[starts[:, None] + torch.arange(length + 1)]
        return TextBatch(passages[:, :-1].contiguous(), passages[:, 1:].contiguous())


def share(rows: int, rank: int, ranks: int) -> slice:
    """Return the contiguous rows of one rank; the first ranks have one row more if the rows do not divide."""
    full, more = divmod(rows, ranks)
    start = rank * full + min(rank, more)
    return slice(start, start + full + (rank < more))
