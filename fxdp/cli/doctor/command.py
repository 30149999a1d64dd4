"""Print the sections of `fxdp doctor`, in order."""

from __future__ import annotations

import argparse
import sys
import time
import warnings

from fxdp.cli.doctor import found, trials
from fxdp.cli.doctor.section import Section
from fxdp.errors import UntestedTorchWarning


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--quick", action="store_true", help="run nothing: versions, settings, caches")


def run(asked: argparse.Namespace) -> int:
    """Print each section as soon as its contents are known."""
    warnings.simplefilter("ignore", UntestedTorchWarning)  # the doctor reports an unproven torch by itself
    began, ok = time.perf_counter(), True
    of_caches: list[str] = []
    for make in (found.versions, found.settings, found.shortcuts):
        ok &= _show(make())
    if not asked.quick:
        _say("checks of a small model")
        for row in trials.checks(of_caches):
            ok &= row.ok
            _say("\n".join(Section("", (row,)).lines()[1:]))
        ok &= _show(trials.mends())
    ok &= _show(found.caches(of_caches))
    said = "all is well" if ok else "something FAILED, see above"
    _say(f"{said} ({time.perf_counter() - began:.0f} s and imports)")
    return 0 if ok else 1


def _show(section: Section) -> bool:
    if section.rows or ":" in section.title:
        _say("\n".join(section.lines()))
    return section.ok


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
