"""`tensor.data` in the user's code: a detached tensor, and an assignment to it a write in place.

Export sees neither: what `.data` gives has left the trace, and becomes a constant without values.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from fxdp.capture.sites import is_user_file
from fxdp.errors import CaptureError


@contextlib.contextmanager
def traced_data() -> Iterator[None]:
    """While the user's code is exported; torch's own code has `.data` as it is."""
    plain = Tensor.data

    def read(self: Tensor) -> Tensor:
        if is_user_file(sys._getframe(1).f_code.co_filename):
            return self.detach()
        return plain.__get__(self)  # type: ignore[attr-defined,no-any-return]

    def write(self: Tensor, value: Tensor) -> None:
        if not is_user_file(sys._getframe(1).f_code.co_filename):
            plain.__set__(self, value)  # type: ignore[attr-defined]
            return
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise CaptureError(
                f"the model assigns {value.dtype}{list(value.shape)} to the data of {self.dtype}"
                f"{list(self.shape)}. Keep shape and dtype, so that it can be written in place"
            )
        with torch.no_grad():
            self.detach().copy_(value)

    Tensor.data = property(read, write)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data  # the one that it inherits
