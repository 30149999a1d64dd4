"""The options of `fxdp demo`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from fxdp.errors import InputError, MeshError

_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of one demonstration; `ranks` is None for the number of ranks of the launcher."""

    ranks: int | None = None
    steps: int = 100
    batch: int = 16
    device: str = "cpu"
    backend: str = "inductor"
    dtype: torch.dtype = torch.float32
    model: str = "plain"
    out: Path = Path("fxdp-demo.png")

    @property
    def tolerance(self) -> float:
        """The largest relative difference of two losses that counts as rounding.

        Rounding errors grow with the steps: in float32 to 4e-7 in 100 steps. The mean of two unequal ranks'
        means, the mildest mistake, shows as 1e-3. Transformers computes its loss in float32.
        """
        if self.dtype is torch.float64:
            return 1e-5 if self.model == "transformers" else 1e-9
        return 1e-4


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `fxdp demo`."""
    parser.add_argument(
        "--mesh", metavar="dp=N", help="ranks of the data-parallel axis (default: dp=2, or torchrun's)"
    )
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences of all ranks together in a step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: one rank per GPU")
    parser.add_argument(
        "--backend", choices=("inductor", "eager"), default="inductor", help="how a rank's graph runs"
    )
    parser.add_argument(
        "--dtype", choices=tuple(_DTYPES), default="float32", help="float64 shows exactness to 1e-9"
    )
    parser.add_argument(
        "--model", choices=("plain", "transformers"), default="plain", help="our plain GPT or GPT2LMHeadModel"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("fxdp-demo.png"), help="where the loss curves are drawn"
    )


def demo_options(asked: argparse.Namespace) -> DemoOptions:
    """Check the arguments and return the options, before any process starts."""
    if asked.steps < 1:
        raise InputError(f"--steps {asked.steps}: at least one step is needed.")
    if asked.batch < 1:
        raise InputError(f"--batch {asked.batch}: at least one sequence is needed.")
    out: Path = asked.out
    if not out.absolute().parent.is_dir():
        raise InputError(
            f"--out {out}: there is no folder {out.absolute().parent}. Make it, or name another file."
        )
    return DemoOptions(
        ranks=None if asked.mesh is None else _data_ranks(asked.mesh),
        steps=asked.steps,
        batch=asked.batch,
        device=asked.device,
        backend=asked.backend,
        dtype=_DTYPES[asked.dtype],
        model=asked.model,
        out=out,
    )


def _data_ranks(mesh: str) -> int:
    """Return the number of ranks of a mesh such as `dp=2`, the only axis of the demonstration."""
    axis, _, size = mesh.partition("=")
    if axis.strip() != "dp":
        raise MeshError(f"--mesh {mesh}: got axis {axis.strip()!r}, expected dp, as in --mesh dp=2.")
    if not size.strip().isdecimal() or int(size) < 1:
        raise MeshError(f"--mesh {mesh}: got size {size!r}, expected a number of ranks, as in --mesh dp=2.")
    return int(size)
