"""Tiny programs of plain torch, each of which shows a fault that fxdp works around."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxdp.torch_compat import aten
from tests.torch_compat.faults import compiled_programs, dtensor_programs, part_programs


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


PROGRAMS: dict[str, Callable[[], bool]] = {
    "attention_of_nothing": part_programs.attention_of_nothing,
    "attention_sums": _attention_sums,
    "average_pool": compiled_programs.average_pool,
    "convolution_strides": _convolution_strides,
    "counted_masks": compiled_programs.counted_masks,
    "dtensor_fills": dtensor_programs.fills,
    "dtensor_kinds": dtensor_programs.kinds,
    "dtensor_means": dtensor_programs.means,
    "dtensor_no_rows": dtensor_programs.no_rows,
    "dtensor_numbers": dtensor_programs.numbers,
    "dtensor_views": dtensor_programs.views,
    "fourier_of_nothing": part_programs.fourier_of_nothing,
    "gradients_on_meta": _gradients_on_meta,
    "kept_order": compiled_programs.kept_order,
    "lstm_dropout": part_programs.lstm_dropout,
    "lstm_states": part_programs.lstm_states,
    "margins_of_nothing": part_programs.margins_of_nothing,
    "multilabel_margin": _multilabel_margin,
    "no_images": compiled_programs.no_images,
    "norm_of_nothing": part_programs.norm_of_nothing,
    "open_strides": _open_strides,
    "pixels_of_nothing": part_programs.pixels_of_nothing,
    "replaced_sizes": _replaced_sizes,
    "select_scatter": _select_scatter,
    "selected_offsets": _selected_offsets,
}
"""For each mend, whether the installed torch has its fault."""
