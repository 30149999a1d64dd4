"""Scripts that reach outside of themselves: once, as one process would, or refused with the line."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import sqlite3
from pathlib import Path

from tests.run.running import SCRIPTS, on_one_device, on_ranks

_SCRIPT = SCRIPTS / "outside.py"
_INPUT = "ann\none\ntwo\n"
_REFUSED = (
    "starts 2 processes by torch.multiprocessing; expected one process",
    "calls init_process_group for 4 ranks; expected one process",
    "starts a process with WORLD_SIZE=2; expected one process",
    "starts torchrun; expected one process",
    "shards a model by FSDP; expected the plain model",
    "writes to a program by os.popen; expected subprocess.run",
)


def test_input_programs_processes_and_data_bases_are_those_of_one_process(tmp_path: Path) -> None:
    files = []
    for name in ("one", "ranks"):
        folder = tmp_path / name
        folder.mkdir()
        with sqlite3.connect(folder / "old.db") as base:
            base.execute("create table runs (loss real)")
        with contextlib.chdir(folder):
            if name == "one":
                one = on_one_device(_SCRIPT, text=_INPUT)
            else:
                ranks = on_ranks(2, _SCRIPT, "refused", text=_INPUT)
        files.append({file.name: file.read_text() for file in folder.glob("*.txt")})
        for name in ("old.db", "new.db"):
            assert sqlite3.connect(folder / name).execute("select count(*) from runs").fetchone() == (1,)
        assert bz2.decompress((folder / "log.bz2").read_bytes()) == b"once\n"
        assert gzip.decompress((folder / "left_open.gz").read_bytes()) == b"never closed"
    assert one.code == 0, one.err
    assert ranks.out.startswith(one.out), ranks.err
    assert files[1] == files[0] == {
        "children.txt": "0\n1\n2\n0\n1\n2\n", "programs.txt": "once\nsystem\n",
        "left_open.txt": "never closed\n",
    }  # fmt: skip
    words = ranks.out.removeprefix(one.out).splitlines()
    assert len(words) == len(_REFUSED)
    for word, expected in zip(words, _REFUSED, strict=True):
        assert expected in word
        assert "outside.py:" in word
    assert ranks.code == 1
    assert "expected os.environ.get('LOCAL_RANK', '0')" in ranks.err
    assert "fxdp/run" not in ranks.err, "an error has the script's own lines"
