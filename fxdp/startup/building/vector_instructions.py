"""Skip Inductor's test compilations for vector instructions if GCC's version already gives the answer.

Inductor compiles and loads a small program for each instruction set that the processor reports, which takes a
second or more of each cold start and a part of each warm one. On x86-64, GCC's version determines support for
all instruction sets that torch uses; on other processors Inductor runs the tests.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import subprocess
from collections.abc import Iterator
from typing import Any

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import is_on

__all__ = ["built_as_code", "code_settings"]

_AVX = 9
"""GCC's first version with AVX2 and AVX-512."""
_ALL = 11
"""GCC's first version with VNNI, bfloat16 and tiles of AMX."""
_HALF_TILES = 13
"""GCC's first version with float16 tiles of AMX."""


@contextlib.contextmanager
def built_as_code() -> Iterator[None]:
    """Compile, load and find code inside the block under the settings that fxdp uses everywhere."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch(code_settings()):
        if is_on("vector_instructions"):
            _know_instructions()
        yield


def code_settings() -> dict[str, Any]:
    """Return Inductor's settings under which all code is compiled and loaded."""
    return {"cpp.vec_isa_ok": True} if is_on("vector_instructions") and _gcc() >= _AVX else {}


@functools.cache
def _know_instructions() -> None:
    """Answer Inductor's remaining checks for each instruction set, once per process."""
    if _gcc() < _ALL:
        return
    from torch._inductor import cpu_vec_isa

    def builds(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        return _gcc() >= _HALF_TILES or code != getattr(cpu_vec_isa.VecAMX, "_amx_fp16_code", None)

    # this answers for the compiler; torch asks the processor itself
    with patched((Patch(cpu_vec_isa.VecISA, "check_build", lambda _: builds),)):
        cpu_vec_isa.valid_vec_isa_list()


@functools.cache
def _gcc() -> int:
    """Return the major version of g++ on x86-64; 0 without g++ or on another processor."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 0
    try:
        asked = subprocess.run(
            ["g++", "-dumpversion"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    major = asked.stdout.partition(".")[0].strip()
    return int(major) if major.isdigit() else 0
