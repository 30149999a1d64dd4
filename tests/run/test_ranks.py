"""Ranks of a script: files are written once and seen by all, a rank that fails ends all."""

from __future__ import annotations

import signal
import sys
import textwrap
from pathlib import Path

import pytest

from fxdp.errors import StateError
from fxdp.run.ranks import _Rank, _told, start_ranks
from tests.run.running import on_ranks

_RANK = """
import os, sys, time
rank = int(os.readlink("/proc/self/fd/1").endswith("rank1.txt"))
"""


_OUT = "False False False\nab True\n['file.txt', 'logs', 'saved.txt', 'train.py']\n"


def _script(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(_RANK + textwrap.dedent(text))
    return script


def test_a_file_is_new_on_each_rank_and_written_once_until_the_disk_is_full(tmp_path: Path) -> None:
    script = _script(tmp_path, """
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "file.txt")
        time.sleep(rank)  # rank 0 has written it meanwhile
        print(os.access(path, os.R_OK), os.path.exists(path), "file.txt" in os.listdir(os.path.dirname(path)))
        for text in ("a", "b"):
            with open(path, "a") as file:
                file.write(text)
        print(open(path).read(), os.access(path, os.W_OK), flush=True)
        assert os.environ.get("WANDB_MODE") == ("offline" if rank else None)
        import resource, tempfile
        folder = os.path.dirname(path)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write("at once")
        os.replace(file.name, os.path.join(folder, "saved.txt"))
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            print(sorted(set(os.listdir(folder)) - {os.path.basename(file.name)}), flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, 5))
        with open(path, "ab", buffering=0) as file:
            file.write(b"cdefg")
            file.write(b"hij")
        """)  # fmt: skip
    (tmp_path / "saved.txt").write_text("by an earlier run")
    ended = on_ranks(2, script, options=("--logs", str(tmp_path / "logs")))
    assert (ended.code, ended.out) == (1, _OUT), ended.err
    assert "OSError: [Errno 27] File too large\n" in ended.err
    assert (tmp_path / "logs" / "rank1.txt").read_text().startswith(ended.out)
    assert (tmp_path / "file.txt").read_text() == "abcde"
    assert (tmp_path / "saved.txt").read_text() == "at once"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["file.txt", "logs", "saved.txt", "train.py"]
    assert [found.name for found in (tmp_path / "logs").iterdir()] == ["rank1.txt"]


def test_a_rank_that_fails_alone_ends_all_with_its_words(tmp_path: Path) -> None:
    script = _script(tmp_path, """
        import torch
        from torch.utils.data import DataLoader
        for step in range(1000):
            for batch in DataLoader(torch.randn(4, 2), 4):
                if step == 3 and rank:
                    raise ValueError("only here")
        """)  # fmt: skip
    ended = on_ranks(2, script)
    assert ended.code == 1
    assert "rank 1 failed: ValueError: only here" in ended.err


def test_a_script_that_is_no_python_is_told_as_by_python(tmp_path: Path) -> None:
    script = _script(tmp_path, "def train(:\n")
    said = on_ranks(2, script).err
    assert "SyntaxError: invalid syntax\n(on rank 0, host " in said
    assert "fxdp/run/" not in said
    assert "call" not in said, "none was made"


@pytest.mark.parametrize(
    ("asked", "told"), [(signal.SIGINT, "fxdp run: ended by SIGINT\n"), (0, "of SIGTERM")]
)
def test_ranks_that_the_user_interrupts_are_not_told_to_have_died(
    asked: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = [_Rank(1, -signal.SIGTERM), _Rank(2, -signal.SIGTERM)]
    assert _told(ended, tmp_path, asked) == 128 + (asked or signal.SIGTERM)
    said = capsys.readouterr().err
    assert told in said
    assert said.count("\n") == (1 if asked else 2)


def test_another_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(StateError, match="and this is darwin; expected Linux"):
        start_ranks(2, tmp_path)
