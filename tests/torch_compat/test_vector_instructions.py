"""Vector instructions are known without test compilations."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from fxdp.torch_compat import vector_instructions


def test_no_program_is_compiled_to_know_them() -> None:
    """In a process of its own: Inductor remembers what it has asked."""
    program = textwrap.dedent("""
        from torch._inductor import cpu_vec_isa
        from fxdp.torch_compat import vector_instructions

        def compiles(self, code):
            raise SystemExit("a program is compiled")

        cpu_vec_isa.VecISA.check_build = compiles
        vector_instructions._gcc = lambda: 13
        with vector_instructions.built_as_code():
            picked = cpu_vec_isa.pick_vec_isa()
        assert cpu_vec_isa.VecISA.check_build is compiles
        print(picked)
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("version", "known"), [(8, {}), (9, {"cpp.vec_isa_ok": True})])
def test_an_old_compiler_is_asked(
    version: int, known: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_instructions, "_gcc", lambda: version)
    assert vector_instructions.code_settings() == known
