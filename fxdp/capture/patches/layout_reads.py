"""What the user's code reads of how tensors lie in memory: strides, offsets, views that are spelled by them.

    rows = x.as_strided((n, 4), (1, 5))         if not x.is_contiguous(): ...

A trace answers for inputs in the order of their dims, which the caller's need not be
(`refusals/input_layouts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.captured import LayoutRead
from fxdp.capture.patches.patch import Patch, calling_frame
from fxdp.capture.sites import is_user_file, site_of_frame


def layout_reads(found: list[LayoutRead], inputs: Sequence[Tensor]) -> tuple[Patch, ...]:
    """While the user's code is exported, note what it reads; of views only those of `inputs` themselves."""

    def noting(how: str, told: Callable[..., str], among: Sequence[Tensor] | None) -> Callable[[Any], Any]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
                result = plain(self, *args, **kwargs)
                frame = calling_frame()
                wanted = among is None or any(self is tensor for tensor in among)
                if wanted and is_user_file(frame.f_code.co_filename):
                    answer = told(self, result, args, kwargs)
                    found.append(LayoutRead(how, answer, site_of_frame(frame), "from" in answer))
                return result

            return read

        return make

    view = Patch(Tensor, "view", noting("view", lambda *_: "", inputs))
    return (*(Patch(owner, name, noting(name, told, None)) for owner, name, told in _READERS), view)


def _told(self: Tensor, result: Any, args: Any, kwargs: Any) -> str:
    return str(result)


def _start(self: Tensor, result: Any, args: Any, kwargs: Any) -> str:
    return f"from {result}"


def _strides(self: Tensor, result: Any, args: Any, kwargs: Any) -> str:
    """The strides that were asked for, but of dims of size 1, which may have any."""
    dims = [*args, *kwargs.values()] or range(self.dim())
    return str([None if self.shape[dim] == 1 else self.stride(dim) for dim in dims])


def _operand(self: Tensor, result: Any, args: Any, kwargs: Any) -> str:
    """How the operand of a view by strides lies; where it starts, if the view says where in the storage."""
    explicit = len(args) > 2 or "storage_offset" in kwargs
    start = f" from {self.storage_offset()}" if explicit else ""
    return _strides(self, result, (), {}) + start


def _target(self: Tensor, result: Any, args: Any, kwargs: Any) -> str:
    return _operand(self, result, args[1:], {})


_READERS: tuple[tuple[Any, str, Callable[..., str]], ...] = (
    (Tensor, "stride", _strides),
    (Tensor, "storage_offset", _start),
    (Tensor, "is_contiguous", _told),
    (Tensor, "as_strided", _operand),
    (Tensor, "as_strided_", _operand),
    (Tensor, "as_strided_scatter", _target),
    (torch, "as_strided", _operand),
    (torch, "as_strided_copy", _operand),
    (torch, "as_strided_scatter", _target),
)
"""By whom, under which name, and what the answer depends on."""
