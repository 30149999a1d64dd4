"""What the user's code reads of a tensor beside its values: its `data`, and how it lies in memory.

    y.data                              a detached tensor, and an assignment to it a write in place
    x.as_strided((n, 4), (1, 5))        strides, offsets, and views that are spelled by them
    if not x.is_contiguous(): ...

Export does not see `.data`: what that gives has left the trace, and becomes a constant without values. And a
trace answers for contiguous inputs, which the caller's need not be (`refusals/input_layouts.py`). What is
read of parameters and buffers is the same at each call, and does not count.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.captured import LayoutRead
from fxdp.capture.patches.patch import Patch, calling_frame
from fxdp.capture.sites import is_user_file, site_of_frame
from fxdp.errors import CaptureError


def _traced_data(plain: Any) -> property:
    """`.data` for the user's code; torch's own, which reads it to leave the trace, has it as it is."""

    def read(self: Tensor) -> Tensor:
        if is_user_file(calling_frame().f_code.co_filename):
            return self.detach()
        return plain.__get__(self)  # type: ignore[no-any-return]

    def write(self: Tensor, value: Tensor) -> None:
        if not is_user_file(calling_frame().f_code.co_filename):
            plain.__set__(self, value)
            return
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise CaptureError(
                f"the model assigns {value.dtype}{list(value.shape)} to the data of {self.dtype}"
                f"{list(self.shape)}. Keep shape and dtype, so that it can be written in place"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    return property(read, write)


DATA = Patch(Tensor, "data", _traced_data)


def layout_reads(found: list[LayoutRead], module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Patch, ...]:
    """While the user's code is exported, note what it reads; of views only those of `inputs` themselves."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    given = {id(tensor) for tensor in inputs}

    def derived(tensor: Tensor, _: Any) -> bool:
        return id(tensor) not in held

    def regrouped(tensor: Tensor, result: Tensor) -> bool:
        # a view that keeps all dims (`ids.view(-1, length)`) is possible of any strides; texts add no guards
        return id(tensor) in given and str(result.shape) != str(tensor.shape)

    def noting(
        how: str, offset: Callable[..., bool], counts: Callable[[Tensor, Any], bool]
    ) -> Callable[[Any], Any]:
        def make(plain: Callable[..., Any]) -> Callable[..., Any]:
            def read(*args: Any, **kwargs: Any) -> Any:
                result = plain(*args, **kwargs)
                frame = calling_frame()
                tensor = args[0] if args else kwargs["input"]
                if counts(tensor, result) and is_user_file(frame.f_code.co_filename):
                    found.append(LayoutRead(how, site_of_frame(frame), offset(args[1:], kwargs)))
                return result

            return read

        return make

    view = Patch(Tensor, "view", noting("view", _never, regrouped))
    return (*(Patch(owner, name, noting(name, offset, derived)) for owner, name, offset in _READERS), view)


def _never(args: Any, kwargs: Any) -> bool:
    return False


def _always(args: Any, kwargs: Any) -> bool:
    return True


def _explicit(args: Any, kwargs: Any) -> bool:
    """A view by strides says itself where in the storage it begins, not only where its operand does."""
    return len(args) > 2 or "storage_offset" in kwargs


def _explicit_target(args: Any, kwargs: Any) -> bool:
    return _explicit(args[1:], kwargs)


_READERS: tuple[tuple[Any, str, Callable[..., bool]], ...] = (
    (Tensor, "stride", _never),
    (Tensor, "storage_offset", _always),
    (Tensor, "is_contiguous", _never),
    (Tensor, "as_strided", _explicit),
    (Tensor, "as_strided_", _explicit),
    (Tensor, "as_strided_scatter", _explicit_target),
    (torch, "as_strided", _explicit),
    (torch, "as_strided_copy", _explicit),
    (torch, "as_strided_scatter", _explicit_target),
)
"""By whom, under which name, and whether the answer depends on where in its storage the tensor begins."""
