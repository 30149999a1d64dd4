"""Packages that open files by their names in C++ or Rust, imported before and while a script runs."""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxdp.run.files import native_calls
from fxdp.run.files.file_calls import FileCalls
from fxdp.run.files.native_calls import Opens
from fxdp.run.files.scratch_files import ScratchFiles

_PACKAGE = """
import os

class Store:
    def save(self, path):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT), "w") as file:
            file.write("text")

    @staticmethod
    def load(path):
        return os.fspath(path)
"""


@pytest.mark.parametrize("imported", ["before", "inside"])
def test_a_function_that_opens_files_by_name_gets_the_ranks_own(
    imported: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"package_imported_{imported}"
    (tmp_path / f"{name}.py").write_text(_PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)
    functions = (Opens("Store.save", 1, "path", writes=True), Opens("Store.load", 0, "path"))
    monkeypatch.setattr(native_calls, "FUNCTIONS", {name: functions})
    scratch, work = tmp_path / "rank1", tmp_path / "work"
    work.mkdir()
    (work / "old.bin").touch()
    calls = FileCalls(ScratchFiles(scratch, tmp_path / "journal"), str(tmp_path / "run"))
    if imported == "before":
        importlib.import_module(name)
    with native_calls.native_calls(calls):
        package: Any = importlib.import_module(name)
        package.Store().save(work / "new.bin")
        package.Store().save(path=str(work / "named.bin"))
        read = [package.Store.load(str(work / file)) for file in ("old.bin", "new.bin", "named.bin")]
    assert read == [f"{work}/old.bin", f"{scratch}{work}/new.bin", f"{scratch}{work}/named.bin"]
    assert [file.name for file in work.iterdir()] == ["old.bin"]
    assert package.Store.load("new.bin") == "new.bin"
    del sys.modules[name]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_is_saved_to_the_ranks_own_file(tmp_path: Path) -> None:
    calls = FileCalls(ScratchFiles(tmp_path / "rank1", tmp_path / "journal"), str(tmp_path / "run"))
    traced: Any = torch.jit.trace(nn.Linear(1, 1), torch.ones(1, 1))  # type: ignore[no-untyped-call]
    with native_calls.native_calls(calls):
        traced.save(str(tmp_path / "traced.pt"))
    assert not (tmp_path / "traced.pt").exists()


@pytest.mark.parametrize("name", ["torch.jit", "torch.export"])
def test_the_functions_of_the_table_are_torchs(name: str) -> None:
    for opens in native_calls.FUNCTIONS[name]:
        function: Any = reduce(getattr, opens.function.split("."), importlib.import_module(name))
        assert [*inspect.signature(function).parameters][opens.position] == opens.argument
