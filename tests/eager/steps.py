"""Training steps on global losses: each optimizer, schedulers, clipping, scaling, averages, autocast."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

from tests.eager.programs import Batch, Program, data, net

STEPS = 3
_OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "LBFGS": {"lr": 0.5, "max_iter": 4, "line_search_fn": "strong_wolfe"},
}


def _optimizers() -> dict[str, Any]:
    named = vars(torch.optim).items()
    found = {n: o for n, o in named if inspect.isclass(o) and issubclass(o, torch.optim.Optimizer)}
    return {n: o for n, o in found.items() if n not in ("Optimizer", "SparseAdam")}


def _model(name: str) -> nn.Module:
    model = net(hidden=8)
    if name == "Muon":  # takes matrices only
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
    return model


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def _optimized(name: str, make: Any, batch: Batch) -> dict[str, Any]:
    model = _model(name)
    optimizer = make([p for p in model.parameters() if p.requires_grad], **_OPTIONS.get(name, {}))
    losses = []
    for seed in range(STEPS):
        x, y = batch(*data(seed))

        def closure(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure)))
    return {"losses": torch.tensor(losses), **_state(model)}


def _trained(step: Callable[..., Any], batch: Batch) -> dict[str, Any]:
    model = net(hidden=8, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    found: dict[str, Any] = {}
    rest: dict[str, Any] = {}
    for seed in range(STEPS):
        x, y = batch(*data(seed))
        optimizer.zero_grad()
        shown = step(model, optimizer, x, y, rest)
        found |= {f"{seed} {name}": value for name, value in (shown or {}).items()}
    averaged = {f"average {n}": v for n, v in rest["average"].items()} if "average" in rest else {}
    return found | _state(model) | averaged


def _clipped(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> dict[str, Any]:
    F.cross_entropy(model(x), y).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return {"norm": norm}


def _clipped_by_value(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> None:
    F.cross_entropy(model(x), y).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.05)
    optimizer.step()


def _scaled(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> dict[str, Any]:
    scaler = rest.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1))
    loss = F.cross_entropy(model(x), y)
    factor = torch.inf if len(rest) == 2 else 1.0  # the second step overflows, and is left out
    rest[f"step {len(rest)}"] = True
    scaler.scale(loss * factor).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    return {"scale": scaler.get_scale()}


def _averaged(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> None:
    average = rest.setdefault(
        "swa",
        swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True),
    )
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    average.update_parameters(model)
    rest["average"] = _state(average)


def _averaged_batch_norm(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> None:
    average = rest.setdefault("swa", swa_utils.AveragedModel(model))
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    average.update_parameters(model)
    swa_utils.update_bn([x], average)
    rest["average"] = _state(average)


def _autocast(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> dict[str, Any]:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
        loss = F.cross_entropy(out, y)
    loss.backward()
    return {"type": str(out.dtype), "loss type": str(loss.dtype)}


def _accumulated(model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> None:
    for part in range(2):
        (F.cross_entropy(model(x[part * 4 : part * 4 + 4]), y[part * 4 : part * 4 + 4]) / 2).backward()
    optimizer.step()


def _scheduled(make: Callable[[Any], Any], model: Any, optimizer: Any, x: Any, y: Any, rest: Any) -> Any:
    scheduler = rest.setdefault("scheduler", make(optimizer))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    scheduler.step(loss.detach()) if plateau else scheduler.step()
    return {"rate": optimizer.param_groups[0]["lr"]}


_lr = torch.optim.lr_scheduler
_SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: _lr.StepLR(o, 1, 0.5),
    "CosineAnnealingLR": lambda o: _lr.CosineAnnealingLR(o, STEPS),
    "OneCycleLR": lambda o: _lr.OneCycleLR(o, 0.2, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: _lr.ReduceLROnPlateau(o, patience=0, threshold=0.2),
    "LinearLR": lambda o: _lr.LinearLR(o, 0.1, total_iters=STEPS),
}
_STEPS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": _clipped, "clip_grad_value_": _clipped_by_value, "GradScaler": _scaled,
    "moving average of weights": _averaged, "averaged weights, update_bn": _averaged_batch_norm,
    "autocast": _autocast, "accumulation over slices": _accumulated,
    **{name: partial(_scheduled, make) for name, make in _SCHEDULERS.items()},
}  # fmt: skip
ROUNDED = {"autocast": 2e-2}
"""Programs that compute in bfloat16 themselves, with the difference that its rounding may make."""


def step_programs() -> dict[str, Program]:
    """A program for each optimizer, scheduler, and thing that stands around a step."""
    optimizers = {name: partial(_optimized, name, make) for name, make in _optimizers().items()}
    return optimizers | {name: partial(_trained, step) for name, step in _STEPS.items()}
