"""Rows that ranks show each other: entire without a copy, as they were written last, and given back."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fxdp.errors import StateError
from fxdp.transport import shared_windows
from fxdp.transport.shared_windows import SharedWindows
from tests.ranks.comms.test_messages import _ranks
from tests.ranks.tree.small_trees import together

_PAGE = mmap.PAGESIZE // 8
"""Elements of float64 in a page."""
_SIZES = (2 * _PAGE, _PAGE)


@contextlib.contextmanager
def _windows(size: int) -> Iterator[list[SharedWindows]]:
    """Ranks in one process, which open one another's memory as other processes would."""
    with _ranks(size) as messages:
        made = [SharedWindows(one, size) for one in messages]
        yield made
        for one in made:
            one.close()


def _rows(region_windows: SharedWindows) -> Tensor:
    """A rank's rows of two values, with room behind them; each rank's are other numbers."""
    rows = region_windows.memory(sum(_SIZES) + 1, torch.float64)
    rows[:-1] = torch.arange(sum(_SIZES)) + 10_000 * region_windows.messages.rank
    return rows


def _seen(region_windows: SharedWindows, values: list[Tensor]) -> Tensor:
    """The entire as it is now."""
    full, begun = region_windows.start(values)
    region_windows.finish(begun)
    found = full.clone()
    region_windows.settle()
    return found


def _wanted(ranks: int, more: float = 0) -> Tensor:
    each = [torch.arange(float(sum(_SIZES)), dtype=torch.float64) + 10_000 * r + more for r in range(ranks)]
    parts = [one.split(list(_SIZES)) for one in each]
    return torch.cat([parts[rank][place] for place in range(len(_SIZES)) for rank in range(ranks)])


@pytest.mark.parametrize("size", [2, 3])
def test_the_whole_is_what_all_ranks_have_at_that_moment(size: int) -> None:
    def action(region_windows: SharedWindows) -> list[bool]:
        rows = _rows(region_windows)
        values = list(rows[:-1].split(list(_SIZES)))
        first = torch.equal(_seen(region_windows, values), _wanted(size))
        rows[:-1] += 0.5
        return [first, torch.equal(_seen(region_windows, values), _wanted(size, 0.5))]

    with _windows(size) as region_windows:
        assert together(region_windows, action) == [[True, True]] * size


def test_a_window_is_made_once_for_rows_that_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[int] = []
    show = shared_windows.Window.show
    monkeypatch.setattr(
        shared_windows.Window, "show", lambda self, at, *rest: (shown.append(at), show(self, at, *rest))[1]
    )

    def action(region_windows: SharedWindows) -> None:
        values = list(_rows(region_windows)[:-1].split(list(_SIZES)))
        for _ in range(3):
            _seen(region_windows, values)

    with _windows(2) as region_windows:
        together(region_windows, action)
    assert len(shown) == 2 * 2 * len(_SIZES)


def test_rows_that_one_rank_has_put_elsewhere_are_seen_all_the_same() -> None:
    def action(region_windows: SharedWindows) -> list[bool]:
        rows = _rows(region_windows)
        values = list(rows[:-1].split(list(_SIZES)))
        right = [torch.equal(_seen(region_windows, values), _wanted(2))]
        if region_windows.messages.rank == 1:
            values = [value.clone() for value in values]
        for more in (0.25, 0.5):
            for value in values:
                value += 0.25
            right.append(torch.equal(_seen(region_windows, values), _wanted(2, more)))
        return right

    with _windows(2) as region_windows:
        assert together(region_windows, action) == [[True] * 3] * 2


def test_memory_is_given_back_when_its_rows_are_gone() -> None:
    def ours(folder: str) -> int:
        if folder == "maps":
            return Path("/proc/self/maps").read_text().count("memfd:fxdp-rows")
        comms = (f for f in Path("/proc/self/fd").iterdir() if f.is_symlink())
        return sum("memfd:fxdp-rows" in os.readlink(link) for link in comms)

    def action(region_windows: SharedWindows) -> None:
        _seen(region_windows, list(_rows(region_windows)[:-1].split(list(_SIZES))))

    gc.collect()
    before = ours("fd"), ours("maps")
    with _windows(2) as region_windows:
        together(region_windows, action)
        gc.collect()
        assert (ours("fd"), ours("maps")) == before


def test_too_many_pages_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: shared_windows.Window, *where: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    def action(region_windows: SharedWindows) -> str:
        with pytest.raises(StateError) as caught:
            _seen(region_windows, list(_rows(region_windows)[:-1].split(list(_SIZES))))
        return str(caught.value)

    monkeypatch.setattr(shared_windows.Window, "show", full)
    with _windows(2) as region_windows:
        assert all("raise vm.max_map_count" in text for text in together(region_windows, action))
