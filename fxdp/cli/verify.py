"""`fxdp verify module:factory --mesh dp=4`: exit code 0 if the program equals one device, 1 if not."""

from __future__ import annotations

import argparse

import fxdp
from fxdp.cli.show import show, show_json, working
from fxdp.cli.target import declare_target, load_target, mesh_asked
from fxdp.errors import InputError


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    declare_target(parser, mesh="dp=4")
    parser.add_argument(
        "--split", action="append", metavar="5,2,0,1", help="samples per rank; repeat for several splits"
    )
    parser.add_argument(
        "--precision", choices=("float64", "own"), default="float64", help="own: the model's own types"
    )
    parser.add_argument("--tolerance", type=float, help="largest relative error that counts as equal")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers")


def run(asked: argparse.Namespace) -> int:
    """Verify, show the report, and return 0 if all values are equal."""
    splits = None if asked.split is None else [_split(text) for text in asked.split]
    target = load_target(asked)
    mesh = mesh_asked(asked)
    with working(f"verifying {type(target.model).__name__} on {asked.mesh}"):
        report = fxdp.verify(
            target.model, target.args, target.kwargs, mesh,
            splits=splits, precision=asked.precision, tolerance=asked.tolerance, seed=asked.seed,
            **target.options,
        )  # fmt: skip
    if asked.json:
        show_json(report.as_dict())
    else:
        show(report)
    return 0 if report.ok else 1


def _split(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise InputError(f"--split {text}: expected the samples of each rank, as in --split 5,2,0,1")
    return [int(part) for part in parts]
