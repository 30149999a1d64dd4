"""What ranks say comes back as it was, whatever it is; what is none of it is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.ranks.tree.rank_parts import RankParts

_NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3)


def _row(columns: int) -> st.SearchStrategy[bytes]:
    numbers = st.lists(_NUMBERS, min_size=columns, max_size=columns)
    return numbers.map(lambda row: struct.pack(f"<{len(row)}q", *row))


_ROWS = st.integers(1, 4).flatmap(lambda columns: st.lists(_row(columns), min_size=1, max_size=40))
_SAID = _ROWS | st.lists(st.binary(max_size=20), min_size=1, max_size=40)


def _process_mesh(said: list[bytes], cut: int) -> RankParts:
    """As they come together: one by one, and sets of several that travelled."""
    first = RankParts.join([RankParts.of(data) for data in said[:cut]]) if cut else None
    parts = [RankParts.decode(first.encode(), cut)] if first is not None else []
    return RankParts.join(parts + [RankParts.of(data) for data in said[cut:]])


@settings(deadline=None)
@given(_SAID, st.data())
def test_nothing_is_lost(said: list[bytes], data: st.DataObject) -> None:
    process_mesh = _process_mesh(said, data.draw(st.integers(0, len(said))))
    order = data.draw(st.permutations(range(len(said))))
    assert list(process_mesh) == said
    assert [process_mesh[i] for i in (0, -1)] == [said[0], said[-1]]
    wanted = [said[place] for place in order]
    assert list(RankParts.decode(process_mesh.ordered(order).encode(), len(said))) == wanted
    assert [process_mesh[i] for i in range(len(said))] == said


_SENT = _ROWS.map(lambda rows: RankParts.join([RankParts.of(row) for row in rows]).encode())


@settings(deadline=None)
@given(st.binary(max_size=60) | _SENT, st.data())
def test_damage_is_refused_or_read_as_other_values(text: bytes, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    damaged = bytearray(text)
    for _ in range(min(len(damaged), data.draw(st.integers(0, 3)))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = RankParts.decode(bytes(damaged), count)
    except ValueError:
        return
    assert len(list(found)) == count


@pytest.mark.parametrize(("form", "size"), [(1, 2**32 - 8), (2, 2**32 - 1), (0, 2**32 - 1), (9, 0), (1, 0)])
def test_sizes_are_checked_before_anything_is_made_of_them(form: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"rows|values|form"):
        RankParts.decode(struct.pack("<BII", form, 2, size) + b"12345678", 2)


def test_long_texts_are_no_rows() -> None:
    text = bytes(8_000_000)
    found = RankParts.join([RankParts.of(text), RankParts.of(text[:-1] + b"x")])
    assert found.columns is None
    assert list(RankParts.decode(found.encode(), 2)) == list(found)


def test_what_all_say_alike_is_one_value() -> None:
    row = struct.pack("<8q", *range(8))
    alike = RankParts.join([RankParts.of(row, 5000), RankParts.of(row)])
    assert len(alike.encode()) == 9 + 64
    other = RankParts.of(struct.pack("<8q", 200, *range(1, 8)))
    assert len(RankParts.join([alike, other]).encode()) == 9 + 8 * 9 + 5002
