"""Plan a model for a mesh that need not exist: no process group, one process, nothing compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.locations import Origin
from fxdp.capture.python_values import SpecializationError
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.compiler.device_memory import own_memory
from fxdp.compiler.partial_plan import partial_plan
from fxdp.compiler.planning import Planning
from fxdp.compiler.prepare import is_cut
from fxdp.compiler.program import Program
from fxdp.compiler.records import log_program
from fxdp.compiler.strategy_choice import choose
from fxdp.errors import CaptureError
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.mesh_text import parse_mesh
from fxdp.ir.types.sizes import axis
from fxdp.module.calls.call import Call, check_arguments, request_of, with_recognised
from fxdp.module.calls.reader import CallReader
from fxdp.module.model_checks import check_model, device_type
from fxdp.options import Options
from fxdp.ranks.mesh_init import init_mesh
from fxdp.reports.explained import Explained
from fxdp.reports.plan import Plan
from fxdp.torch_compat import warn_untested


def plan(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    mesh: DeviceMesh | Mapping[str, int] | str | None = None,
    **options: Any,
) -> Plan:
    """Return the plan that `compile` would make for `model`, without a process group and without compiling.

    Parameters
    ----------
    model : any module that can be captured as one graph; a model and `args` on the meta device need no
        memory.
    args, kwargs : one rank's example batch; the size of the global batch is this size times the ranks.
    mesh : sizes by axis name, as `{"dp": 64}` or `"pp=2,dp=32"`, or a DeviceMesh; two ranks by default.
    options : further options of `compile`.

    Raises
    ------
    CaptureError : the model cannot be captured as one graph.
    MeshError, InputError : as `compile` and the compiled module's first call.
    """
    warn_untested(1)
    mesh = {"dp": 2} if mesh is None else mesh
    sizes = parse_mesh(mesh) if isinstance(mesh, str) else mesh
    return dry_run(model, args, {} if kwargs is None else kwargs, sizes, Options.named(options))


def explain(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    what: str = "",
    kwargs: dict[str, Any] | None = None,
    mesh: DeviceMesh | Mapping[str, int] | str | None = None,
    **options: Any,
) -> Explained:
    """Explain a decision in the plan of `model`: `fxdp.explain(model, (x,), "models.py:12")`.

    Parameters
    ----------
    model, args, kwargs, mesh, options : as for `plan`.
    what : a line as in `models.py:12`, a parameter, a node, a collective, a module, or words of a line.

    Raises
    ------
    InputError : no part of the plan has this name; the message lists similar names.
    CaptureError, MeshError : as `plan`.
    """
    return plan(model, args, kwargs, mesh, **options).explain(what)


def dry_run(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh | Mapping[str, int],
    options: Options,
    origin: Origin | None = None,
) -> Plan:
    """Return the plan for one rank's `args` and `kwargs`, as if every rank had a batch of this size.

    `origin` gives the user's lines behind the model; None stands for the line that asks for the plan.
    """
    local, sizes = _local_program(model, args, kwargs, mesh, options, origin)
    log_program(local, sizes)
    return Planning(local, sizes).plan()


def _local_program(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh | Mapping[str, int],
    options: Options,
    origin: Origin | None = None,
) -> tuple[Program, dict[str, int]]:
    """Return the program of a rank with dynamic sizes, and the sizes of the example."""
    check_arguments(args, kwargs)
    options = with_recognised(options, args, kwargs)
    model = check_model(model)
    device = device_type(model)
    microbatches, block = options.pipeline.microbatches, options.block
    reader = CallReader(model, options.batch_dims, device, microbatches=microbatches, block=block)
    call = reader.read(args, kwargs)
    data = init_mesh(mesh, device).mesh
    if not is_cut(data, options):
        options.warn_idle()
    start = time.perf_counter()
    try:
        call, captured = _captured(model, reader, (args, kwargs), data, options, origin)
    except CaptureError as error:
        batch, lines = call.batch * data.size, origin or Origin.here(options.loss_fn)
        error.plan = partial_plan(model, data, options, batch, error, lines)
        raise
    check_layouts(captured, call.inputs, full_batch_draws=options.single_device_rng)
    seconds = time.perf_counter() - start
    sizes = {"B": call.batch * data.size}
    further = zip(call.inputs.axes.further, call.further, strict=True)
    sizes |= {axis(name).total.name: size * data.size for name, size in further}
    limit = own_memory(device) if options.strategy == "auto" else None
    local = choose(captured, data, options, sizes, options.memory_limit or limit)
    local.seconds = {"capture": seconds, **local.seconds}
    return local, sizes


def _captured(
    model: nn.Module,
    reader: CallReader,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    mesh: Mesh,
    options: Options,
    origin: Origin | None,
) -> tuple[Call, Captured]:
    """Return the call and its capture; Python values on which the code decides become constants."""
    couple = mesh.size > 1 or options.has_microbatches
    while True:
        call = reader.read(*inputs)
        request = request_of(model, call.inputs, options, cut=is_cut(mesh, options), couple=couple)
        try:
            return call, capture_request(request if origin is None else replace(request, origin=origin))
        except SpecializationError as error:
            call.values.decide(error.names)
