"""What a tensor subclass around another tensor needs of torch."""

from __future__ import annotations

import torch

__all__ = ["without_torch_function"]

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""`with without_torch_function():` calls torch's own functions on tensors of a subclass."""
