"""The oracle for tests: a model on virtual ranks, node by node, and against one eager device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.inputs import read_inputs
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.compiler.program import Program
from fxdp.ir.types.mesh import mesh_of
from fxdp.options import Options
from fxdp.oracle.verified_capture import capture_for
from fxdp.oracle.verify import prepare_subject
from fxdp.oracle.virtual_run import Subject


def compiled(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], world: int, **options: Any
) -> tuple[Program, Captured]:
    """The program of one rank with open sizes, and the captured graph it came from."""
    chosen = Options(**options)
    return prepared(module, capture_for(module, args, kwargs, chosen), world, chosen)


def prepared(module: nn.Module, found: Captured, world: int, options: Options) -> tuple[Program, Captured]:
    """The program of one of `world` ranks, and its reference; `found` itself stays as it is."""
    return prepare_subject(module, found, mesh_of({"dp": world}, "cpu"), options)


def subject(
    module: nn.Module, found: Captured, world: int, options: Options, tolerance: float = 1e-9
) -> tuple[Program, Subject]:
    """The same, ready to run on virtual ranks."""
    local, reference = prepared(module, found, world, options)
    allowed = {node.name: tolerance for node in local.gm.graph.nodes}
    return local, Subject(module, local.gm, reference, options, allowed)


def check(
    module: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    splits: Sequence[Sequence[int]] = ((3, 4), (5, 2, 0, 1)),
    tolerance: float = 1e-9,
    **options: Any,
) -> Program:
    """Run `module` on virtual ranks for each split of the batch; every node and result must be exact.

    `args` and `kwargs` hold the largest global batch; each split uses its first samples.
    """
    chosen = Options(**options)
    found: dict[int | None, Captured] = {}
    worlds: dict[Any, tuple[Program, Subject]] = {}
    for split in splits:
        hint = 1 if chosen.single_device_rng and sum(split) == 1 else None
        if hint not in found:
            found[hint] = capture_for(module, args, kwargs or {}, chosen, hint)
            inputs = read_inputs(module, args, kwargs or {}, chosen.batch_dims)
            check_layouts(found[hint], inputs, full_batch_draws=chosen.single_device_rng)
        key = hint, len(split)
        if key not in worlds:
            worlds[key] = subject(module, found[hint], len(split), chosen, tolerance)
        run = worlds[key][1].run(args, kwargs or {}, tuple(split), seed=0)
        assert run.ok, f"split {tuple(split)}:\n" + "\n".join(map(str, [*run.faults, *run.wrong]))
    return worlds[key][0]
