"""Faults of torch in ops on sharded `DTensor`s, each shown by a tiny program of plain torch.

The programs need a process group, and this process may already have one. So they run in a separate process,
as one rank of two whose collectives do nothing, which prints the results.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys

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
    """Return whether `item()` of a sharded tensor returns the local part of a reduction."""
    return _seen()["numbers"]


def means() -> bool:
    """Return whether a mean loss over uneven rows is the mean of the ranks' means."""
    return _seen()["means"]


def views() -> bool:
    """Return whether a write into selected rows goes to a copy."""
    return _seen()["views"]


def no_rows() -> bool:
    """Return whether `max` raises on a rank without rows."""
    return _seen()["no_rows"]


def fills() -> bool:
    """Return whether assigning a number to a column raises."""
    return _seen()["fills"]


def kinds() -> bool:
    """Return whether torch bypasses `__torch_dispatch__` of a subclass."""
    return _seen()["kinds"]
