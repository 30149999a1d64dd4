"""The text of translation units that hold several kernels; `test_cold_start` compiles some."""

from __future__ import annotations

import pytest
from expecttest import assert_expected_inline

from fxdp.startup.building.translation_units import LARGEST, Kernel, can_share, unit_source, units

SOURCE = """#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0,
                       const int64_t ks0)
{
    #pragma GCC ivdep
    for (int64_t i = 0; i < ks0; i++) out_ptr0[i] = 2 * in_ptr0[i];
}
"""
KERNEL = Kernel(("const float*", "float*", "const int64_t"), SOURCE)


def test_a_kernel_stands_in_its_own_namespace() -> None:
    """Include lines go to the top, once; the function takes its arguments from Python's by their types."""
    text = unit_source([KERNEL, KERNEL])
    assert text.count("#include <torch/csrc/inductor/cpp_prefix.h>") == 1
    begin, end = text.index("namespace n1 {"), text.index("static PyMethodDef")
    assert_expected_inline(
        text[begin:end].strip(),
        """\
namespace n1 {

static void kernel(const float* in_ptr0,
                       float* out_ptr0,
                       const int64_t ks0)
{
    #pragma GCC ivdep
    for (int64_t i = 0; i < ks0; i++) out_ptr0[i] = 2 * in_ptr0[i];
}

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t given) {
    return guarded(given, 3, [&] {
        kernel(take<float*>(args[0]), take<float*>(args[1]), take<int64_t>(args[2]));
    });
}

}""",
    )


@pytest.mark.parametrize(
    "kernel",
    [
        Kernel(KERNEL.argtypes, "#define TWO 2\n" + SOURCE),
        Kernel(KERNEL.argtypes, SOURCE + 'extern "C" void other() {}'),
        Kernel(KERNEL.argtypes, SOURCE.replace("void  kernel", "int kernel")),
        Kernel((*KERNEL.argtypes[:2], "std::complex<float>"), SOURCE),
    ],
    ids=["macro", "two entries", "not void", "unknown argument"],
)
def test_unusual_kernels_stand_alone(kernel: Kernel) -> None:
    """What could disturb its neighbours, or cannot be called from here, is left to Inductor."""
    assert can_share(KERNEL)
    assert not can_share(kernel)
    found = units([(k.argtypes, k.source) for k in (KERNEL, kernel, KERNEL)])
    assert [numbers for _, numbers in found] == [[0, 2]]


@pytest.mark.parametrize(("kernels", "sizes"), [(0, []), (1, [1]), (LARGEST, [16]), (40, [13, 13, 14])])
def test_large_programs_have_several_units(kernels: int, sizes: list[int]) -> None:
    """Units are about equal, in the kernels' order, and hold each kernel once."""
    found = [numbers for _, numbers in units([(KERNEL.argtypes, SOURCE)] * kernels)]
    assert [len(numbers) for numbers in found] == sizes
    assert [number for numbers in found for number in numbers] == list(range(kernels))
