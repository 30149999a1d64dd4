"""Faults of torch that fxdp works around, each shown by a tiny program of plain torch.

A workaround may not outlive the fault: `tests/torch_compat/faults/test_mends.py` runs each program on the
installed torch and compares the result with `releases`. The test fails when a release fixes a fault, and when
a new release still has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxdp.torch_compat.faults import compiled_faults, dtensor_faults, part_faults
from fxdp.torch_compat.torch_ops import aten

__all__ = ["Mend", "mends"]


@dataclass(frozen=True)
class Mend:
    """A fault of torch, and the file of fxdp that works around it."""

    name: str
    fault: str
    """Description of the fault in one sentence."""
    where: str
    """The file of fxdp with the workaround."""
    releases: frozenset[str]
    """The releases of torch that have the fault."""
    compiles: bool
    """True if the program needs Inductor, and so takes some seconds."""
    has_fault: Callable[[], bool]
    """Run a tiny program in plain torch, and return whether the installed torch has the fault."""


def mends() -> tuple[Mend, ...]:
    """Return all workarounds, sorted by name."""
    return tuple(sorted(_MENDS, key=lambda one: one.name))


def _attention_sums() -> bool:
    def sums() -> Tensor:
        query = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
        return aten._scaled_dot_product_flash_attention_for_cpu.default(query, query, query)[1]  # type: ignore[no-any-return]

    with FakeTensorMode():
        fake = sums()
    return bool(fake.dtype != sums().dtype)


def _convolution_strides() -> bool:
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        count = env.create_unbacked_symint()
        images = torch.empty_strided((count, 3, 8, 8), (192, 1, 24, 3))
        weight = torch.empty(16, 3, 4, 4)
        made = aten.convolution.default(images, weight, None, [4, 4], [0, 0], [1, 1], False, [0, 0], 1)
    real = aten.convolution.default(
        torch.empty_strided((2, 3, 8, 8), (192, 1, 24, 3)).zero_(), torch.zeros(16, 3, 4, 4), None,
        [4, 4], [0, 0], [1, 1], False, [0, 0], 1,
    )  # fmt: skip
    return bool(made.stride()[1:] != real.stride()[1:])


class _Spread(nn.Module):
    """A layer followed by a composite op (`std`), which has a kernel of its own for the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.layer(x).std(-1).sum(),)


def _gradients_on_meta() -> bool:
    from torch._functorch.aot_autograd import aot_export_module

    given = [torch.ones(2, 3, device="meta")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            joint: Any = aot_export_module(
                _Spread().to("meta"), given, trace_joint=True, output_loss_index=0
            )[0]
        except AssertionError as error:
            return "did not receive a gradient" in str(error)
    results: Any = joint.graph.output_node().args[0]
    return None in results


def _open_strides() -> bool:
    compute = getattr(fake_impls, "_compute_stride", None)
    if compute is None:
        return False
    env = ShapeEnv()
    count = env.create_unbacked_symint()
    try:
        compute((4, 1, 16), (16 * (count // 4), 16, 1), (4, 16), size_oblivious=False)
    except Exception as error:
        return "GuardOnDataDependent" in type(error).__name__
    return False


def _selected_offsets() -> bool:
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen, pexpr
    from torch.utils._sympy.functions import Min

    if not hasattr(PythonWrapperCodegen, "codegen_dynamic_select_index"):
        return False
    few, many, number = sympy.symbols("s0 s1 u7", integer=True)
    smaller: Any = Min
    node = SimpleNamespace(
        unbacked_offset_symbol="u9", index=number, size=smaller(few, many), base_offset=few,
        base_dim_stride=few + many,
    )  # fmt: skip
    lines: list[str] = []
    writer = SimpleNamespace(writeline=lines.append, codegen_sizevar=pexpr, unbacked_symbol_decls=set())
    written: Any = PythonWrapperCodegen.codegen_dynamic_select_index
    written(writer, node, clamp=True)
    known: dict[str, Any] = {"s0": 4, "s1": 7, "u7": -1}
    try:
        exec(lines[0], known)
    except NameError:
        return True
    return bool(known["u9"] != 4 + 11 * 3)


def _multilabel_margin() -> bool:
    """Return whether the decomposition counts targets after the first -1."""
    from torch._decomp import decomposition_table

    op = aten.multilabel_margin_loss_forward.default
    if op not in decomposition_table:
        return False
    x, target = torch.tensor([[0.1, 0.2, 0.4, 0.8]]), torch.tensor([[3, -1, 1, 0]])
    own, other = op(x, target, 1)[0], decomposition_table[op](x, target, 1)[0]
    return not torch.allclose(own, other)


def _select_scatter() -> bool:
    """Return whether the gradient of a row is lost in `select_scatter` under `vmap`."""

    def written(row: Tensor) -> Tensor:
        return torch.select_scatter(torch.zeros(3, 2), row, 0, 1)

    rows = torch.ones(4, 2, requires_grad=True)
    found = torch.func.vmap(written)(rows)
    if not found.requires_grad:
        return True
    (gradient,) = torch.autograd.grad(found.sum(), rows, allow_unused=True)
    return gradient is None or not torch.equal(gradient, torch.ones(4, 2))


def _replaced_sizes() -> bool:
    """Return whether export fails if a data-dependent size equals a multiple of the batch size."""

    class Selected(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x.flatten(0, 1) + x[mask]

    batch = torch.export.Dim("batch")
    try:
        torch.export.export(
            Selected(), (torch.ones(6, 5, 4), torch.ones(6, 5, dtype=torch.bool)),
            dynamic_shapes=({0: batch}, {0: batch}),
        )  # fmt: skip
    except AssertionError as error:
        return "not a subset of" in str(error)
    return False


_ALL = ("2.11", "2.12", "2.13", "2.14", "2.15")
_MENDS = (
    Mend(
        "attention_sums", "fake attention in float64 has log-sum-exps of float32, so its gradient stops",
        "torch_compat/faults/attention_sums.py", frozenset(_ALL[:2]), False, _attention_sums,
    ),
    Mend(
        "convolution_strides", "fake convolutions of a number of images that the data decides are contiguous",
        "torch_compat/faults/convolution_strides.py", frozenset(_ALL), False, _convolution_strides,
    ),
    Mend(
        "counted_masks", "masks that became one have several counts, which Inductor refuses",
        "torch_compat/faults/counted_masks.py", frozenset(_ALL), True, compiled_faults.counted_masks,
    ),
    Mend(
        "gradients_on_meta", "no gradient passes some ops on the meta device",
        "torch_compat/exporting.py", frozenset(_ALL), False, _gradients_on_meta,
    ),
    Mend(
        "open_strides", "views ask what a stride equals that the data decides",
        "torch_compat/faults/open_strides.py", frozenset(_ALL), False, _open_strides,
    ),
    Mend(
        "selected_offsets", "sizes in the offset of a selected row are written as no Python",
        "torch_compat/faults/selected_offsets.py", frozenset(_ALL), False, _selected_offsets,
    ),
    Mend(
        "multilabel_margin", "the decomposition of this loss counts targets after the first -1",
        "capture/patches/patch_tables.py", frozenset(_ALL[:3]), False, _multilabel_margin,
    ),
    Mend(
        "select_scatter", "no gradient of a row passes select_scatter under vmap",
        "capture/python/each_sample.py", frozenset(_ALL), False, _select_scatter,
    ),
    Mend(
        "average_pool", "Inductor's gradient of an average pool with ceil_mode is too small",
        "lowering/inductor/decomposition_overrides.py", frozenset(_ALL), True, compiled_faults.average_pool,
    ),
    Mend(
        "kept_order", "Inductor reads a buffer before all is written into it: gradients are silently wrong",
        "torch_compat/faults/kept_order.py", frozenset(_ALL[2:3]), True, compiled_faults.kept_order,
    ),
    Mend(
        "no_images", "Inductor's backward of a convolution of an empty batch stops",
        "lowering/inductor/decomposition_overrides.py", frozenset(_ALL), True, compiled_faults.no_images,
    ),
    Mend(
        "fourier_of_nothing", "MKL refuses Fourier transforms of empty tensors",
        "ir/ops/empty_parts.py", frozenset(_ALL[:4]), False, part_faults.fourier_of_nothing,
    ),
    Mend(
        "pixels_of_nothing", "pixel_unshuffle of an empty tensor keeps its shape",
        "ir/ops/empty_parts.py", frozenset(_ALL), False, part_faults.pixels_of_nothing,
    ),
    Mend(
        "margins_of_nothing", "summed margin losses of no samples are whatever was in memory",
        "ir/ops/empty_parts.py", frozenset(_ALL), False, part_faults.margins_of_nothing,
    ),
    Mend(
        "norm_of_nothing", "the backward of BatchNorm in evaluation ends the process if there are no samples",
        "ir/ops/empty_parts.py", frozenset(_ALL), False, part_faults.norm_of_nothing,
    ),
    Mend(
        "lstm_dropout", "the decomposition of several recurrent layers leaves out the dropout between them",
        "capture/export/rewrites.py", frozenset(_ALL), False, part_faults.lstm_dropout,
    ),
    Mend(
        "lstm_states", "the decomposition of an LSTM gives its states a dim too many",
        "torch_compat/faults/lstm_states.py", frozenset(_ALL[:2]), False, part_faults.lstm_states,
    ),
    Mend(
        "replaced_sizes", "an export fails where the bound of a size, a float, exceeds the largest integer",
        "capture/patches/patch_tables.py", frozenset(_ALL), False, _replaced_sizes,
    ),
    Mend(
        "dtensor_numbers", "a number that is read of a sharded tensor is this rank's part of it",
        "torch_compat/dtensor_ops.py", frozenset(_ALL), False, dtensor_faults.numbers,
    ),
    Mend(
        "dtensor_means", "a mean loss of uneven shards is the mean of the ranks' means",
        "torch_compat/dtensor_ops.py", frozenset(_ALL), False, dtensor_faults.means,
    ),
    Mend(
        "dtensor_views", "rows that are selected of a sharded tensor are a copy: writes are lost",
        "torch_compat/dtensor_ops.py", frozenset(_ALL), False, dtensor_faults.views,
    ),
    Mend(
        "dtensor_no_rows", "the maximum of a sharded tensor raises on a rank without rows, others wait",
        "torch_compat/dtensor_ops.py", frozenset(_ALL), False, dtensor_faults.no_rows,
    ),
    Mend(
        "dtensor_fills", "a column of a sharded tensor cannot be set to a number",
        "torch_compat/dtensor_ops.py", frozenset(_ALL[:4]), False, dtensor_faults.fills,
    ),
    Mend(
        "dtensor_kinds", "a subclass of DTensor is not asked for its ops",
        "torch_compat/dtensor_ops.py", frozenset(_ALL[:1]), False, dtensor_faults.kinds,
    ),
)  # fmt: skip
