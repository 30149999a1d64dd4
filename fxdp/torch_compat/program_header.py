"""Of the programs that Inductor writes: their first lines, which import all of its code generators.

A program that is loaded needs two names of theirs, the function that rounds sizes of memory up and the one
object by which it calls torch's own kernels. To import them takes longer than all else that loading does.

    from torch._inductor.codegen.memory_planning import _align as align      from torch._inductor.utils ...
    from torch._inductor.select_algorithm import extern_kernels              from here

What else those imports would bring a program asks of torch by name: where it names ops that Python registers,
its lines stay as they are.
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
"""Kernels that Inductor calls under the names that torch has for them."""

_NAMESPACES = frozenset({"aten", "inductor", "_quantized", "_c10d_functional", "fxdp"})
"""Of ops that are there without Inductor's code generators."""

_NAMED = re.compile(r"\btorch\.ops\.(\w+)")


def with_light_header(source: str) -> str:
    """The same program, line by line, that imports none of Inductor's code generators."""
    if not is_on("program_header") or not _NAMESPACES.issuperset(_NAMED.findall(source)):
        return source
    source = source.replace(_ALIGN, "from torch._inductor.utils import _align as align\n", 1)
    return source.replace(_KERNELS, f"from {__name__} import extern_kernels\n", 1)


class _ExternKernels:
    """Inductor's object of that name, which is asked only for kernels that are not torch's own."""

    def __getattr__(self, name: str) -> Any:
        if name in _OWN_KERNELS:
            found = getattr(torch, name)
        else:
            from torch._inductor.select_algorithm import extern_kernels as inductors

            found = getattr(inductors, name)
        setattr(self, name, found)
        return found


extern_kernels = _ExternKernels()
