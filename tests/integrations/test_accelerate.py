"""Accelerate on two ranks prints what it prints on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import fxdp
from tests.integrations.frameworks import TinyLM, forget_accelerate, launched, sentences
from tests.rank_pool import RankPool


def _made(compiled: bool, **options: Any) -> Any:
    from accelerate import Accelerator

    from fxdp.integrations.accelerate import compile_accelerator

    accelerator = Accelerator(cpu=True, **options)
    return compile_accelerator(accelerator, backend="eager") if compiled else accelerator


def _loader(split: bool = False) -> DataLoader[Any]:
    share = 4 if split else 4 // dist.get_world_size()
    return DataLoader(sentences(17), batch_size=share, shuffle=True)  # the last batch has one sample


def _epochs(accelerator: Any, parts: Any, count: int) -> list[str]:
    model, optimizer, loader, held_out, scheduler = parts
    shown = []
    for _ in range(count):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                synced = accelerator.sync_gradients
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.2) if synced else 0
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            (rate,) = scheduler.get_last_lr()
            shown.append(f"{float(loss):.10f} {float(norm):.10f} {rate:.10f}")
        model.eval()
        with torch.no_grad():
            rows = [accelerator.gather_for_metrics(model(**batch)["logits"].argmax(-1)) for batch in held_out]
        shown.append(str(torch.cat(rows).sum().item()) + str(tuple(torch.cat(rows).shape)))
    return shown


def _trained(folder: str, compiled: bool, split: bool) -> list[str]:
    from accelerate import DataLoaderConfiguration

    forget_accelerate()
    with launched():
        # an order of samples that does not depend on the number of ranks
        config = DataLoaderConfiguration(split_batches=split, use_seedable_sampler=True)
        accelerator = _made(compiled, gradient_accumulation_steps=2, dataloader_config=config)
        torch.manual_seed(0)
        model = TinyLM().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        parts = accelerator.prepare(model, optimizer, _loader(split), _loader(split), scheduler)
        shown = _epochs(accelerator, parts, 2)
        accelerator.save_state(folder)
        shown += _epochs(accelerator, parts, 1)
        accelerator.load_state(folder)
        shown += _epochs(accelerator, parts, 1)
        assert accelerator.unwrap_model(parts[0]) is model
    forget_accelerate()
    return shown


@pytest.mark.parametrize("split", [False, True])
def test_a_loop_prints_the_numbers_of_one_device(ranks: RankPool, tmp_path: Path, split: bool) -> None:
    (expected,) = ranks.run(1, _trained, str(tmp_path / "one"), False, split)
    assert len(expected) == 24
    for found in ranks.run(2, _trained, str(tmp_path / "two"), True, split):
        assert found == expected


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(sentences(9))


def _half(compiled: bool) -> tuple[str, str]:
    forget_accelerate()
    with launched():
        accelerator = _made(compiled, mixed_precision="bf16")
        model, loader = accelerator.prepare(TinyLM(), DataLoader(sentences(8), 8 // dist.get_world_size()))
        (output,) = [model(**batch) for batch in loader]
        assert output["logits"].dtype is torch.float32
        assert accelerator.prepare(model) is model
    forget_accelerate()
    return f"{output['loss'].item():.3f}", str(output["loss"].dtype)


def test_mixed_precision_is_around_the_model(ranks: RankPool) -> None:
    assert ranks.run(1, _half, False) * 2 == ranks.run(2, _half, True)


def _refused() -> list[str]:
    forget_accelerate()
    said = []
    with launched():
        plain, ours = _made(False), _made(True)
        compiled = fxdp.compile(TinyLM(), backend="eager")
        actions = [
            lambda: plain.prepare(compiled),
            lambda: ours.prepare(DataLoader(_Stream(), 2)),
            lambda: ours.prepare(DataLoader(sentences(4), sampler=_loader().batch_sampler, batch_size=None)),
        ]
        for action in actions:
            try:
                action()
            except fxdp.InputError as error:
                said.append(str(error))
        assert ours.prepare(compiled) is compiled
        loader = ours.prepare(DataLoader(_Stream(), 2, drop_last=True))
        assert [len(batch["input_ids"]) for batch in loader] == [2, 2]
    forget_accelerate()
    return said


def test_what_would_not_be_exact_is_refused(ranks: RankPool) -> None:
    for wrapped, stream, sampler in ranks.run(2, _refused):
        assert "fxdp.integrations.accelerate.compile_accelerator(accelerator)" in wrapped
        assert "expected drop_last=True" in stream
        assert "expected it as batch_sampler=" in sampler
