"""Run a single-device script, unedited, on several ranks: each number that it prints is one device's."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from fxdp.errors import InputError
from fxdp.settings import Settings, check_settings, hashes_alike

_CALLS, _SECONDS = 50, 10.0
"""A module is compiled when so many calls took so long op by op, about as long as compiling takes."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = "fxdp run [--nproc N] [options] (script.py | -m module) [arguments]"
    parser.add_argument("--nproc", type=int, metavar="N", help="number of ranks (default: GPUs, else 2)")
    said = "folder for the output of all ranks but the first"
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help=said)
    parser.add_argument("--parts", type=_parts, default=(), help=argparse.SUPPRESS)  # for tests of splits
    parser.add_argument("--eager", action="store_true", help="run all op by op, and compile no module")
    parser.add_argument(
        "--compile-from", type=int, metavar="N",
        help="the number of a module's first compiled call of a kind"
        f" (default: {_CALLS}, or as many more as take {_SECONDS:.0f} s)",
    )  # fmt: skip
    parser.add_argument("--compile", action=_Default, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--backend", choices=("inductor", "eager"), default="inductor",
        help="what compiles: Inductor, or none (the graph's ops as they are)",
    )  # fmt: skip
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="the script, or the module's name with -m")
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    rest.required = False  # else it is named where the script is missing


def run(asked: argparse.Namespace) -> NoReturn:
    """Run the script, and end the process with the script's exit code."""
    check_settings()  # those that only compiling reads would be refused there, and the script run op by op
    if not asked.is_module:
        find_script(asked.script)
    if asked.nproc is not None and asked.nproc < 1:
        raise InputError(f"--nproc {asked.nproc}, expected a number of at least 1")
    environment = hashes_alike()
    if environment is not None:  # before torch is imported
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
    from fxdp.run.rank import be_rank, end_at_once
    from fxdp.run.ranks import start_ranks
    from fxdp.run.session import RunOptions

    launch = Settings.from_environment().launch
    nproc = len(asked.parts) or asked.nproc
    logs = asked.logs or Path(tempfile.mkdtemp(prefix="fxdp-run-"))
    compile_from, compile_after_s = asked.compile_from, 0.0
    if compile_from is None:
        compile_from, compile_after_s = _CALLS, _SECONDS
    options = RunOptions(
        asked.script,
        tuple(asked.arguments),
        asked.is_module,
        logs,
        asked.parts,
        0 if asked.eager else max(1, compile_from),
        compile_after_s,
        asked.backend,
    )
    if launch is None:
        nproc = nproc or _gpus() or 2
        sys.stderr.write(f"fxdp run: {asked.script} on {nproc} ranks; output of ranks above 0 is in {logs}\n")
        code = start_ranks(nproc, logs)
        if code is not None:
            end_at_once(code)
        launch = Settings.from_environment().launch
        assert launch is not None
    elif nproc not in (None, launch.world_size):
        raise InputError(f"--nproc {nproc}, but torchrun has started {launch.world_size} processes")
    be_rank(launch, options)


class _Default(argparse.Action):
    """An option for what is done without it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        parser.error(f"{self.option_strings[0]}: modules are compiled without it; expected --eager for none")


def _parts(text: str) -> tuple[int, ...]:
    """Return the ranks' shares of each batch, as in `3,1`."""
    found = tuple(map(int, text.split(",")))
    if min(found) < 0 or not sum(found):
        raise ValueError(text)
    return found


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def find_script(script: str) -> Path:
    """Return the path of a script.

    Raises
    ------
    InputError : there is no such file.
    """
    path = Path(script)
    if not path.is_file():
        raise InputError(
            f"{script} is no file; expected the script's path, as in: fxdp run --nproc 2 train.py --epochs 3"
        )
    return path
