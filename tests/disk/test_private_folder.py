"""Files of one user, written in full, the oldest ones removed; folders that others can write are refused."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path

import pytest

from fxdp.disk.private_folder import PrivateFolder, UnusableFolderError


def _folder(path: Path, limit: int = 1000) -> PrivateFolder:
    return PrivateFolder(path / "own", limit)


def test_a_file_is_read_as_it_was_written_in_a_private_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert folder.read("a") is None
    folder.write("a", b"one")
    folder.write("a", b"two")
    assert folder.read("a") == b"two"
    assert os.listdir(folder.path) == ["a"]
    assert os.stat(folder.path).st_mode & 0o777 == 0o700
    folder.remove("a")
    folder.remove("a")
    assert folder.read("a") is None


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    folder = _folder(tmp_path)
    folder.write("a", b"one")
    folder.path.chmod(mode)
    for use in (lambda: folder.read("a"), lambda: folder.write("a", b"two")):
        with pytest.raises(
            UnusableFolderError, match=rf"own can be written by others \(mode {mode:o}\): chmod"
        ):
            use()
    folder.path.chmod(0o755)
    assert folder.read("a") == b"one"


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder(tmp_path)
    folder.write("a", b"one")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UnusableFolderError, match=r"own belongs to user .*, not to 12345"):
        folder.read("a")


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    folder.write("a", b"one")
    (folder.path / "b").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"foreign")
    (tmp_path / "link").symlink_to(folder.path)
    for found in (folder, PrivateFolder(tmp_path / "link", 10)):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            found.read("b")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder(tmp_path)
    folder.write("a", b"one")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space left"):
        folder.write("a", b"two")
    assert folder.read("a") == b"one"
    assert os.listdir(folder.path) == ["a"]


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 1000)
    for age, name in enumerate("abc"):
        folder.write(name, bytes(300))
        os.utime(folder.path / name, (age, age))
    (folder.path / ".tmp-killed").write_bytes(b"")
    os.utime(folder.path / ".tmp-killed", (0, 0))
    (folder.path / ".tmp-under-way").write_bytes(b"")
    assert folder.read("a") is not None  # now used last
    folder.write("d", bytes(300))
    assert sorted(os.listdir(folder.path)) == [".tmp-under-way", "a", "c", "d"]
    folder.write("larger than all", bytes(1001))
    assert sorted(os.listdir(folder.path)) == [".tmp-under-way", "a", "c", "d"]


def test_a_reader_beside_a_writer_finds_whole_files(tmp_path: Path) -> None:
    folder, size = _folder(tmp_path, 10**7), 200_000
    child = os.fork()
    if child == 0:  # the writer, until it is killed
        try:
            for iteration in itertools.count():
                folder.write("a", bytes([iteration % 5]) * size)
        finally:
            os._exit(1)
    found, seen = [], set[int]()
    try:
        while len(found) < 50 or len(seen) < 3:  # of several values
            ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            assert ended is None, "the writer failed"
            content = folder.read("a")
            if content is not None:
                found.append(len(content) == size and len(set(content)) == 1)
                seen.add(content[0])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert all(found)
