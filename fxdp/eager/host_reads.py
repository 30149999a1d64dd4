"""Ops that give a value to Python: of small results every rank has the value, so that nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import aten


def _host_read(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the op on full values; sends only what is sharded, or a large sum."""
    return op(*[gathered(value, str(op)) for value in args], **kwargs)


def _pack(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Pack full sequences; recurrent layers read the batch sizes from memory, so these are plain."""
    axis = next(value._spec.axis for value in args if isinstance(value, GlobalTensor))
    data, batch_sizes = op(*[gathered(value, str(op)) for value in args], **kwargs)
    return wrapped(data, axis.ranks.unit), batch_sizes


HOST_READS: Mapping[Any, Callable[..., Any]] = {
    aten._local_scalar_dense.default: _host_read,
    aten.equal.default: _host_read,
    aten.is_nonzero.default: _host_read,
    aten._pack_padded_sequence.default: _pack,
}
"""Ops whose result, or a part of it, is read by Python or by a kernel as numbers."""
