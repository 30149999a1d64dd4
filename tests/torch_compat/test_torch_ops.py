"""An op that torch has no more costs what it is for, and no import."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fxdp
from fxdp.errors import FxdpError
from fxdp.rules.registry import Registry
from fxdp.torch_compat import GoneOp, Ops, aten, prims, there
from tests.limits import HANG_S

FXDP = Path(fxdp.__file__).parent


def test_what_torch_has_is_torch_s_own_and_is_found_once() -> None:
    assert aten.mm.default is torch.ops.aten.mm.default
    assert prims.convert_element_type.default is torch.ops.prims.convert_element_type.default
    assert aten.mm in {torch.ops.aten.mm}
    assert torch.ops.aten.mm in {aten.mm}
    assert aten.mm != torch.ops.aten.bmm
    assert "mm" in vars(aten)
    assert "default" in vars(aten.mm)
    assert aten.mm(torch.ones(2, 2), torch.ones(2, 2)).tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.parametrize("gone", [aten.no_such_op, aten.no_such_op.default, aten.mm.no_such_overload])
def test_what_it_has_not_is_inert(gone: GoneOp) -> None:
    assert isinstance(gone, GoneOp)
    assert gone is not gone.default
    assert gone not in {torch.ops.aten.mm.default, aten.mm, aten.another}
    assert {gone: 1}[gone] == 1
    assert there((gone, aten.mm.default)) == (aten.mm.default,)
    with pytest.raises(FxdpError, match=r"has no op aten\.(no_such_op|mm\.no_such)"):
        gone(torch.ones(2))


def test_a_rule_is_kept_for_what_there_is() -> None:
    rules = Registry()
    rules.add(lambda op: (), "test", aten.no_such_op, aten.no_such_op.default, aten.mm.default)
    assert rules.targets() == (torch.ops.aten.mm.default,)
    rules.remove(aten.no_such_op.default, aten.mm.default)
    assert rules.targets() == ()


def test_torch_s_ops_are_named_through_here_alone() -> None:
    found = [
        f"{path.relative_to(FXDP)}:{number}"
        for path in FXDP.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"torch\.ops\.(aten|prims)\b(?!\.reshape\.default\(%|\.random\.from`|`,)", line)
    ]
    assert found == []


LOST = """
import importlib, pkgutil, sys
from fxdp.torch_compat import torch_ops
lost = set(sys.argv[1].split(","))
plain = torch_ops.Ops.__getattr__
def find(self, name):
    if not name.startswith("__") and ("*" in lost or f"{self._space}.{name}" in lost):
        return torch_ops.GoneOp(f"{self._space}.{name}")
    return plain(self, name)
vars(torch_ops.aten).pop("cholesky", None)
torch_ops.Ops.__getattr__ = find
for ops in (torch_ops.aten, torch_ops.prims):
    for name in set(vars(ops)) - {"_space"}:
        del vars(ops)[name]
import fxdp
if "*" in lost:
    for module in pkgutil.walk_packages(fxdp.__path__, "fxdp."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
else:
    import torch
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    assert fxdp.verify(model, (torch.randn(6, 4),)).ok
print("done")
"""


SOME = "aten.cholesky_inverse,aten.gelu,aten.geqrf,aten.native_group_norm,prims.convert_element_type"


@pytest.mark.parametrize("lost", [SOME, "*"])
def test_ops_that_are_gone_cost_what_they_are_for(lost: str) -> None:
    """Some that a model does not need, which then is exact; all of them: each module is imported without."""
    ran = subprocess.run(
        [sys.executable, "-c", LOST, lost], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert ran.stdout.endswith("done\n"), ran.stderr[-2000:]
    assert isinstance(Ops("aten").mm.default, torch._ops.OpOverload)
