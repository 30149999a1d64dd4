"""The vector instructions for which Inductor writes C++, known without test compilations where that is safe.

Inductor compiles and loads a small program for each set of instructions that the processor reports, which
takes a second or more of each cold start and a part of each warm one. On x86-64 GCC knows all that torch
uses, by its version; elsewhere Inductor may look for itself.
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
"""GCC's version since which it knows AVX2 and AVX-512."""
_ALL = 11
"""... VNNI, bfloat16 and tiles of AMX, too."""
_HALF_TILES = 13
"""... and those of float16."""


@contextlib.contextmanager
def built_as_code() -> Iterator[None]:
    """Inside, code is compiled and loaded, and its kernels are built and found, as all of fxdp's are."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch(code_settings()):
        if is_on("vector_instructions"):
            _know_instructions()
        yield


def code_settings() -> dict[str, Any]:
    """The settings under which all code is compiled and loaded."""
    return {"cpp.vec_isa_ok": True} if is_on("vector_instructions") and _gcc() >= _AVX else {}


@functools.cache
def _know_instructions() -> None:
    """Answer the questions that remain, for each set of instructions, once for this process."""
    if _gcc() < _ALL:
        return
    from torch._inductor import cpu_vec_isa

    def builds(isa: cpu_vec_isa.VecISA, code: str) -> bool:
        return _gcc() >= _HALF_TILES or code != getattr(cpu_vec_isa.VecAMX, "_amx_fp16_code", None)

    # what is asked here is what the compiler knows; what the processor knows torch asks that itself
    with patched((Patch(cpu_vec_isa.VecISA, "check_build", lambda _: builds),)):
        cpu_vec_isa.valid_vec_isa_list()


@functools.cache
def _gcc() -> int:
    """The version of g++ on x86-64; 0 where there is none, or on another processor."""
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
