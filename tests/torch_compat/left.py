"""`python -m tests.torch_compat.left`: print what fxdp leaves changed behind of torch and Python, by name.

A rank alone runs a program of Inductor's, and does what the first sharded parameter of several ranks does.
"""

from __future__ import annotations

import gc

import torch
import torch._inductor.lowering
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from fxdp.ranks.hooks import install_hook
from fxdp.torch_compat import act_as_plain, mesh_on_paper, set_data_by, sharded_tensor
from tests.torch_compat.replaced import Owners, owners, replaced


def main() -> None:
    """Look before, and afterwards."""
    before = _all()
    _train()
    install_hook()
    mesh = mesh_on_paper("cpu", [0], {"dp": 1}, 0)
    _shard(mesh)
    import fxdp.dynamo.backend  # noqa: F401

    gc.collect()  # hooks go with the model
    for (owner, name), new in sorted(replaced(before, _all()).items(), key=str):
        if not isinstance(new, (bool, int)):  # torch counts
            print(owner if owner.endswith("[]") else f"{owner}.{name}")


def _train() -> None:
    compiled = fxdp.compile(nn.Linear(4, 4), loss_fn=F.mse_loss, backend="inductor")
    compiled(torch.ones(2, 4), target=torch.ones(2, 4)).backward()


def _shard(mesh: DeviceMesh) -> None:
    act_as_plain(mesh)
    parameter = sharded_tensor(torch.ones(2, 2), torch.ones(2, 2), mesh, [0])
    assert isinstance(parameter, DTensor)
    set_data_by(lambda own, value: None, parameter)


def _all() -> Owners:
    """Tables inside of objects, too."""
    handlers = dict(DTensor._op_dispatcher._custom_op_handlers)
    return owners() | {"DTensor._op_dispatcher._custom_op_handlers[]": handlers}


if __name__ == "__main__":
    main()
