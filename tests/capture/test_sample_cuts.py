"""Where the micro-batches of a ragged batch end along each axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp import Rows
from fxdp.capture.sample_cuts import sample_cuts
from fxdp.module.calls.reader import CallReader

X, EDGES = Rows("nodes"), Rows("edges", dim=1, into="nodes")
BATCH, Y = Rows("nodes", into="graphs"), Rows("graphs")


def _cuts(
    rows: tuple[Rows | None, ...], values: tuple[Any, ...], microbatches: int = 2, block: int | None = None
) -> Any:
    reader = CallReader(nn.Linear(1, 1), (rows, {}), "cpu")
    tensors = tuple(torch.as_tensor(value) for value in values)
    return sample_cuts(reader.read(tensors, {}).inputs, microbatches, block).ends


def _edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()


def test_the_picture_of_the_docstring() -> None:
    edges = _edges((0, 1), (1, 2), (5, 4))
    batch = [0, 0, 0, 1, 2, 2]
    assert _cuts((X, EDGES, BATCH, Y), (torch.ones(6), edges, batch, torch.ones(3))) == ((1,), (3,), (2,))
    assert _cuts((X, EDGES), (torch.ones(6), edges)) == ((3,), (2,))
    assert _cuts((X, EDGES), (torch.ones(6), edges), 4) == ((0, 3, 4), (0, 2, 2))
    # in blocks of two graphs
    assert _cuts((X, EDGES, BATCH, Y), (torch.ones(6), edges, batch, torch.ones(3)), block=2) == (
        (2,), (4,), (2,),
    )  # fmt: skip


def test_empty_and_single_samples() -> None:
    none = _edges()
    assert _cuts((X, EDGES, BATCH, Y), (torch.ones(0), none, torch.ones(0).long(), torch.ones(0)), 3) == (
        (0, 0), (0, 0), (0, 0),
    )  # fmt: skip
    assert _cuts((X, BATCH, Y), (torch.ones(4), [0, 0, 0, 0], torch.ones(1))) in (((0,), (0,)), ((1,), (4,)))
    assert _cuts((X, EDGES), (torch.ones(3), _edges((0, 2), (2, 0)))) in (((0,), (0,)), ((3,), (2,)))
    assert _cuts((X, BATCH, Y), (torch.ones(4), [1, 1, 1, 3], torch.ones(4))) == ((2,), (3,))


def test_lengths_bounds_and_positions_say_which_rows_belong_together() -> None:
    words, values = Rows("words"), torch.ones(7)
    lengths, bounds = Rows("bags", lengths="words"), Rows("bags", bounds="words")
    assert _cuts((words, lengths), (values, [2, 0, 1, 4])) == ((3,), (3,))
    assert _cuts((words, bounds), (values, [0, 2, 2, 3, 7])) == ((3,), (3,))
    assert _cuts((words, Rows("words", within="texts")), (values, [0, 1, 0, 0, 1, 2, 3])) == ((3,),)
    patches, images = Rows("patches"), Rows("images", lengths="patches")
    assert _cuts((patches, images), (values, [[1, 2, 2], [1, 3, 1]])) == ((1,), (4,))


def test_weights_are_rows_of_all_axes() -> None:
    edges = _edges(*[(0, 1)] * 9, (2, 3))
    assert _cuts((X, EDGES, BATCH, Y), (torch.ones(8), edges, [0, 0, 1, 1, 1, 1, 2, 2], torch.ones(3))) == (
        (1,), (2,), (9,),
    )  # fmt: skip


def test_packed_documents() -> None:
    tokens, positions = Rows("tokens"), Rows("tokens", within="documents")
    assert _cuts((tokens, positions), (torch.ones(7), [0, 1, 2, 0, 1, 0, 1])) == ((3,),)
    bounds, own = Rows("documents", bounds="tokens"), Rows("documents")
    given = torch.ones(7), [0, 1, 2, 0, 1, 0, 1], [0, 3, 3, 5, 7], torch.ones(4)
    assert _cuts((tokens, positions, bounds, own), given) == ((2,), (3,))


def test_pairs_join_the_axes_of_both() -> None:
    """Item 1 is with user 0 and item 0 with user 1, so these users stay together; item 2 has no user."""
    rows = Rows("users"), Rows("items"), Rows("pairs", dim=1, into=("users", "items"))
    assert _cuts(rows, (torch.ones(4), torch.ones(5), _edges((0, 1), (0, 1), (1, 0), (3, 3)))) == (
        (2,), (3,), (3,),
    )  # fmt: skip
    assert _cuts(rows, (torch.ones(0), torch.ones(3), _edges()), 1) == ((), (), ())
    with pytest.raises(fxdp.InputError, match="point into no other are 'users' and 'items'"):
        _cuts(rows, (torch.ones(4), torch.ones(5), _edges((0, 1))), block=2)


@pytest.mark.parametrize(
    ("rows", "values", "text"),
    [
        (
            (X, EDGES, BATCH, Y),
            (torch.ones(4), _edges((2, 3), (0, 1)), [0, 0, 1, 1], torch.ones(2)),
            r"args\[1\]: rows of 'edges' before and after row 2 of 'nodes' do not stand apart",
        ),
        (
            (X, BATCH, Y),
            (torch.ones(4), [0, 1, 0, 1], torch.ones(2)),
            r"args\[1\]: rows of 'nodes' before and after row 1 of 'graphs'",
        ),
        ((X, Y), (torch.ones(4), torch.ones(2)), r"point into no other are 'nodes' and 'graphs'"),
        (
            (Rows("a", into="b"), Rows("b", into="a"), Y),
            ([0, 1], [0, 1], torch.ones(2)),
            "point into each other",
        ),
    ],
)
def test_rows_that_cannot_be_cut_are_refused(
    rows: tuple[Rows, ...], values: tuple[Any, ...], text: str
) -> None:
    with pytest.raises(fxdp.InputError, match=text):
        _cuts(rows, values)
