"""`fxdp port`: the difference that it prints for small scripts, and its remarks."""

from __future__ import annotations

import io
import runpy
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from fxdp.cli import main
from fxdp.cli.port.port_edits import edited, edits_of
from fxdp.cli.port.port_remarks import remarks_of
from tests.rank_pool import RankPool

_PLAIN = '''\
"""Train."""
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(23, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 5, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
model = model.double().float()
optimizer = torch.optim.SGD(model.parameters(), 0.05)
for epoch in range(2):
    for step, (data, target) in enumerate(loader):
        loss = (model(data) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
'''

_DDP = """\
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Run:
    def __init__(self, net, data, rank):
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, 64 // dist.get_world_size(), sampler=self.sampler)
        self.model = DDP(net.to(rank), device_ids=[rank])
        self.optimizer = SGD(self.model.parameters(), lr=0.1 * dist.get_world_size())

    def epoch(self, world_size, rank):
        for x, y in tqdm(self.loader, disable=rank):
            loss = self.model(x, y) / world_size
            loss.backward()
            dist.all_reduce(loss)
            self.log(loss)
        if rank == 0:
            evaluate(self.model)
"""


def _printed(program: Path) -> str:
    shown = io.StringIO()
    with redirect_stdout(shown):
        runpy.run_path(str(program), run_name="__main__")
    return shown.getvalue()


def test_a_plain_script_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: RankPool) -> None:
    script = tmp_path / "train.py"
    script.write_text(_PLAIN)
    assert main(["port", str(script)]) == 0
    shown = capsys.readouterr().out
    assert (
        f"""\
@@ -4,2 +4,4 @@
 from torch.utils.data import DataLoader, TensorDataset
+import fxdp
+from fxdp.integrations.batch_parts import loader_of_parts
{" "}
@@ -10,5 +12,6 @@
 model = model.double().float()
+model = fxdp.compile(model, rng="single-device")
 optimizer = torch.optim.SGD(model.parameters(), 0.05)
 for epoch in range(2):
-    for step, (data, target) in enumerate(loader):
+    for step, (data, target) in enumerate(fxdp.shard(loader_of_parts(loader))):
         loss = (model(data) - target).square().mean()

Run by: torchrun --nproc-per-node 4 {script}
"""
        in shown
    )
    assert "DistributedDataParallel" not in shown
    assert script.read_text() == _PLAIN
    one = _printed(script)
    script.write_text(edited(_PLAIN, edits_of(_PLAIN)).replace("(model,", '(model, backend="eager",', 1))
    assert ranks.run(2, _printed, script) == [one, one]


def test_a_script_for_ddp_has_remarks() -> None:
    text = edited(_DDP, edits_of(_DDP))
    assert '        self.model = fxdp.compile(net.to(rank), rng="single-device")\n' in text
    assert "        for x, y in tqdm(fxdp.shard(self.loader), disable=rank):\n" in text
    assert text.startswith(_DDP[: _DDP.index("\nclass")] + "import fxdp\n")
    assert [(remark.line, remark.text.partition(":")[0]) for remark in remarks_of(_DDP)] == [
        (7, "BatchNorm sees the global batch"),
        (8, "repeats or drops samples where they do not divide, and then is not one device's data"),
        (15, "losses, metrics and gradients are the global batch's already"),
        (17, "what is computed from global tensors is the global batch's on every rank"),
        (19, "line 20 runs on one rank alone, and waits for the others in its first sum over the batch"),
    ]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("from transformers import Trainer\nTrainer(m, a).train()\n",
         'compile_trainer(Trainer(m, a), rng="single-device").train()'),
        ("import accelerate\na = accelerate.Accelerator()\n",
         'a = compile_accelerator(accelerate.Accelerator(), rng="single-device")'),
        ("import lightning as L\nL.Trainer(strategy='ddp', max_epochs=1)\n",
         "L.Trainer(strategy=FxdpStrategy(rng='single-device'), max_epochs=1)"),
    ],
)  # fmt: skip
def test_trainers_get_their_adapter(source: str, line: str) -> None:
    first, _ = source.splitlines()
    text = edited(source, edits_of(source)).splitlines()
    assert (text[0], text[2:]) == (first, [line])
    assert text[1].startswith("from fxdp.integrations.")


def test_the_model_that_trains_is_compiled() -> None:
    """Made beside other values, moved; what is loaded in its place for evaluation is another one."""
    source = """\
model, loader = Net(), DataLoader(data, 8)
model = model.to(device)
optimizer = SGD(model.parameters(), 0.1)
for x in loader:
    model(x)
model = torch.load("best.pt").eval()
"""
    text = edited(source, edits_of(source))
    assert text.count("fxdp.compile") == 1
    assert '\nmodel = model.to(device)\nmodel = fxdp.compile(model, rng="single-device")\n' in text
    assert "for x in fxdp.shard(loader_of_parts(loader)):\n" in text


def test_an_iterator_of_a_loader_is_sharded_once() -> None:
    source = """\
loader = DataLoader(data, 8)
batches = iter(loader)
for x in iter(loader):
    next(iter(loader))
"""
    lines = edited(source, edits_of(source)).splitlines()[2:]
    parts = "iter(fxdp.shard(loader_of_parts(loader)))"
    assert lines == [
        "loader = DataLoader(data, 8)", f"batches = {parts}", f"for x in {parts}:", f"    next({parts})",
    ]  # fmt: skip


def test_draws_of_a_data_set_are_told() -> None:
    source = """\
class Pairs(Dataset):
    def __getitem__(self, index):
        kind = random.choice(self.kinds)
        return self.data[kind] + 0.1 * torch.randn(3), self.random.draw(index)

crop = transforms.Compose([transforms.RandomCrop(28), transforms.ToTensor()])
loader = DataLoader(Pairs(), 8, sampler=RandomSampler(data))
noise = torch.randn(3)
"""
    found = remarks_of(source)
    assert [remark.line for remark in found] == [3, 4, 6]
    assert all("other numbers than one device's" in remark.text for remark in found)
    source += "for x in loader:\n    pass\n"
    assert edited(source, edits_of(source)).endswith(
        "\nfor x in fxdp.shard(loader_of_parts(loader, all_samples=True)):\n    pass\n"
    )
    assert not remarks_of(source)


def test_what_cannot_be_ported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    assert main(["port", str(script)]) == 2
    script.write_text("x = (")
    assert main(["port", str(script)]) == 2
    shown = capsys.readouterr().err
    assert "train.py: No such file or directory; expected the path of a script" in shown
    assert "train.py is no Python script: '(' was never closed (line 1)" in shown
    script.write_text("x = 1\n")
    assert main(["port", str(script)]) == 0
    assert "no model whose parameters() are read" in capsys.readouterr().out
