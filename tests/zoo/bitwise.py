"""A training of a model of the catalogue with `fxdp.Bitwise`, as hashes of all its numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import fxdp
from tests.captures import KNOWN, captured_once
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.public import WithLoss, inputs_of, own_inputs

STEPS, BLOCK = 20, 2


def curve(name: str, parts: tuple[int, ...], options: dict[str, Any], steps: range, folder: str) -> list[str]:
    """Return a digest of each step's numbers, and one of parameters and optimizer, on this rank of a group.

    Steps that do not begin at 0 go on from the checkpoint in the folder; those that end early leave one.
    """
    entry, rank = CATALOGUE[name], dist.get_rank()
    torch.manual_seed(0)
    model = WithLoss(entry.build()).train()
    found = []
    for other in KNOWN.keys() - {name}:
        del KNOWN[other]  # captures of another model
    with captured_once(KNOWN.setdefault(name, {})):
        compiled = fxdp.compile(
            model, numerics=fxdp.Bitwise(block=BLOCK), backend="eager", batch_dims=entry.batch_dims, **options
        )
        optimizer = torch.optim.AdamW(compiled.parameters(), 1e-3)
        dtype = next(compiled.parameters()).dtype
        if steps.start:
            assert fxdp.load(folder, compiled, optimizer) == steps.start
        for step in steps:
            own = own_inputs(compiled, _of_dtype(inputs_of(entry, sum(parts), seed=step), dtype), parts, rank)
            torch.manual_seed(step)
            loss = compiled(**own)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            gradients = (p.grad for p in compiled.parameters() if p.grad is not None)
            found.append(_digest([loss, norm, *gradients]))
            optimizer.step()
            optimizer.zero_grad()
        if steps.stop < STEPS:
            fxdp.save(folder, compiled, optimizer, step=steps.stop)
            return found
        return [*found, _digest([*compiled.parameters(), *compiled.buffers(), *_states(optimizer)])]


def _of_dtype(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return inputs whose floating-point numbers have the model's dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs)  # type: ignore[no-any-return]


def _states(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            yield from (state[key] for key in sorted(state))


def _digest(values: list[Tensor]) -> str:
    found = hashlib.sha256()
    for value in values:
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found.update(full.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
