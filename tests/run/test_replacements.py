"""What `fxdp run` replaces in a script's process: loaders, also of torchdata, if that is installed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.run.running import on_one_device, on_ranks

_STATEFUL = """
from torch.utils.data import DataLoader
class StatefulDataLoader(DataLoader):
    def __iter__(self):
        self._iterator = self._get_iterator()
        return self._iterator
"""
_SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

class Slow(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, number):
        time.sleep(0.5 * (number == 0))
        return number

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
for x, y in StatefulDataLoader(TensorDataset(torch.randn(7, 3), torch.arange(7)), 4, shuffle=True):
    print(len(x), y.tolist(), f"{x.std():.9f}")
print(sorted(torch.cat([*DataLoader(Slow(), 2, num_workers=2, in_order=False)]).tolist()))
"""


def test_loaders_of_torchdata_and_out_of_order_give_one_devices_batches(tmp_path: Path) -> None:
    package, script = tmp_path / "torchdata", tmp_path / "train.py"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "stateful_dataloader.py").write_text(_STATEFUL)
    script.write_text(_SCRIPT)
    with contextlib.chdir(tmp_path):  # from where fxdp imports, too
        one, ranks = on_one_device(script), on_ranks(2, script)
    assert one.code == 0, one.err
    assert (ranks.code, ranks.out) == (0, one.out), ranks.err
