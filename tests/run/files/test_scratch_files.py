"""Files from before a run, which rank 0 changes before other ranks have come there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxdp.run.files.scratch_files import NotedFiles, ScratchFiles


def test_a_late_rank_sees_files_as_they_were(tmp_path: Path) -> None:
    run, work = tmp_path / "run", tmp_path / "work"
    run.mkdir()
    work.mkdir()
    counter, gone, made = work / "runs.txt", work / "gone.txt", work / "made.txt"
    counter.write_text("7")
    gone.write_text("there")
    first, late = NotedFiles(run / "journal"), ScratchFiles(run / "rank1", run / "journal")
    for text in ("8", "9"):
        Path(first.written(counter)).write_text(text)
    first.changed(gone)
    gone.unlink()
    for text in ("new", "newer"):
        Path(first.written(made)).write_text(text)

    assert Path(late.read(counter)).read_text() == "7"
    assert Path(late.read(gone)).read_text() == "there"
    assert sorted(late.names(work)) == ["gone.txt", "runs.txt"]
    with late.scan(work) as entries:  # as `os.walk` reads them
        assert {next(entries).name, *(entry.name for entry in entries)} == {"gone.txt", "runs.txt"}
    with open(late.written(counter, keep=True), "a") as file:
        file.write("!")
    assert Path(late.read(counter)).read_text() == "7!"
    late.remove(gone)
    assert not late.exists(gone)
    with pytest.raises(FileNotFoundError):
        late.read(made)
    assert counter.read_text() == "9"


def test_what_rank_0_makes_while_a_rank_asks_is_not_there(tmp_path: Path) -> None:
    made, reads = tmp_path / "made.txt", list[None]()
    first, late = NotedFiles(tmp_path / "journal"), ScratchFiles(tmp_path / "rank1", tmp_path / "journal")
    read = late._noted.read

    def make_after_the_last() -> None:
        read()
        reads.append(None)
        if len(reads) == 4:  # of the folder, and then of the file
            Path(first.written(made)).write_text("rank 0's")

    late._noted.read = make_after_the_last  # type: ignore[method-assign]
    with open(late.written(made, keep=True), "a") as file:
        file.write("its own")
    assert Path(late.read(made)).read_text() == "its own"
    assert made.read_text() == "rank 0's"
