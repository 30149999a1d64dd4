"""Ops that give a value to Python: of small results every rank has the value, so that nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import aten


def _host_read(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run the op on full values; sends only what is sharded, or a large sum."""
    return op(*[gathered(value, str(op)) for value in args], **kwargs)


HOST_READS: Mapping[Any, Callable[..., Any]] = dict.fromkeys(
    (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default), _host_read
)
"""Ops whose result is a Python number."""
