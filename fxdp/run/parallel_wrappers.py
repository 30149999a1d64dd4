"""Wrappers of torch for several ranks, around the model of a script that sees one device.

DistributedDataParallel(model)       calls the model; its gradients are one device's already
FSDP(model), fully_shard(model)      refused with the line
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fxdp.errors import StateError
from fxdp.run.script_lines import script_line
from fxdp.run.trees import map_tensors
from fxdp.torch_compat import Patch, around

_FSDP = "torch.distributed.fsdp"


def wrapper_patches() -> Iterator[Patch]:
    """Yield the replacements of methods of torch's wrappers."""
    for name, method in (
        ("__init__", _init),
        ("forward", _forward),
        ("join", lambda *_, **__: contextlib.nullcontext()),
        ("register_comm_hook", lambda *_: None),
        ("_set_static_graph", lambda *_: None),
        ("__getstate__", lambda _, self: dict(vars(self))),
        ("__setstate__", lambda _, self, state: super(DistributedDataParallel, self).__setstate__(state)),
    ):
        yield Patch(DistributedDataParallel, name, around(method))
    fsdp = sys.modules.get(_FSDP)
    if fsdp is not None:
        yield Patch(fsdp, "fully_shard", around(_refused))
        yield Patch(fsdp.FullyShardedDataParallel, "__init__", around(_refused))


def _init(
    _: Any,
    self: DistributedDataParallel,
    module: nn.Module,
    device_ids: Sequence[Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    super(DistributedDataParallel, self).__init__()
    self.module = module
    self.device_ids = None if device_ids is None else list(device_ids)
    self.require_backward_grad_sync = True


def _forward(_: Callable[..., Any], self: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
    if self.device_ids:
        device = self.device_ids[0]
        inputs, kwargs = map_tensors((inputs, kwargs), lambda tensor: tensor.to(device))
    return self.module(*inputs, **kwargs)


def _refused(*_: Any, **__: Any) -> Any:
    raise StateError(
        f"{script_line()} shards a model by FSDP; expected the plain model, as `fxdp run` shows the script "
        "one device. Leave the line out, or run the script by torchrun, with "
        'fxdp.compile(model, strategy="shard") (docs/sharding.md)'
    )
