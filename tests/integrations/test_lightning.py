"""Lightning and Fabric on two ranks print what they print on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import fxdp
from tests.integrations.frameworks import TinyLM, adversarial_module, launched, lightning_module, sentences
from tests.rank_pool import RankPool


def _trainer(folder: str, strategy: Any, **options: Any) -> Any:
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, default_root_dir=folder,
        num_sanity_val_steps=0, enable_checkpointing=False, **quiet, **options,
    )  # fmt: skip


def _loader(shuffle: bool = True) -> DataLoader[Any]:
    share = 4 // dist.get_world_size()  # the last batch has one sample
    return DataLoader(sentences(17), batch_size=share, shuffle=shuffle)


def _shows(shown: list[str]) -> Any:
    from lightning.pytorch.callbacks import LambdaCallback

    return LambdaCallback(
        on_train_batch_end=lambda trainer, *_: shown.append(f"{trainer.callback_metrics['loss']:.9f}"),
        on_train_epoch_end=lambda trainer, _: shown.append(str(trainer.callback_metrics)),
    )


def _trained(folder: str, compiled: bool) -> list[str]:
    from fxdp.integrations.lightning import FxdpStrategy

    shown: list[str] = []
    with launched():
        for epochs, resume in ((2, None), (4, f"{folder}/after-2.ckpt")):
            torch.manual_seed(dist.get_rank())  # the first rank's order counts
            strategy = FxdpStrategy(backend="eager") if compiled else "auto"
            how = {"max_epochs": epochs, "accumulate_grad_batches": 2, "gradient_clip_val": 0.2}
            how["limit_val_batches"] = 1.0 if resume is None else 0  # once will do: it compiles a program
            trainer = _trainer(folder, strategy, callbacks=[_shows(shown)], **how)
            torch.manual_seed(dist.get_rank())
            module = lightning_module()
            trainer.fit(module, _loader(), _loader(False), ckpt_path=resume)
            trainer.save_checkpoint(f"{folder}/after-{epochs}.ckpt")
            shown += module.norms
    return shown


def test_trainer_prints_the_numbers_of_one_device(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, _trained, str(tmp_path / "one"), False)
    assert len(expected) > 30
    for found in ranks.run(2, _trained, str(tmp_path / "two"), True):
        assert found == expected


def _by_name(folder: str, strategy: str) -> dict[str, str]:
    """Two networks under manual optimization, by the name that `LightningCLI` gives, too."""
    import fxdp.integrations.lightning  # noqa: F401  (registers the name)

    with launched():
        trainer = _trainer(folder, strategy, max_epochs=2)
        module = adversarial_module()
        samples = torch.randn(18, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        trainer.fit(module, DataLoader(samples, batch_size=4 // dist.get_world_size()))
        shown = {name: f"{value.item():.9f}" for name, value in trainer.callback_metrics.items()}
        return shown | {name: f"{p.sum().item():.9f}" for name, p in module.named_parameters()}


def test_manual_optimization_of_two_networks_by_a_name(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, _by_name, str(tmp_path), "auto")
    assert expected["seen"] == f"{18:.9f}"
    for found in ranks.run(2, _by_name, str(tmp_path), "fxdp_eager"):
        assert found == expected


def _refused(folder: str) -> list[str]:
    from fxdp.integrations.lightning import FxdpStrategy

    said = []
    with launched():
        for kind in ("counts", "steps"):
            trainer = _trainer(folder, FxdpStrategy(backend="eager"), max_steps=3)
            try:
                trainer.fit(lightning_module(kind), _loader())
            except fxdp.FxdpError as error:
                said.append(str(error))
        module = lightning_module()
        module.net = fxdp.compile(module.net, backend="eager")
        try:
            _trainer(folder, "ddp", max_steps=1).fit(module, _loader())
        except fxdp.InputError as error:
            said.append(str(error))
        trainer = _trainer(folder, FxdpStrategy(), max_steps=1)
        trainer.fit(module, _loader())
        said.append(f"{trainer.global_step}")
    return said


def test_what_a_program_does_not_know_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for counts, steps, wrapped, inside in ranks.run(2, _refused, str(tmp_path)):
        assert "reads batch_idx" in counts
        assert "reads self.trainer" in steps
        assert "fxdp.integrations.lightning.FxdpStrategy()" in wrapped
        assert inside == "1"


def _fabric(folder: str, compiled: bool) -> list[str]:
    from lightning.fabric import Fabric

    from fxdp.integrations.lightning import FxdpFabricStrategy

    shown = []
    with launched():
        torch.manual_seed(dist.get_rank())  # the first rank's order counts
        strategy = FxdpFabricStrategy(backend="eager") if compiled else "auto"
        fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        fabric.launch()
        model = TinyLM().double()
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(_loader())
        state = {"model": model, "optimizer": optimizer}
        for epoch in range(4):
            for i, batch in enumerate(loader):
                wait = i % 2 == 0 and i < 4
                with fabric.no_backward_sync(model, enabled=wait):
                    loss = model(**batch)["loss"]
                    fabric.backward(loss)
                shown.append(f"{loss.item():.9f}")
                if not wait:
                    shown.append(f"{fabric.clip_gradients(model, optimizer, max_norm=0.2).item():.9f}")
                    optimizer.step()
                    optimizer.zero_grad()
            if epoch == 1:
                fabric.save(f"{folder}.ckpt", state)
        fabric.load(f"{folder}.ckpt", state)
        shown.append(f"{model(**next(iter(loader)))['loss'].item():.9f}")
    return shown


def test_fabric_prints_the_numbers_of_one_device(ranks: RankPool, tmp_path: Path) -> None:
    (expected,) = ranks.run(1, _fabric, str(tmp_path / "one"), False)
    assert len(expected) == 4 * (5 + 3) + 1
    for found in ranks.run(2, _fabric, str(tmp_path / "two"), True):
        assert found == expected
