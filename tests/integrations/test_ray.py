"""Ray Train's workers compute what one device computes, by the recipe of the docs."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import fxdp
from tests.integrations.frameworks import TinyLM, sentences

ROOT = Path(fxdp.__file__).parent.parent


def _made(config: dict[str, Any]) -> tuple[nn.Module, DataLoader[Any], torch.optim.Optimizer]:
    """A model, a loader of which the last batch has one sample, and an optimizer to be clipped."""
    torch.manual_seed(0)
    model = TinyLM().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn = torch.Generator().manual_seed(0)
    return model, DataLoader(sentences(17), 4, shuffle=True, generator=drawn), optimizer  # type: ignore[arg-type]


def _noted(file: Path, loss: Tensor, model: nn.Module) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    with file.open("a") as shown:
        print(f"{loss.item():.9f} {norm.item():.9f}", file=shown)


def _alone(file: Path) -> None:
    model, loader, optimizer = _made({})
    for _ in range(2):
        for batch in loader:
            loss = model(**batch)["loss"]
            loss.backward()
            _noted(file, loss, model)
            optimizer.step()
            optimizer.zero_grad()


def _recipe() -> str:
    """The page's own code, for two epochs, which notes what a user would print."""
    page = (ROOT / "docs" / "trainers.md").read_text()
    (code,) = re.findall(r"<!-- ray -->\n```python\n(.*?)```", page, re.S)
    lines = {
        "fxdp.compile(model)": 'fxdp.compile(model, backend="eager")',
        "    for batch in loader_of_parts(loader):\n": "    for batch in twice(loader_of_parts(loader)):\n",
        "        optimizer.step()\n": "        note(loss, model)\n        optimizer.step()\n",
        "ScalingConfig(num_workers=2)": "ScalingConfig(num_workers=2), run_config=run_config",
    }
    for written, run in lines.items():
        assert written in code
        code = code.replace(written, run)
    return str(code)


def _twice(loader: Any) -> Any:
    for _ in range(2):
        yield from loader


def _wrapped() -> str:
    from ray.train.torch import prepare_model

    try:
        prepare_model(fxdp.compile(TinyLM(), backend="eager"))
    except fxdp.InputError as error:
        return str(error)
    return "wrapped"


def test_workers_print_the_numbers_of_one_device(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'ray[train]'")
    from ray.train import RunConfig

    def meta(loss: Tensor, model: nn.Module) -> None:
        import ray.train

        rank = ray.train.get_context().get_world_rank()
        _noted(tmp_path / f"rank-{rank}", loss, model)
        if not (tmp_path / f"refused-{rank}").exists():
            (tmp_path / f"refused-{rank}").write_text(_wrapped())

    names: dict[str, Any] = {"make": _made, "note": meta, "twice": _twice}
    names["run_config"] = RunConfig(storage_path=str(tmp_path / "runs"))
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Ray's own
            exec(_recipe(), names)
    finally:
        ray.shutdown()
    _alone(tmp_path / "alone")
    expected = (tmp_path / "alone").read_text()
    assert len(expected.splitlines()) == 10
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}").read_text() == expected
        assert "DistributedDataParallel" in (tmp_path / f"refused-{rank}").read_text()
