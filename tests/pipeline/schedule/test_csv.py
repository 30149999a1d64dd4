"""Schedules that the user writes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fxdp.errors import DeadlockError, ScheduleError
from fxdp.pipeline.schedule.catalogue import _SCHEDULES, make
from fxdp.pipeline.schedule.csv import parse, write
from tests.limits import scaled


def test_every_schedule_survives_being_written() -> None:
    for name in _SCHEDULES:
        made = make(name, 6, 3, 4)
        assert parse(write(made), name) == made


def test_torchs_words() -> None:
    text = "0UNSHARD,0F0,0SEND_F0,,1RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0, 1F0 ,1I0,1SEND_B0,1W0,\n\n"
    schedule = parse(text)
    assert [" ".join(map(str, row)) for row in schedule.ranks] == ["0F0 0B0", "1F0 1I0 1W0"]
    assert (schedule.stages, schedule.microbatches, schedule.placement) == (2, 1, (0, 1))


def test_overlapped_actions_run_one_after_the_other() -> None:
    schedule = parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    assert [str(a) for a in schedule.ranks[0]] == ["0F0", "0F1", "0B0", "0B1"]


def test_torch_writes_what_we_read(tmp_path: Path) -> None:
    """The words are those of torch's own schedule."""
    from torch.distributed.pipelining import schedules

    names = {kind.value for kind in schedules._ComputationType}
    for name in names - {"F", "B", "I", "W", "OVERLAP_F_B"}:
        assert len(parse(f"0{name}0,0F0,0B0").ranks[0]) == 2, name
    for row in make("zero-bubble", 2, 2, 2).ranks:
        assert [str(schedules._Action.from_str(str(a))) for a in row] == [str(a) for a in row]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("0F0,0X0\n1F0,B", "row 0: `0X0` is no action(.|\n)*row 1: `B` is no action"),
        ("0F0,0B0\n2F0,2B0", "has 3 stages, but nothing of 1"),
        ("0F0,0B0\n99999999F0", r"has 100000000 stages, but nothing of 1, 2, 3 and 99999995 more"),
        ("0F0,0F1,0F99999999", r"has 100000000 micro-batches, but nothing of 2, 3, 4 and 99999994 more"),
        ("0F0,0B0\n\n1F0,1B0", "has nothing in row 1"),
        ("0F0,0B0\n0F1,0B1", "0F1 is on rank 1, but its stage is on rank 0"),
        ("0F\u0661,0B0", "`0F\u0661` is no action"),
        ("0F" + "1" * 5000, "row 0: `0F1{38}` is no action"),
        ("x" * 200_000, "is no table of actions: field larger than"),
        (",".join(["x"] * 100), r"(row 0: `x` is no action.*\n  ){16}and 84 more"),
    ],
)
def test_bad_texts(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse(text)


def test_a_long_schedule_is_checked_in_linear_time() -> None:
    count = 4096
    forwards, backwards = (",".join(f"0{kind}{i}" for i in range(count)) for kind in "FB")
    begin = time.process_time()
    assert parse(f"{forwards},{backwards}").microbatches == count
    assert time.process_time() - begin < scaled(5.0)  # a quadratic check takes minutes


def test_what_is_no_plain_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(ScheduleError, match="cannot be read: it is no plain file"):
        make(str(tmp_path / "pipe.csv"), 2, 2, 2)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(write(make("1f1b", 4, 2, 3)))
    assert make(str(path), 4, 2, 3).ranks == make("1f1b", 4, 2, 3).ranks
    with pytest.raises(ScheduleError, match=r"is made for 4 stages, not 2, 3 micro-batches, not 8: expected"):
        make(str(path), 2, 2, 8)
    with pytest.raises(ScheduleError, match="cannot be read"):
        make(str(tmp_path / "none.csv"), 4, 2, 3)
    path.write_text("0F0,0F1\n1F0,1F1\n")
    with pytest.raises(ScheduleError, match="has forwards only: expected a B"):
        make(str(path), 2, 2, 2)
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises(DeadlockError, match="rank 1 is at 1F1, which needs 0F1 of rank 0"):
        make(str(path), 2, 2, 2)
