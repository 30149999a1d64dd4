"""Captures that tests share: ranks with one another, and tests on meshes of any size.

A capture is of the global batch and knows nothing of ranks, so what one process has captured serves all
ranks that are forked from it (`RankPool.prepare`), and a joint graph that one rank has traced serves the
ranks of all tests (`traced_once`). All that follows a capture is done every time.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.joint.symbolic_joint import joint_of_forward, symbolic_joint
from fxdp.capture.request import Request
from fxdp.disk.entries import Entries
from fxdp.disk.private_folder import PrivateFolder
from fxdp.ir.graph.graphs import copy_graph
from fxdp.module.dry_run import _local_program
from fxdp.options import Options
from fxdp.settings import CacheSettings
from fxdp.startup.artifacts import cached_joint

KNOWN: dict[Any, dict[Any, Captured]] = {}
"""What this process has captured, by names that tests give: all models of one class and name are equal."""


@contextlib.contextmanager
def captured_once(known: dict[Any, Captured] | None = None) -> Iterator[None]:
    """Models of the same class are captured once in each mode; `known` holds what was captured before."""
    known = {} if known is None else known

    def remembered(request: Request) -> Captured:
        modes = (request.module.training, torch.is_grad_enabled())
        asked = (request.joint, request.dynamic, request.hint, request.precision)
        numbers = [(n, v) for n, v in request.inputs.python_leaves if isinstance(v, bool | int | float | str)]
        key = (type(request.module), *modes, *asked, request.inputs.paths, *numbers)
        if key not in known:
            known[key] = capture_request(request)
        return replace(known[key], gm=copy_graph(known[key].gm))

    with (
        mock.patch("fxdp.module.programs.capture_request", remembered),
        mock.patch("fxdp.module.dry_run.capture_request", remembered),
        mock.patch("fxdp.oracle.verified_capture.capture_request", remembered),
    ):
        yield


def capture_ahead(
    name: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mapping[str, int],
    **options: Any,
) -> None:  # fmt: skip
    """Capture the model as a call on such a mesh would, under this name."""
    with captured_once(KNOWN.setdefault(name, {})):
        _local_program(model, args, kwargs, mesh, Options(**options))


@contextlib.contextmanager
def traced_once(folder: Path) -> Iterator[None]:
    """Inside, of all processes with this folder the first that needs a joint graph traces it, others wait.

    They find it as a program's second start does (`fxdp/startup/artifacts/cached_joint.py`); a graph that has
    no key each traces by itself. Two thirds of a capture are the joint graph's.
    """
    own = joint_of_forward

    def once(exported: Exported, options: JointOptions) -> Captured:
        if CacheSettings.from_environment().megabytes:  # by the test, which looks at what is kept
            return own(exported, options)
        key = cached_joint._key(exported, options)
        if key is None:
            return own(exported, options)
        shelf = folder / key[:2]  # whoever writes to a folder looks at all that is in it
        shelf.mkdir(mode=0o700, exist_ok=True)
        entries = Entries(PrivateFolder(shelf, 2**30))
        with (folder / f"lock-{key}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # who holds it waits for nobody; it ends with its process
            return cached_joint.cached_in(symbolic_joint.own, entries, key, exported, options)

    folder.mkdir(mode=0o700, exist_ok=True)
    with mock.patch("fxdp.capture.capture_strategies.joint_of_forward", once):
        yield
