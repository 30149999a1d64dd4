"""Generators that the user's code seeds or brings along: a program draws from torch's default ones alone.

    noise = torch.randn(4, generator=self.generator)     a graph cannot hold the generator
    torch.manual_seed(0); noise = torch.randn(4)         a graph cannot seed: each step would draw anew

A model that does so is refused, if it draws.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxdp.capture.patches.patches import replaced
from fxdp.capture.sites import is_user_file, site_of_frame
from fxdp.errors import CaptureError
from fxdp.ir.notes import Site

_SEEDING = (
    *((torch, name) for name in ("manual_seed", "seed", "set_rng_state")),
    *((torch.random, name) for name in ("manual_seed", "seed", "set_rng_state", "fork_rng")),
    *((torch.cuda, name) for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state")),
)


@contextlib.contextmanager
def noting_generators(seeded: list[tuple[str, Site]]) -> Iterator[None]:
    """While the user's code is exported, note what seeds torch's generators, and where.

    Raises
    ------
    CaptureError : the code draws from a generator of its own.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in _SEEDING:
            noted = _noted(getattr(owner, name), f"{owner.__name__}.{name}", seeded)
            stack.enter_context(replaced(owner, name, noted))
        stack.enter_context(_OwnGenerators())
        yield


def seeding_error(how: str, site: Site) -> CaptureError:
    """The error of a forward that seeds torch's generators and draws."""
    return CaptureError(
        f"at {site}: the model calls {how} and draws random numbers, and a graph cannot seed: it would draw "
        f"others at each step. {_REMEDY}"
    )


_REMEDY = (
    "Draw fixed numbers once and keep them (register_buffer), seed outside of the model, or draw outside of "
    "it and pass the numbers as an input"
)


def _noted(plain: Callable[..., Any], how: str, seeded: list[tuple[str, Site]]) -> Callable[..., Any]:
    def seed(*args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if is_user_file(frame.f_code.co_filename):
            seeded.append((how, site_of_frame(frame)))
        return plain(*args, **kwargs)

    return seed


class _OwnGenerators(TorchFunctionMode):
    """Refuses draws from generators that are not torch's own."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args, *(kwargs or {}).values())
        if any(isinstance(arg, torch.Generator) and not _is_default(arg) for arg in given):
            name = getattr(func, "__name__", str(func))
            raise CaptureError(
                f"at {_users_line()}: {name} draws from a generator of the model's own, which a graph cannot "
                f"hold. {_REMEDY}"
            )
        return func(*args, **(kwargs or {}))


def _is_default(generator: torch.Generator) -> bool:
    return any(generator is own for own in (torch.default_generator, *torch.cuda.default_generators))


def _users_line() -> Site:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return site_of_frame(frame) if frame else Site()
