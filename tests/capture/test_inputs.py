from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxdp.capture.batch_dims import resolve_batch_dims
from fxdp.capture.export.exported import batch_hint, make_examples, static_hints
from fxdp.capture.inputs import read_inputs
from fxdp.capture.leaves import flat_leaves
from fxdp.errors import InputError

X = torch.zeros(4, 3)
S = torch.zeros(())


@pytest.mark.parametrize(
    ("args", "kwargs", "batch_dims", "expected"),
    [
        ((X, S), {"y": [X, 3]}, None, [0, None, 0]),
        ((X, S), {"y": [X, 3]}, 1, [1, None, 1]),
        ((X, S), {"y": [X, 3]}, ((0, None), {"y": None}), [0, None, None]),
        ((X, S), {"y": [X, 3], "z": X}, ((0, None), {"z": -1}), [0, None, 0, 1]),
        ((X, X), {}, (None, {}), [None, None]),
        ((X, X), {}, ((1, None), 0), [1, None]),
    ],
)
def test_resolved(args, kwargs, batch_dims, expected) -> None:
    assert resolve_batch_dims(args, kwargs, batch_dims) == expected


@pytest.mark.parametrize("batch_dims", [((0, 0, 0), {}), 2, ((0, 0), {"w": 0}), "x", ((0, [0]), {})])
def test_refused(batch_dims) -> None:
    with pytest.raises(InputError, match="batch_dims"):
        resolve_batch_dims((X, X), {}, batch_dims)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((X,), {}), ((X, 2, None), {"y": S, "mode": "sum"}), (([X],), {"y": {"z": S}})],
)
def test_a_call_has_one_structure_whether_or_not_its_arguments_are_leaves(args, kwargs) -> None:
    leaves, spec = flat_leaves(args, kwargs)
    wanted, structure = pytree.tree_flatten((args, kwargs))
    assert len(leaves) == len(wanted)
    assert all(leaf is other for leaf, other in zip(leaves, wanted, strict=True))
    assert (spec, str(spec)) == (structure, str(structure)), "ranks may find the structure in different ways"


def test_hints_avoid_the_other_sizes() -> None:
    x = torch.zeros(0, 7, 11, 5)
    sizes = read_inputs(nn.Identity(), (x,), {}).fixed_sizes
    assert batch_hint(sizes) == 13
    assert static_hints(sizes) == (3, 10, 13, 17)
    (example,) = make_examples([x.requires_grad_()], [0], [13])
    assert example.shape == (13, 7, 11, 5)
    assert example.requires_grad


@pytest.mark.filterwarnings("ignore")  # torch warns of the class itself
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_by_name(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(4, 3)], layout=layout)
    with pytest.raises(InputError, match=r"^input: a nested tensor .*to_padded_tensor"):
        read_inputs(nn.Linear(3, 3), (nested,), {})


@pytest.mark.filterwarnings("ignore")  # torch warns of the class itself
def test_quantized_tensors_are_refused_by_name() -> None:
    quantized = torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    with pytest.raises(InputError, match=r"^input: a quantized tensor, .*dequantize"):
        read_inputs(nn.Linear(3, 3), (quantized,), {})
