"""`fxdp.verify`: compare a model on virtual ranks with the same model on one device, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.captured import Captured
from fxdp.capture.refusals.input_layouts import check_layouts
from fxdp.capture.sample_cuts import sample_ends
from fxdp.compiler.device_memory import own_memory
from fxdp.compiler.order import canonical
from fxdp.compiler.program import Program
from fxdp.compiler.strategy_choice import choose
from fxdp.errors import InputError, VerifierError
from fxdp.ir.graph.graphs import copy_graph
from fxdp.ir.types.mesh import Mesh, mesh_of
from fxdp.ir.types.mesh_text import parse_mesh
from fxdp.module.calls.call import check_arguments, with_recognised
from fxdp.module.calls.reader import CallReader
from fxdp.module.model_checks import check_model, device_type
from fxdp.options import Options
from fxdp.oracle.bits import BitRun, BitSubject
from fxdp.oracle.precision import casts, tolerances
from fxdp.oracle.report import Report
from fxdp.oracle.splits import check_splits, ragged_splits
from fxdp.oracle.verified_capture import WIDE, captured, check_branch, check_conditions
from fxdp.oracle.virtual_run import SplitRun, Subject
from fxdp.torch_compat import warn_untested


def verify(
    model: nn.Module | Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    mesh: DeviceMesh | Mapping[str, int] | str | None = None,
    *,
    splits: Sequence[Sequence[int]] | Sequence[int] | None = None,
    precision: str = "float64",
    tolerance: float | None = None,
    seed: int = 0,
    **options: Any,
) -> Report:
    """Check that the program which `compile` would run equals `model` on one device, in this process alone.

    The data-parallel program, before the cut into stages and micro-batches, runs on virtual ranks, each with
    its part of the given batch, op by op and before Inductor. Every value is compared with the value on one
    device for the global batch. Outputs, gradients (for random weights of the outputs) and buffers are
    compared with the unmodified model. With `numerics=fxdp.Bitwise(block=...)` the step in blocks then runs
    in the model's own dtypes, too, and the bits of every op, of outputs, gradients and of parameters after a
    step of AdamW are compared with those of the same step on one device.

    Parameters
    ----------
    model : any module that can be captured as one graph; the module is not changed.
    args, kwargs : the *global* batch.
    mesh : sizes by axis name, as `{"dp": 4}` (the default) or `"dp=4"`, or a DeviceMesh. Memory and time
        grow with the number of ranks; use meshes of up to 8.
    splits : samples per rank, as `[[5, 2, 0, 1]]`, one split or several; of a ragged batch samples of any
        sizes, as graphs, and all of them. None: as even as possible, uneven
        with a single sample (or block) and an empty rank, and all samples on the last rank.
    precision : `"float64"`: copies of model and inputs in float64; a model that cannot run in float64 keeps
        its own dtypes, and the report says so. `"own"`: the model's own dtypes; there rounding may change the
        result of a comparison or an argmax, which is reported as a difference.
    tolerance : the largest relative error, of a tensor's largest value, that counts as equal. None: 1e-9 in
        float64, 1e-6 after a cast to float32 inside of the model, 1e-5 for a model's own float32, 2e-3 and
        2e-2 after float16 and bfloat16. Integers and booleans must be equal.
    seed : the seed of random numbers. With `rng="single-device"` results are compared with eager on this
        seed. With `rng="sharded"` ranks draw different numbers: every node is compared with one device that
        uses the numbers of the ranks, the captured program is compared with eager on this seed, and two ranks
        must not draw equal numbers.
    options : further options of `compile`.

    Returns
    -------
    Report : with the first differing node, and the first op with different bits and the reason;
        `report.ok` if all values are equal.

    Raises
    ------
    CaptureError : the model cannot be captured as one graph.
    PlacementError : an op cannot be made exact.
    MeshError, InputError : as `compile` and the compiled module's first call; splits that do not fit.
    """
    warn_untested(1)
    chosen = with_recognised(Options.named(options), args, {} if kwargs is None else kwargs)
    _check_precision(precision)
    _check_numbers(tolerance, seed)
    kwargs = {} if kwargs is None else kwargs
    check_arguments(args, kwargs)
    _check_statistics(chosen)
    model = check_model(model)
    device = device_type(model)
    axes = {"dp": 4} if mesh is None else _axis_sizes(mesh)
    data = mesh_of(axes, device)
    call = CallReader(model, chosen.batch_dims, device).read(args, kwargs)
    every: tuple[tuple[int, ...], ...]
    if call.inputs.axes.names:
        ends = sample_ends(call.inputs, joins=chosen.block is None)
        every = ragged_splits(splits, ends, data.size, chosen.block or 1)
    else:
        every = check_splits(splits, call.batch, data.size, chosen.block or 1)
    shown = f"mesh({', '.join(f'{name}={size}' for name, size in axes.items())})"
    bits: tuple[BitRun, ...] = ()
    if chosen.block is not None:
        bits = BitSubject.of(model, args, kwargs, chosen, seed).compare(_data_axes(axes, device), every)
    if chosen.own_statistics:
        return Report(type(model).__name__, shown, (), _OWN_STATISTICS, bits=bits)
    reports: list[Report] = []
    for size, some in _by_program(every, call.batch, chosen):
        module, example, found, meta = captured(model, (args, kwargs), chosen, precision, size, seed)
        # checked on the original inputs: float64 copies have no gaps
        check_layouts(found, call.inputs, full_batch_draws=chosen.single_device_rng)
        for split in some:
            check_conditions(found, example, sum(split), chosen.batch_dims)
            check_branch(found, module, example, chosen, sum(split), seed)
        own = meta != WIDE
        subject, invariants = _subject(module, found, data, chosen, own, tolerance, size)
        runs: tuple[SplitRun, ...] = ()
        if subject is not None:
            runs = tuple(subject.run(example[0], example[1], split, seed) for split in some)
        compared = _compared(subject, data, meta)
        narrow = () if own else casts(found.gm)
        reports.append(Report(type(model).__name__, shown, runs, compared, narrow, invariants))
    invariants = next((report.invariants for report in reports if report.invariants), "")
    return replace(reports[0], splits=sum((r.splits for r in reports), ()), invariants=invariants, bits=bits)


_OWN_STATISTICS = "bits alone: each block is normalized by its own statistics, which no eager device computes"


def _data_axes(axes: Mapping[str, int], device: str) -> Mesh:
    """Return the mesh without its pipeline axis."""
    return mesh_of({name: size for name, size in axes.items() if name != "pp"} or {"dp": 1}, device)


def _by_program(
    splits: Sequence[tuple[int, ...]], batch: int, options: Options
) -> list[tuple[int, list[tuple[int, ...]]]]:
    """Group the splits by capture, with a batch size: a single sample may draw random numbers differently."""
    if not options.single_device_rng:
        return [(batch, list(splits))]
    one, several = ([s for s in splits if (sum(s) == 1) is alone] for alone in (True, False))
    return [(size, some) for size, some in ((batch, several), (1, one)) if some]


def prepare_subject(
    module: nn.Module, found: Captured, mesh: Mesh, options: Options, batch: int = 1
) -> tuple[Program, Captured]:
    """Return one rank's program and the captured graph that defines the expected values; keep `found`.

    `batch` is the global batch size, used to choose a strategy by memory.
    """
    own = replace(found, gm=copy_graph(found.gm))
    limit = options.memory_limit or (own_memory(mesh.device_type) if options.strategy == "auto" else None)
    return choose(own, mesh, options, {"B": batch}, limit, cut=False), canonical(found, mesh)


def _axis_sizes(mesh: DeviceMesh | Mapping[str, int] | str) -> Mapping[str, int]:
    """Return the axes of a mesh with their sizes, without process groups."""
    if isinstance(mesh, str):
        return parse_mesh(mesh)
    if isinstance(mesh, DeviceMesh):
        return dict(zip(mesh.mesh_dim_names or ("dp",), mesh.shape, strict=True))
    return mesh


def _subject(
    module: nn.Module,
    found: Captured,
    mesh: Mesh,
    options: Options,
    own: bool,
    tolerance: float | None,
    batch: int,
) -> tuple[Subject | None, str]:
    """Return the subject to run, and the message of a broken invariant; no subject if a later pass fails."""
    invariants = ""
    try:
        local, reference = prepare_subject(module, found, mesh, options, batch)
    except VerifierError as error:
        invariants = str(error)
        unchecked = replace(options, debug=replace(options.debug, verify=False))
        try:
            local, reference = prepare_subject(module, found, mesh, unchecked, batch)
        except Exception:  # the graph is broken: any error of a later pass is a consequence
            return None, invariants
    allowed = tolerances(local.gm, own=own)
    if tolerance is not None:
        allowed = dict.fromkeys(allowed, tolerance)
    return Subject(module, local.gm, reference, options, allowed, local.mesh), invariants


def _compared(subject: Subject | None, mesh: Mesh, meta: str) -> str:
    if subject is None:
        return "nothing was run"
    if mesh.world > mesh.size or subject.options.has_microbatches:
        meta = f"{meta}; the data-parallel program, before it is cut into stages and micro-batches"
    if subject.draws_apart(mesh.size):
        return (
            f"{meta}; the ranks draw random numbers of their own (rng='sharded'): every node is compared "
            "with one device that is given these numbers, and the program on one device with the eager model"
        )
    return f"{meta}; every node, output, gradient and buffer is compared with one eager device"


def _check_statistics(options: Options) -> None:
    if options.own_statistics and options.block is None:
        raise InputError(
            'fxdp.Pipeline(batch_stats="microbatch") normalizes each part of the batch by its own '
            "statistics, which one device does not: there is nothing to verify it by. Verify the model with "
            'batch_stats="global"'
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
