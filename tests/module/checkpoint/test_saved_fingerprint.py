from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxdp


def _made(**options: Any) -> fxdp.CompiledModule:
    torch.manual_seed(0)
    return fxdp.compile(nn.Linear(3, 2), backend="eager", **options)


def test_a_checkpoint_of_other_bits_is_refused_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = _made(numerics=fxdp.Bitwise(block=4))
    fxdp.save(tmp_path / "run", saved, step=3)
    same, other = _made(numerics=fxdp.Bitwise(block=4)), _made(numerics=fxdp.Bitwise(block=2))
    assert fxdp.load(tmp_path / "run", same) == 3
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    monkeypatch.setattr("torch.get_num_threads", lambda: 97)
    with pytest.raises(fxdp.InputError, match=r"other bits.*\n  threads: .*, now 97\n  block .*: 4, now 2\n"):
        fxdp.load(tmp_path / "run", other)
    assert all(not parameter.any() for parameter in other.parameters())  # nothing was loaded
    assert fxdp.load(tmp_path / "run", other, other_bits=True) == 3
    assert all(map(torch.equal, other.parameters(), saved.parameters()))


def test_without_a_promise_any_machine_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bitwise, exact = _made(numerics=fxdp.Bitwise(block=4)), _made()
    fxdp.save(tmp_path / "exact", exact)
    fxdp.save(tmp_path / "bitwise", bitwise)
    monkeypatch.setattr("torch.get_num_threads", lambda: 97)
    assert fxdp.load(tmp_path / "exact", bitwise) == 0
    assert fxdp.load(tmp_path / "bitwise", exact) == 0


def test_a_fingerprint_that_was_cut_off(tmp_path: Path) -> None:
    compiled = _made(numerics=fxdp.Bitwise(block=4))
    fxdp.save(tmp_path / "run", compiled)
    (tmp_path / "run" / "fingerprint.json").write_text("{")
    with pytest.raises(fxdp.InputError, match=r"fingerprint.json cannot be read \(.*; nothing was loaded"):
        fxdp.load(tmp_path / "run", compiled)
