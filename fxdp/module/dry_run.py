"""Plan a model for a mesh without having it: no process group, no second process, nothing compiled."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.driver import capture_request
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.capture.sites import Origin
from fxdp.compiler.partial_plan import partial_plan
from fxdp.compiler.prepare import is_cut, prepare
from fxdp.compiler.program import Program
from fxdp.compiler.records import tell_program
from fxdp.errors import CaptureError
from fxdp.module.call import check_arguments, request_of
from fxdp.module.model_checks import check_model, device_type
from fxdp.module.reader import CallReader
from fxdp.options import Options
from fxdp.ranks.resolve import resolve_mesh
from fxdp.reports.plan import Plan


def dry_run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh | Mapping[str, int],
    options: Options,
    origin: Origin | None = None,
) -> Plan:
    """The plan for one rank's `args` and `kwargs`, as if every rank had a batch of that size.

    `origin` are the user's lines behind the model; None: the line that asks for the plan.
    """
    local, sizes = local_program(model, args, kwargs, mesh, options, origin)
    tell_program(local, sizes)
    return local.plan(sizes)


def local_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh | Mapping[str, int],
    options: Options,
    origin: Origin | None = None,
) -> tuple[Program, dict[str, int]]:
    """The program of a rank with open sizes, and the sizes that the example gives them."""
    check_arguments(args, kwargs)
    check_model(model)
    device = device_type(model)
    call = CallReader(model, options.batch_dims, device).read(args, kwargs)
    data = resolve_mesh(mesh, device).mesh
    start = time.perf_counter()
    couple = data.size * options.microbatches > 1
    request = request_of(model, call.inputs, options, cut=is_cut(data, options), couple=couple)
    try:
        captured = capture_request(request if origin is None else replace(request, origin=origin))
    except CaptureError as error:
        batch, lines = call.batch * data.size, origin or Origin.here(options.loss_fn)
        error.plan = partial_plan(model, data, options, batch, error, lines)
        raise
    check_layouts(captured, call.inputs, whole_draws=options.single_device_rng)
    seconds = time.perf_counter() - start
    local = prepare(captured, data, options)
    local.seconds = {"capture": seconds, **local.seconds}
    return local, {"B": call.batch * data.size}
