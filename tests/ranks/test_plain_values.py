"""What ranks tell each other is text: it comes back as it was, and nothing in it runs."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from fxdp.ranks.plain_values import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None, True, -(2**80), 0.1, float("inf"), "a \u4e2d \ud800 \x1b", b"\x00\xff", (), ((), ((1, 2),)),
        [1, [2]], {0: "a", (1, "b"): None}, ({}, {"w": (1.5, "x")}), frozenset({"a", "b"}), (4, ["a", "b"]),
    ],
)  # fmt: skip
def test_values_come_back(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


def test_what_is_not_plain_is_refused_where_it_is_said() -> None:
    for value in (Path("x"), object(), (1, [b"", Path])):
        with pytest.raises(TypeError, match="cannot be told to other ranks"):
            encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", pickle.dumps(1), b"[]", b'["what", 1]', b'["bytes", "?"]', b'["bytes"]', b'["dict", 1]',
        b'{"a": 1}', b"[" * 100_000, b'["set", ["list"]]', b"[[1]]", b"9" * 5000,
    ],
)  # fmt: skip
def test_what_is_no_value_is_one_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="no value of fxdp's"):
        decode(data)
