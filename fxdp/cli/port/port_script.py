"""Print the edits by which a script trains on many ranks by hand, and name lines that need a look."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

from fxdp.cli.port.port_edits import edited, edits_of
from fxdp.cli.port.port_remarks import remarks_of
from fxdp.errors import InputError

_NOTHING = """\
{name}: no model whose parameters() are read, no loop over a loader and no trainer was found; compile
what your loop calls (model = fxdp.compile(model)) and take its batches from fxdp.shard(loader)
"""
_HOW = """
Run by: torchrun --nproc-per-node 4 {name}
All ranks seed alike, print and save: begin such lines by `if torch.distributed.get_rank() == 0:`.
Without any edit: fxdp run --nproc 4 {name}
"""
_REMARKS = """
These lines need a look:
"""


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the argument of the command."""
    parser.add_argument("script", type=Path, help="the script, which is read and not changed")


def run(asked: argparse.Namespace) -> int:
    """Print the edits as a unified difference, for `patch`, and then the remarks.

    Raises
    ------
    InputError : the script cannot be read.
    """
    try:
        source = asked.script.read_text()
        sys.stdout.writelines(_report(str(asked.script), source))
    except OSError as error:
        raise InputError(f"{asked.script}: {error.strerror}; expected the path of a script") from error
    except (SyntaxError, UnicodeDecodeError) as error:
        said = str(error).replace("(<unknown>, ", "(")
        raise InputError(f"{asked.script} is no Python script: {said}") from error
    return 0


def _report(name: str, source: str) -> Iterator[str]:
    edits = edits_of(source)
    before, after = source.splitlines(keepends=True), edited(source, edits).splitlines(keepends=True)
    yield from difflib.unified_diff(before, after, f"a/{name}", f"b/{name}", n=1)
    yield (_HOW if edits else _NOTHING).format(name=name)
    remarks = remarks_of(source)
    if remarks:
        yield _REMARKS
    for remark in remarks:
        yield f"  line {remark.line}: {remark.code}\n    {remark.text}\n"
