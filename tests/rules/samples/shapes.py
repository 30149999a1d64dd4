"""Views, slices, diagonals, joins and factories."""

from __future__ import annotations

from typing import Any

import torch

from fxdp.ir.types.placements import Dim
from fxdp.ir.types.sizes import B, product
from fxdp.rules.proof.samples import Sample as T
from tests.rules.samples.draw import Call, Draw, Maker, call, sizes

MAX = 2**63 - 1


def _one(g: Draw, low: int = 1, high: int = 3) -> T:
    return g.t(g.dims(low, high))


def _view(g: Draw) -> Call:
    t, k, n = g.one([1, 2, 3]), g.one([2, 3]), g.n("N")
    forms: list[tuple[list[Dim], list[Any]]] = [
        ([t, n, k], [product(t, n), k]),
        ([product(t, n), k], [t, n, k]),
        ([n, 2, k], [n, -1]),
        ([n, 2 * k], [n, 2, k]),
        ([2 * n, k], [product(2 * k, n)]),
        ([k, n], [product(n, k)]),
    ]
    shape, target = g.one(forms)
    return call(T(*shape), target)


def _reshape_alias(g: Draw) -> Call:
    n, k = g.n("N"), g.one([2, 3])
    return g.one([call(T(k, n), [product(k, n)], [1]), call(T(n, 2 * k), [n, 2, k], [2 * k, k, 1])])


def _expand(g: Draw) -> Call:
    new = g.one([[], [2], ["B"]])
    kept = g.n("N")
    return g.one([call(T(kept, 1), [*new, kept, g.one([1, 3, B])]), call(T(1, 3), [*new, kept, -1])])


def _squeeze(g: Draw) -> T:
    return g.t(g.one(["N1", "1Na", "aN1", "1N1"]))


def _repeat(g: Draw) -> Call:
    return g.one([call(g.t("Na"), [2, g.one([1, 3]), 1]), call(g.t("aN"), [1, 2]), call(g.t("2"), ["B", 2])])


def _strided(g: Draw, written: bool = False) -> Call:
    """Windows, transposes and repetitions within each sample."""
    n, k = g.n("N"), g.one([3, 4])
    forms: list[tuple[list[Dim], list[Dim], list[Any], int]] = [
        ([n, k], [n, k], [k, 1], 0),
        ([n, k], [n, 2], [k, 1], 1),
        ([n, 2, k], [n, k, 2], [2 * k, 1, k], 0),
        ([n, k], [n, k - 1, 2], [k, 1, 1], 0),
        ([k, n], [k, n], [n, 1], 0),
    ]
    shape, size, stride, start = g.one([f for f in forms if not written or f[1] != [n, k - 1, 2]])
    return call(T(*shape), *([T(*size)] if written else []), size, stride, start)


def _slice(g: Draw) -> tuple[T, int, Any, Any, int, T]:
    """A tensor, its slice's arguments, and the slice."""
    c = g.one([1, 2, 4])
    lead = g.flag()
    first, last, taken = g.one([(0, MAX, c), (0, B, 1)] + ([((c // 2) * B, MAX, c // 2)] if c > 1 else []))
    if g.flag():  # on another dim
        shape, piece, dim, bounds = [c * B, 5], [c * B, 2], 1, (1, 3)
    else:
        shape, piece, dim, bounds = [c * B, 5], [taken * B, 5], 0, (first, last)
    if lead:
        shape, piece, dim = [2, *shape], [2, *piece], dim + 1
    return T(*shape), dim, bounds[0], bounds[1], 1, T(*piece)


def _cut(g: Draw) -> Call:
    x, *args, _ = _slice(g)
    return call(x, *args)


def _cut_backward(g: Draw) -> Call:
    x, dim, start, end, step, piece = _slice(g)
    return call(piece, sizes(x), dim, start, end, step)


def _put_back(g: Draw) -> Call:
    x, *args, piece = _slice(g)
    return call(x, piece, *args)


def _select(g: Draw) -> tuple[str, int, int, str]:
    dims = g.one(["2N", "N3", "a2N", "aN3"])
    dim = next(i for i, label in enumerate(dims) if label.isdigit())
    return dims, dim, g.one([0, 1, -1]), dims[:dim] + dims[dim + 1 :]


def _unfold(g: Draw) -> Call:
    return g.one([call(g.t("N5"), 1, 3, g.one([1, 2])), call(g.t("5Na"), 0, 2, 2)])


def _diagonal(g: Draw) -> tuple[str, int, int, int, str]:
    """Dims of a matrix batch, (offset, dim1, dim2), and the dims of the diagonal."""
    return g.one(
        [("NN", 0, 0, 1, "N"), ("N44", 0, 1, 2, "N4"), ("4N4", 0, 0, -1, "N4"), ("aNN", 0, -2, -1, "aN")]
    )


def _diagonal_backward(g: Draw) -> Call:
    dims, *where, piece = _diagonal(g)
    return call(g.t(piece), sizes(g.t(dims)), *where)


def _diagonal_scatter(g: Draw) -> Call:
    dims, *where, piece = _diagonal(g)
    return call(g.t(dims), g.t(piece), *where)


def _cat(g: Draw) -> Call:
    dims = g.dims(1, 3)
    at = g.dim(dims)
    dims = dims[:at] + "M" + (dims[at:][1:] if at != -1 else "") if g.flag() else dims
    return call([g.t(dims) for _ in range(g.one([1, 2, 3]))], at)


def _stack(g: Draw) -> Call:
    dims = g.dims(1, 3)
    return call([g.t(dims) for _ in range(g.one([1, 2, 3]))], g.dim(dims + "x"))


def _split(g: Draw, sized: bool) -> Call:
    if g.flag():
        return call(g.t("N5"), [2, 3] if sized else 2, 1)
    return call(T(2, "3*B"), ["B", "2*B"] if sized else g.one(["B", "2*B"]), -1)


def _unbind(g: Draw) -> Call:
    dims, dim, _, _ = _select(g)
    return call(g.t(dims), dim)


def _filled(g: Draw, *rest: Any) -> Call:
    return call(sizes(_one(g)), *rest)


def _new(g: Draw, *rest: Any) -> Call:
    return call(_one(g), sizes(_one(g)), *rest)


def _strides(shape: list[Dim]) -> list[Dim]:
    return [product(*shape[i + 1 :]) for i in range(len(shape))]


def _empty_strided(g: Draw, new: bool = False) -> Call:
    shape = sizes(g.t(g.one(["N", "Na", "aN", "N23"])))
    return call(*([_one(g)] if new else []), shape, _strides(shape), random=True)


def _window(g: Draw, *rest: Any) -> Call:
    return call(g.one([4, 7]), *rest, dtype=torch.float64)


def _spaced(g: Draw, *tensors: bool) -> Call:
    ends = [g.t("") if tensor else float(i) for i, tensor in enumerate(tensors)]
    return call(*ends, 5, dtype=torch.float64)


SAMPLES: dict[str, Maker] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_copy", "view_copy"), _view),
    **dict.fromkeys(("_reshape_alias", "_reshape_alias_copy"), _reshape_alias),
    **dict.fromkeys(
        ("view.dtype", "view_copy.dtype"), lambda g: call(g.t("Na"), g.one([torch.int64, torch.int32]))
    ),
    **dict.fromkeys(("expand", "expand_copy"), _expand),
    **dict.fromkeys(
        ("permute", "permute_copy"), lambda g: (lambda d: call(g.t(d), g.order(len(d))))(g.dims(1, 3))
    ),
    **dict.fromkeys(
        ("transpose.int", "transpose_copy.int"), lambda g: call(g.t("aNb"), g.dim("aNb"), g.dim("aNb"))
    ),
    **dict.fromkeys(("t", "t_copy"), lambda g: call(_one(g, 1, 2))),
    **dict.fromkeys(
        ("unsqueeze", "unsqueeze_copy"), lambda g: (lambda d: call(g.t(d), g.dim(d)))(g.dims(1, 3))
    ),
    **dict.fromkeys(("squeeze", "squeeze_copy"), lambda g: call(_squeeze(g))),
    **dict.fromkeys(("squeeze.dim", "squeeze_copy.dim"), lambda g: call(_squeeze(g), g.one([0, -1]))),
    **dict.fromkeys(("squeeze.dims", "squeeze_copy.dims"), lambda g: call(_squeeze(g), [0, -1])),
    **dict.fromkeys(
        ("view_as_real", "view_as_real_copy"), lambda g: call(g.t(g.dims(1, 3), dtype=torch.complex128))
    ),
    **dict.fromkeys(("view_as_complex", "view_as_complex_copy"), lambda g: call(g.t(g.dims(1, 2) + "2"))),
    "repeat": _repeat,
    **dict.fromkeys(("as_strided", "as_strided_copy"), _strided),
    "as_strided_scatter": lambda g: _strided(g, written=True),
    **dict.fromkeys(("slice.Tensor", "slice_copy.Tensor"), _cut),
    "slice_backward": _cut_backward,
    "slice_scatter": _put_back,
    **dict.fromkeys(
        ("select.int", "select_copy.int"), lambda g: (lambda s: call(g.t(s[0]), s[1], s[2]))(_select(g))
    ),
    "select_backward": lambda g: (lambda s: call(g.t(s[3]), sizes(g.t(s[0])), s[1], s[2]))(_select(g)),
    "select_scatter": lambda g: (lambda s: call(g.t(s[0]), g.t(s[3]), s[1], s[2]))(_select(g)),
    "narrow_copy": lambda g: call(g.t("N5"), 1, 1, 3),
    **dict.fromkeys(("unfold", "unfold_copy"), _unfold),
    "unfold_backward": lambda g: call(g.t("N33"), sizes(g.t("N5")), 1, 3, 1),
    **dict.fromkeys(
        ("diagonal", "diagonal_copy"), lambda g: (lambda s: call(g.t(s[0]), *s[1:4]))(_diagonal(g))
    ),
    "diagonal_backward": _diagonal_backward,
    "diagonal_scatter": _diagonal_scatter,
    "diag_embed": lambda g: call(g.t(g.dims(1, 2)), g.one([0, 1])),
    **dict.fromkeys(
        ("tril", "triu"), lambda g: call(g.t(g.one(["NN", "N34", "aN3", "3N"])), g.one([0, 1, -1]))
    ),
    "cat": _cat,
    **dict.fromkeys(("stack", "_stack"), _stack),
    "block_diag": lambda g: call([g.t("Na"), g.t("bN")]),
    "_chunk_cat": lambda g: call([g.t("4N"), g.t("4N")], 0, 2),
    **dict.fromkeys(("split.Tensor", "unsafe_split.Tensor", "split_copy.Tensor"), lambda g: _split(g, False)),
    **dict.fromkeys(
        ("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy"), lambda g: _split(g, True)
    ),
    **dict.fromkeys(("unbind.int", "unbind_copy.int"), _unbind),
    "full": lambda g: _filled(g, 2.0),
    **dict.fromkeys(("zeros", "ones"), _filled),
    "empty.memory_format": lambda g: call(sizes(_one(g)), random=True),
    "empty_strided": _empty_strided,
    "empty_permuted": lambda g: call(sizes(g.t("Na")), g.order(2), random=True),
    **dict.fromkeys(("new_zeros", "new_ones"), _new),
    "new_full": lambda g: _new(g, 3.0),
    "new_empty": lambda g: call(_one(g), sizes(_one(g)), random=True),
    "new_empty_strided": lambda g: _empty_strided(g, new=True),
    **dict.fromkeys(("zeros_like", "ones_like", "zero"), lambda g: call(_one(g))),
    "empty_like": lambda g: call(_one(g), random=True),
    **dict.fromkeys(("full_like", "fill.Scalar"), lambda g: call(_one(g), 2.0)),
    "arange": lambda g: call(g.n("N")),
    "arange.start": lambda g: call(0, g.n("N")),
    "arange.start_step": lambda g: call(0, g.n("N"), 1),
    "range": lambda g: call(1, 4),
    "range.step": lambda g: call(1, 4, 2),
    "eye": lambda g: call(g.n("N")),
    "eye.m": lambda g: call(g.n("N"), g.n("a")),
    "scalar_tensor": lambda g: call(2.0),
    **dict.fromkeys(("tril_indices", "triu_indices"), lambda g: call(3, g.one([2, 4]))),
    **dict.fromkeys(("linspace", "logspace"), lambda g: _spaced(g, False, False)),
    **dict.fromkeys(("linspace.Tensor_Scalar", "logspace.Tensor_Scalar"), lambda g: _spaced(g, True, False)),
    **dict.fromkeys(("linspace.Scalar_Tensor", "logspace.Scalar_Tensor"), lambda g: _spaced(g, False, True)),
    **dict.fromkeys(("linspace.Tensor_Tensor", "logspace.Tensor_Tensor"), lambda g: _spaced(g, True, True)),
    **{f"{kind}_window": _window for kind in ("hann", "hamming", "blackman", "bartlett", "kaiser")},
    **{
        f"{kind}_window.periodic": lambda g: _window(g, g.flag())
        for kind in ("hann", "hamming", "blackman", "bartlett", "kaiser")
    },
    "hamming_window.periodic_alpha": lambda g: _window(g, True, 0.5),
    "hamming_window.periodic_alpha_beta": lambda g: _window(g, True, 0.5, 0.4),
    "kaiser_window.beta": lambda g: _window(g, True, 10.0),
    **dict.fromkeys(("fft_fftfreq", "fft_rfftfreq"), lambda g: call(g.one([4, 5]), 0.5)),
}
