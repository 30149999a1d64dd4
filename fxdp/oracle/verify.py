"""`fxdp.verify`: a model on virtual ranks beside the same model on one device, in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import read_inputs
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.capture.refusals.stateful import copy_of
from fxdp.compiler.prepare import prepare
from fxdp.compiler.program import Program
from fxdp.errors import InputError, VerifierError
from fxdp.ir.draws import kept_random_state
from fxdp.ir.graphs import copy_graph
from fxdp.ir.mesh import Mesh, mesh_of
from fxdp.ir.sizes import B, named_size
from fxdp.module.call import check_arguments, request_of
from fxdp.module.model_checks import check_model, device_type
from fxdp.module.reader import CallReader
from fxdp.options import Options
from fxdp.oracle.precision import casts, tolerances, widen, widened
from fxdp.oracle.report import Report
from fxdp.oracle.splits import check_splits
from fxdp.oracle.virtual_run import Subject
from fxdp.passes import Canonicalize

_WIDE = "in float64"
"""What a report says of a model that runs in a copy of float64."""


def verify_model(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    mesh: DeviceMesh | Mapping[str, int],
    options: Options,
    *,
    splits: Sequence[Sequence[int]] | Sequence[int] | None,
    precision: str,
    tolerance: float | None,
    seed: int,
) -> Report:
    """See `fxdp.verify`."""
    _check_precision(precision)
    _check_numbers(tolerance, seed)
    check_arguments(args, kwargs)
    _check_statistics(options)
    check_model(model)
    device = device_type(model)
    axes = axis_sizes(mesh)
    data = mesh_of(axes, device)
    call = CallReader(model, options.batch_dims, device).read(args, kwargs)
    chosen = check_splits(splits, call.batch, data.size)
    shown = ", ".join(f"{name}={size}" for name, size in axes.items())
    reports: list[Report] = []
    for size, some in _by_program(chosen, call.batch, options):
        module, example, found, note = _captured(model, (args, kwargs), options, precision, size)
        # of the inputs as they were given: copies in float64 have no gaps
        check_layouts(found, call.inputs, whole_draws=options.single_device_rng)
        for split in some:
            _check_conditions(found, example, sum(split))
        own = note != _WIDE
        subject, invariants = _subject(module, found, data, options, own, tolerance)
        runs = (
            tuple(subject.run(example[0], example[1], split, seed) for split in some)
            if subject is not None
            else ()
        )
        compared = _compared(subject, data, note)
        narrow = () if own else casts(found.gm)
        reports.append(Report(type(model).__name__, f"mesh({shown})", runs, compared, narrow, invariants))
    invariants = next((report.invariants for report in reports if report.invariants), "")
    return replace(reports[0], splits=sum((r.splits for r in reports), ()), invariants=invariants)


def _by_program(
    splits: Sequence[tuple[int, ...]], batch: int, options: Options
) -> list[tuple[int, list[tuple[int, ...]]]]:
    """The splits that one capture serves, with a batch: one device may draw otherwise for a single sample."""
    if not options.single_device_rng:
        return [(batch, list(splits))]
    one, several = ([s for s in splits if (sum(s) == 1) is alone] for alone in (True, False))
    return [(size, some) for size, some in ((batch, several), (1, one)) if some]


def prepare_subject(
    module: nn.Module, found: Captured, mesh: Mesh, options: Options
) -> tuple[Program, Captured]:
    """The program of one rank, and the graph that it must equal; `found` itself stays as it is."""
    reference = replace(found, gm=Canonicalize().run(copy_graph(found.gm), mesh))
    return prepare(replace(found, gm=copy_graph(found.gm)), mesh, options, cut=False), reference


def axis_sizes(mesh: DeviceMesh | Mapping[str, int]) -> Mapping[str, int]:
    """The axes of a mesh with their sizes, free of process groups."""
    if isinstance(mesh, DeviceMesh):
        return dict(zip(mesh.mesh_dim_names or ("dp",), mesh.shape, strict=True))
    return mesh


def capture_for(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
    hint: int | None = None,
) -> Captured:
    """The joint graph, as a compiled module captures it."""
    inputs = read_inputs(module, args, kwargs, options.batch_dims)
    return capture_request(request_of(module, inputs, options, hint=hint))


def _captured(
    model: nn.Module, inputs: Any, options: Options, precision: str, batch: int
) -> tuple[nn.Module, Any, Captured, str]:
    """The module and the inputs that are run, their capture, and how precise they are, in words."""
    if precision == "own":
        module = copy_of(model)
        return module, inputs, _capture_at(module, inputs, options, batch), "in the model's own types"
    module, wide = widened(model), widen(inputs)
    reason = _why_not_wide(module, wide, options)
    if reason:
        module, wide = copy_of(model), inputs
    found = _capture_at(module, wide, options, batch)
    if reason:
        return module, wide, found, f"in the model's own types, because it fails in float64 ({reason})"
    return module, wide, found, _WIDE


def _why_not_wide(module: nn.Module, inputs: Any, options: Options) -> str:
    """What eager says of the model in float64, where its code has types of its own; else nothing."""
    twin, (args, kwargs) = copy_of(module), widen(inputs)
    if options.loss_fn is not None:
        kwargs = {name: value for name, value in kwargs.items() if name != "target"}
    try:
        with kept_random_state():
            twin(*args, **kwargs)
    except Exception as error:  # whatever the user's code raises; capture reports other faults
        return str(error).splitlines()[0] if str(error) else type(error).__name__
    return ""


def _capture_at(module: nn.Module, inputs: Any, options: Options, batch: int) -> Captured:
    """A capture that is valid at this batch, where the model's code branches on sizes."""
    args, kwargs = inputs
    hint = 1 if batch == 1 and options.single_device_rng else None
    found = capture_for(module, args, kwargs, options, hint)
    if _broken(found, inputs, batch) and batch >= 2:
        found = capture_for(module, args, kwargs, options, hint=batch)
    return found


def _broken(found: Captured, inputs: Any, batch: int) -> list[str]:
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if hasattr(leaf, "shape")]
    sizes = {named_size(name): tensors[i].shape[dim] for name, (i, dim) in found.symbols.items()}
    return [f"{c.expr} at {c.site}" for c in found.conditions if not c.holds({B: batch, **sizes})]


def _check_conditions(found: Captured, inputs: Any, batch: int) -> None:
    broken = _broken(found, inputs, batch)
    if broken:
        listing = "\n  ".join(broken)
        raise InputError(
            f"the model's Python code decided on a size in a way that does not hold for a global batch of "
            f"{batch}:\n  {listing}\nVerify with splits= whose samples are within the condition"
        )


def _subject(
    module: nn.Module,
    found: Captured,
    mesh: Mesh,
    options: Options,
    own: bool,
    tolerance: float | None,
) -> tuple[Subject | None, str]:
    """What is run; where a pass broke an invariant, what it said, and the program nevertheless."""
    invariants = ""
    try:
        local, reference = prepare_subject(module, found, mesh, options)
    except VerifierError as error:
        invariants = str(error)
        try:
            local, reference = prepare_subject(module, found, mesh, replace(options, verify=False))
        except Exception:  # the graph is broken: whatever a later pass makes of it is a consequence
            return None, invariants
    allowed = tolerances(local.gm, own=own)
    if tolerance is not None:
        allowed = dict.fromkeys(allowed, tolerance)
    return Subject(module, local.gm, reference, options, allowed, mesh), invariants


def _compared(subject: Subject | None, mesh: Mesh, note: str) -> str:
    if subject is None:
        return "nothing was run"
    if mesh.world > mesh.size or subject.options.microbatches > 1:
        note = f"{note}; the data-parallel program, before it is cut into stages and micro-batches"
    if subject.draws_apart(mesh.size):
        return (
            f"{note}; the ranks draw random numbers of their own (rng='sharded'): every node is compared "
            "with one device that is given these numbers, and the program on one device with the eager model"
        )
    return f"{note}; every node, output, gradient and buffer is compared with one eager device"


def _check_statistics(options: Options) -> None:
    if options.own_statistics:
        raise InputError(
            'batch_stats="microbatch" normalizes each part of the batch by its own statistics, which one '
            'device does not: there is nothing to verify it by. Verify the model with batch_stats="global"'
        )


def _check_numbers(tolerance: object, seed: object) -> None:
    is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
    if tolerance is not None and not (is_number and 0 <= tolerance < float("inf")):  # type: ignore[operator]
        raise InputError(f"tolerance is {tolerance!r}, expected a relative error of at least 0, as 1e-6")
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**63:
        raise InputError(f"seed is {seed!r}, expected an integer of 64 bits, as for torch.manual_seed")


def _check_precision(precision: str) -> None:
    if precision not in ("float64", "own"):
        raise InputError(
            f"precision is {precision!r}, expected 'float64' (a copy of the model in float64) or 'own' "
            "(as it is)"
        )
