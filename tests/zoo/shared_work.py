"""Ranks of one machine that compile a model together, in half the time of each by itself.

What a rank has compiled the others find on the disk, as a program's second start does; the programs, the
kernels and what they compute are the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fxdp.compiler import emit
from fxdp.lowering.forward_backward_pair import ForwardBackward
from fxdp.module.programs import Programs
from fxdp.startup.building.cold_start import ColdStart
from fxdp.torch_compat import begin_autograd
from tests.capture.zoo import keep_float64
from tests.quick_kernels import know_inductor
from tests.rank_host import know_capture
from tests.zoo.catalogue import CATALOGUE
from tests.zoo.entry import Entry
from tests.zoo.measure import default_float64
from tests.zoo.public import SPLITS, WithLoss, inputs_of, public_error


@contextlib.contextmanager
def lowered_in_turn(folder: Path) -> Iterator[None]:
    """Inside, ranks of this folder lower one after the other, not half by half at once."""
    own = emit.lower_inductor

    def alone(*args: Any, **options: Any) -> ForwardBackward:
        with (folder / "lowering").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who holds it waits for nobody; it ends with its process
            return own(*args, **options)

    with (
        mock.patch.object(emit, "lower_inductor", alone),
        mock.patch("fxdp.compiler.lowered_parts.start_of", side_effect=lambda *_: ColdStart()),
    ):
        yield


@contextlib.contextmanager
def of_any_size() -> Iterator[None]:
    """Inside, the first batch is served by the program of any size that usually comes with the second."""
    own = Programs._serve

    def generic(self: Programs, *args: Any, **_: Any) -> Any:
        return own(self, *args, generic=True)

    with mock.patch.object(Programs, "_serve", generic):
        yield


def know_what_models_need() -> None:
    """Where ranks are forked from: imports, Inductor with kernels of -O0, the first capture."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begin_autograd()  # before Inductor's fake tensors
        know_inductor()
        know_capture()


def catalogued_error(name: str, folder: str, *, any_size: bool, wide: int) -> float | None:
    """`shared_error` of a model of the catalogue."""
    return shared_error(CATALOGUE[name], folder, any_size=any_size, wide=wide)


def shared_error(entry: Entry, folder: str, *, any_size: bool, wide: int) -> float | None:
    """`public_error` with Inductor; None for a model that does not run in float64 by itself.

    `any_size`: of the program of any size alone; `wide`: 1 if what the model casts to float32 stays float64,
    2 if integers that it makes float32 are float64, too.
    """
    torch._dynamo.config.fake_tensor_cache_enabled = True  # large models: it saves a fifth
    with lowered_in_turn(Path(folder)), warnings.catch_warnings(), contextlib.ExitStack() as chosen:
        warnings.simplefilter("ignore")  # of the models' own code, in eager
        if any_size:
            chosen.enter_context(of_any_size())
        if wide:
            chosen.enter_context(default_float64())
            chosen.enter_context(keep_float64(integers=wide > 1 or _is_nan_wide(entry)))
        elif not all(_runs(entry, sum(split)) for split in SPLITS):
            return None
        return public_error(entry)


def _runs(entry: Entry, batch: int) -> bool:
    """Whether eager runs the model in float64, with the model's own casts to float32 as they are.

    One that converts its own parameters is no model in float64 after its first call; nan equals nan.
    """
    try:
        model, values = _first_step(entry, batch)
    except RuntimeError:
        return False
    except Exception:  # fxdp says what it is
        return True
    narrow = any(p.dtype == torch.float32 for p in model.parameters())
    return not narrow and not any(value.isnan().any() for value in values)


def _is_nan_wide(entry: Entry) -> bool:
    """Whether it gives nan where integers are cast to float32: a mask of the least float32."""
    with keep_float64():
        return any(value.isnan().any() for value in _first_step(entry, sum(SPLITS[0]))[1])


def _first_step(entry: Entry, batch: int) -> tuple[WithLoss, list[Tensor]]:
    """The model, and its loss and gradients."""
    model = WithLoss(entry.build().double()).train()
    loss = model(**inputs_of(entry, batch))
    loss.backward()
    return model, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
