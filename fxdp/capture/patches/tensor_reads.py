"""`tensor.data` in the user's code: a detached tensor, and an assignment to it a write in place.

Export sees neither: what `.data` gives has left the trace, and becomes a constant without values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxdp.capture.patches.patch import Patch, calling_frame
from fxdp.capture.sites import is_user_file
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
