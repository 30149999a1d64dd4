"""Sizes to trace with are ordinary numbers, and make sense together."""

from __future__ import annotations

import itertools

from fxdp.lowering.shapes import Shapes


def test_open_sizes_are_ordinary_and_a_part_lies_inside_of_the_batch() -> None:
    for batches in itertools.product(range(5), repeat=3):
        of_all = []
        for rank, own in enumerate(batches):
            sizes = {"B": sum(batches), "b": own, "offset": sum(batches[:rank]), "b_max": max(batches)}
            _, found = Shapes({**sizes, "s0": 1}, generic=True, single=False).trace_sizes()
            hints = {name: size.node.hint for name, size in found.items()}
            assert min(hints.values()) >= 2
            assert len(set(hints.values())) == len(hints)
            assert hints["b_max"] - hints["b"] >= 2
            assert hints["B"] - hints["offset"] - hints["b_max"] >= 2
            of_all.append(hints)
        assert of_all[1:] == of_all[:-1], "ranks trace the same program"


def test_fixed_sizes_are_what_they_are() -> None:
    sizes = {"B": 1, "b": 0, "offset": 1, "b_max": 1}
    assert Shapes(sizes, generic=False, single=False).trace_sizes()[1] == sizes
