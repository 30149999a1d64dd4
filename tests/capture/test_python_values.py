"""Python values in words."""

from __future__ import annotations

import pytest
import torch

from fxdp.capture.python_values import stable_text


class Plain:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, True, "x"), "(1, True, 'x',)"),
        (frozenset("ba"), "frozenset([\"'a'\", \"'b'\"])"),
        (torch.float32, "torch.float32"),
        (Plain(), "<tests.capture.test_python_values.Plain object>"),
        ((Plain(),), "(<tests.capture.test_python_values.Plain object>,)"),
        ("at the door", "'at the door'"),
    ],
)  # fmt: skip
def test_text(value: object, text: str) -> None:
    assert stable_text(value) == text


def test_other_values_have_other_texts() -> None:
    values = [(1,), (1.0,), ("1",), (True,), ((1,),), (1, 2), frozenset([1]), None]
    assert len({stable_text(value) for value in values}) == len(values)
