"""Adjacent tensors in one memory as one flat tensor, so that one call handles all.

w1 [2, 3]    | 0 1 2 3 4 5 |
b1 [2]       | 6 7 - |             with room for one more, its padding
w2 [1, 3]    | 9 10 11 |
line         0 1 .. 7 - 9 10 11
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import eq, mul, sub

from torch import Tensor


def line_of(tensors: Sequence[Tensor], rooms: Sequence[int]) -> Tensor | None:
    """Return the flat tensor over tensors of one dtype, each with room for `rooms` elements; shares memory.

    Return None if a tensor does not begin where the room of the previous one ends, or if the storage of the
    first one ends earlier: the next one is in a different allocation then.
    """
    # runs for each parameter at each step: one call over all takes a tenth of the time
    first, total = tensors[0], sum(rooms)
    start, size = first.storage_offset(), first.itemsize
    at = [*map(Tensor.data_ptr, tensors)]
    follow = all(map(eq, map(sub, at[1:], at), map(mul, rooms, [size] * (len(at) - 1))))
    if not follow or not all(map(Tensor.is_contiguous, tensors)):
        return None
    if (start + total) * size > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided((total,), (1,), start)
