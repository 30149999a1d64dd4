"""Inductor in tests: kernels built in a third of the time, and once for all what it imports and asks."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from fxdp.startup.building.vector_instructions import built_as_code


def know_inductor() -> None:
    """What each rank that compiles would import, and ask of this machine by running programs."""
    from torch._inductor import async_compile, codecache, compile_fx, cpu_vec_isa  # noqa: F401
    from torch._inductor.codecache import torch_key
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.fx_passes import joint_graph, post_grad

    compile_kernels_quickly()
    init_backend_registration()
    with built_as_code():  # else a program for each kind of vectors is compiled
        cpu_vec_isa.pick_vec_isa()
        # asks for the compiler's name three times, and reads all headers to know whether they are the same
        codecache.CppPythonBindingsCodeCache.load_async("")
    joint_graph.lazy_init(torch.device("cpu"))  # traces the patterns that it looks for: half a second
    post_grad.lazy_init()
    torch_key()


def compile_kernels_quickly() -> None:
    """Kernels of this process, and of those that are forked from it, with -O0: under half the time of -O3.

    No flag that changes numbers depends on the level. Programs that tests start by themselves keep -O3. A
    third of what is left is the usual linker, which reads all names of torch's libraries; gold needs half of
    its time, and none for libraries that have no names. Lines for debuggers and warnings are left out, too.
    """
    from torch._inductor import config, cpp_builder

    flags = cpp_builder._get_optimization_cflags
    config.aot_inductor.compile_wrapper_opt_level = "O0"

    linker = ["fuse-ld=gold"] if shutil.which("ld.gold") else []
    linker += [f"L{_nameless_libraries()}", "Wl,--no-as-needed"]

    def of_o0(compiler: str, min_optimize: bool = False) -> tuple[list[str], list[str]]:
        compiling, linking = flags(compiler, min_optimize=True)
        return [*(flag for flag in compiling if flag != "g1"), "w"], [*linking, *linker]

    cpp_builder._get_optimization_cflags = of_o0


def _nameless_libraries() -> Path:
    """A folder with an empty library for each of torch's: what is linked with them asks for torch's by name.

    Those of torch are loaded by then, and whoever loads a kernel finds what it needs in them, as ever.
    """
    from torch._inductor import cpp_builder
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir(), "nameless-libraries")
    for name in ("libtorch.so", "libtorch_cpu.so", "libtorch_python.so"):
        if not (folder / name).exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                made = Path(place, name)
                command = [cpp_builder.get_cpp_compiler(), "-shared", "-nostdlib", f"-Wl,-soname,{name}"]
                subprocess.run([*command, "-o", str(made), "-x", "c", os.devnull], check=True)
                made.replace(folder / name)
    return folder
