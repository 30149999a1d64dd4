"""Vector instructions are known without test compilations."""

from __future__ import annotations

import pytest
from torch._inductor import cpu_vec_isa

from fxdp.startup.building import vector_instructions


def test_no_program_is_compiled_to_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    half_tiles, asked = cpu_vec_isa.VecAMX._amx_fp16_code, list[bool]()

    def compiles(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        raise AssertionError("a program is compiled")

    def ask() -> None:
        found = cpu_vec_isa.VecAVX512()
        asked.extend(found.check_build(code) for code in (found._avx512_bf16_code, half_tiles))

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", compiles)
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", ask)
    for version in (12, 13):
        monkeypatch.setattr(vector_instructions, "_gcc", lambda version=version: version)
        vector_instructions._know_instructions.__wrapped__()
    assert asked == [True, False, True, True]
    assert cpu_vec_isa.VecISA.check_build is compiles


@pytest.mark.parametrize(("version", "known"), [(8, {}), (9, {"cpp.vec_isa_ok": True})])
def test_an_old_compiler_is_asked(
    version: int, known: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_instructions, "_gcc", lambda: version)
    assert vector_instructions.code_settings() == known
