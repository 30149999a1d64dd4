"""The command `fxdp demo`: its options, checked before any process starts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxdp.errors import InputError, MeshError


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The options of one demonstration; `ranks` is None for the number of ranks of the launcher."""

    ranks: int | None = None
    steps: int = 100
    batch: int = 16
    device: str = "cpu"
    backend: str = "inductor"
    dtype: str = "float32"
    model: str = "plain"
    out: Path = Path("fxdp-demo.png")

    @property
    def tolerance(self) -> float:
        """The largest relative difference of two losses that counts as rounding.

        Rounding errors grow with the steps: in float32 to 4e-7 in 100 steps. The mean of two unequal ranks'
        means, the mildest mistake, shows as 1e-3. Transformers computes its loss in float32.
        """
        if self.dtype == "float64":
            return 1e-5 if self.model == "transformers" else 1e-9
        return 1e-4


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""

    def add(name: str, said: str, **how: Any) -> None:
        default = getattr(DemoOptions(), name)
        parser.add_argument(f"--{name}", default=default, help=f"{said} (default: {default})", **how)

    parser.add_argument("--mesh", metavar="dp=N", help="number of ranks (default: dp=2, or torchrun's)")
    add("steps", "training steps", type=int)
    add("batch", "sequences of all ranks together in a step", type=int)
    add("device", "cuda: one rank per GPU", choices=("cpu", "cuda"))
    add("backend", "how a rank's graph runs", choices=("inductor", "eager"))
    add("dtype", "float64 shows exactness to 1e-9", choices=("float32", "float64"))
    add("model", "our plain GPT or GPT2LMHeadModel", choices=("plain", "transformers"))
    add("out", "where the loss curves are drawn", type=Path)


def run(asked: argparse.Namespace) -> int:
    """Check the arguments, and run the demonstration.

    Raises
    ------
    InputError, MeshError : an argument has a mistake.
    """
    if asked.steps < 1:
        raise InputError(f"--steps {asked.steps}: at least one step is needed.")
    if asked.batch < 1:
        raise InputError(f"--batch {asked.batch}: at least one sequence is needed.")
    folder = asked.out.absolute().parent
    if not folder.is_dir():
        raise InputError(f"--out {asked.out}: there is no folder {folder}. Make it, or name another file.")
    options = DemoOptions(
        None if asked.mesh is None else _data_ranks(asked.mesh), asked.steps, asked.batch, asked.device,
        asked.backend, asked.dtype, asked.model, asked.out,
    )  # fmt: skip
    # after the checks; examples and benchmarks, which take the model alone, need none of it
    from fxdp.cli.demo.demonstration import run_demo

    return run_demo(options)


def _data_ranks(mesh: str) -> int:
    """Return the number of ranks of a mesh such as `dp=2`, the only axis of the demonstration."""
    axis, _, size = mesh.partition("=")
    if axis.strip() != "dp":
        raise MeshError(f"--mesh {mesh}: got axis {axis.strip()!r}, expected dp, as in --mesh dp=2.")
    if not size.strip().isdecimal() or int(size) < 1:
        raise MeshError(f"--mesh {mesh}: got size {size!r}, expected a number of ranks, as in --mesh dp=2.")
    return int(size)
