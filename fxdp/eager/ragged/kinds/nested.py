"""Jagged `NestedTensor`: its values along one axis, and where each sample begins.

Torch makes nested tensors of plain ones only, so each rank gets all values: exact, at one device's cost.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxdp.capture.ragged_rows import Rows
from fxdp.eager.ragged.kinds.object_fields import Largest, ObjectFields
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import InputError


def matches(value: Any) -> bool:
    """Return whether a value is a jagged nested tensor."""
    return isinstance(value, Tensor) and value.is_nested and value.layout == torch.jagged


def fields(value: Any) -> ObjectFields:
    """Return values and offsets of a jagged nested tensor.

    Raises
    ------
    InputError : values between the samples that belong to none (`lengths()`).
    """
    if value.lengths() is not None:
        raise InputError(
            "a nested tensor with lengths() has values that belong to no sample; expected one without: "
            "torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)"
        )
    described: list[tuple[str, Any, Rows | Largest | None]] = [
        ("values", value.values(), Rows("values")),
        ("offsets", value.offsets(), Rows("samples", bounds="values")),
    ]
    return ObjectFields(described, lambda given: _nested(*given))


def _nested(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(_full(values), _full(offsets))


def _full(value: Tensor) -> Tensor:
    return value.full() if isinstance(value, GlobalTensor) else value
