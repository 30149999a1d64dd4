"""Shorten the header of programs written by Inductor, which imports all code generators.

A loaded program needs only two names from the code generators: the function that rounds up memory sizes, and
the object that calls torch's own kernels. The imports take longer than the rest of loading.

    from torch._inductor.codegen.memory_planning import _align as align      from torch._inductor.utils ...
    from torch._inductor.select_algorithm import extern_kernels              from here

The imports also register ops in Python. A program that names such ops keeps the original header.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from fxdp.torch_compat.shortcuts import is_on

__all__ = ["with_light_header"]

_ALIGN = "from torch._inductor.codegen.memory_planning import _align as align\n"
_KERNELS = "from torch._inductor.select_algorithm import extern_kernels\n"

_OWN_KERNELS = ("mm", "addmm", "bmm", "baddbmm", "_int_mm", "convolution")
"""Kernels that Inductor calls by torch's own names."""

_NAMESPACES = frozenset({"aten", "inductor", "_quantized", "_c10d_functional", "fxdp"})
"""Namespaces of ops that exist without an import of Inductor's code generators."""

_NAMED = re.compile(r"\btorch\.ops\.(\w+)")


def with_light_header(source: str) -> str:
    """Return a program without the imports of Inductor's code generators, line by line the same otherwise."""
    if not is_on("program_header") or not _NAMESPACES.issuperset(_NAMED.findall(source)):
        return source
    source = source.replace(_ALIGN, "from torch._inductor.utils import _align as align\n", 1)
    return source.replace(_KERNELS, f"from {__name__} import extern_kernels\n", 1)


class _ExternKernels:
    """Replacement for Inductor's `extern_kernels`; imports the original only for kernels that torch lacks."""

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_KERNELS:
            found = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as inductors

            found = getattr(inductors, name)
        setattr(self, name, found)
        return found


extern_kernels = _ExternKernels()
