"""Torch's faults with ops on sharded `DTensor`s, each a tiny program of plain torch.

They need a process group, and this process may have one: they run in one of their own, on one rank of two
whose collectives do nothing, and which says what it saw.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys

__all__: list[str] = []

_PROGRAM = """
import json, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def rows(here, there):
    shape = torch.Size([here + there, 3])
    return DTensor.from_local(
        torch.ones(here, 3), mesh, [Shard(0)], run_check=False, shape=shape, stride=(3, 1))

def raises(call):
    try:
        call()
    except (RuntimeError, NotImplementedError):
        return True
    return False

class Kind(DTensor):
    asked = False

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.asked = True
        return super().__torch_dispatch__(func, types, args, kwargs or {})

selected = rows(2, 2)
selected[0].zero_()
column = rows(2, 2)
plain = rows(2, 2)
Kind.__new__(Kind, plain._local_tensor, plain._spec, requires_grad=False).zero_()
print(json.dumps({
    "numbers": abs(rows(2, 2).norm().item() - 6 ** 0.5) < 1e-6,
    "means": torch.nn.functional.mse_loss(rows(3, 2), rows(3, 2) * 2).placements[0].is_partial("avg"),
    "views": bool(selected._local_tensor[0].sum() == 3),
    "no_rows": raises(rows(0, 1).max),
    "fills": raises(lambda: column.__setitem__((slice(None), 0), 0.0)),
    "kinds": not Kind.asked,
}))
"""


@functools.cache
def _seen() -> dict[str, bool]:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the programs of DTensor's faults fail: {ran.stderr.strip()[-1000:]}")
    found: dict[str, bool] = json.loads(ran.stdout.splitlines()[-1])
    return found


def numbers() -> bool:
    """A number of a sharded tensor: this rank's part of it."""
    return _seen()["numbers"]


def means() -> bool:
    """A mean of a loss over uneven rows: the mean of the ranks' means."""
    return _seen()["means"]


def views() -> bool:
    """Rows that are selected: written into, they are a copy."""
    return _seen()["views"]


def no_rows() -> bool:
    """The maximum of a tensor of which this rank has no rows."""
    return _seen()["no_rows"]


def fills() -> bool:
    """A column that is set to a number."""
    return _seen()["fills"]


def kinds() -> bool:
    """What a subclass does with its own ops."""
    return _seen()["kinds"]
