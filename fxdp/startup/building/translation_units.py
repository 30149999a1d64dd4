"""Build several C++ kernels of Inductor in one translation unit.

Inductor builds each kernel as a separate library. For a small kernel, g++ spends a quarter of a second on
headers and linking and a twentieth on the kernel, so a program with forty kernels costs ten seconds of a cold
start more than necessary. Here the kernels are in one file, each in a separate namespace, within one
extension module. The compiler flags and the code of the kernels are Inductor's, so the numbers are equal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined

LARGEST = 16
"""The maximal number of kernels in a unit: a large program has several units, which are built in parallel."""

_ENTRY = re.compile(r'extern "C"\s+void\s+(\w+)\s*\(')
_INCLUDE = re.compile(r"^[ \t]*(#\s*include\b.*?)[ \t]*$", re.MULTILINE)
_DIRECTIVE = re.compile(r"^[ \t]*#\s*(?!pragma\b|include\b)", re.MULTILINE)
_ARGUMENT = re.compile(r"(const )?(\w+\*+|int64_t|float)$")


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: the C++ types of the arguments, and the source of the function."""

    argtypes: tuple[str, ...]
    source: str

    @property
    def entry(self) -> str:
        """The name of the function."""
        found = _ENTRY.search(self.source)
        assert found is not None
        return found.group(1)

    @property
    def includes(self) -> list[str]:
        """The include lines, which may not be inside of a namespace."""
        return _INCLUDE.findall(self.source)

    @property
    def body(self) -> str:
        """The source without include lines, with the function visible only in its namespace."""
        return _ENTRY.sub(r"static void \1(", _INCLUDE.sub("", self.source)).strip()

    @property
    def taken(self) -> str:
        """The C++ expressions that convert the function's arguments from Python."""
        types = [a.removeprefix("const ") for a in self.argtypes]
        return ", ".join(f"take<{type_}>(args[{i}])" for i, type_ in enumerate(types))


def can_share(kernel: Kernel) -> bool:
    """Return whether a kernel can share a unit: one entry, no macros, arguments of supported types."""
    return (
        len(_ENTRY.findall(kernel.source)) == 1
        and kernel.source.count('extern "C"') == 1
        and not _DIRECTIVE.search(kernel.source)
        and all(_ARGUMENT.match(a) for a in kernel.argtypes)
    )


def units(asked: Sequence[tuple[Sequence[str], str]]) -> list[tuple[str, list[int]]]:
    """Distribute kernels, given by argument types and source, over units: sources, with kernel numbers."""
    kernels = [Kernel(tuple(argtypes), source) for argtypes, source in asked]
    sharing = [number for number, kernel in enumerate(kernels) if can_share(kernel)]
    count = math.ceil(len(sharing) / LARGEST)
    groups = [sharing[i * len(sharing) // count : (i + 1) * len(sharing) // count] for i in range(count)]
    return [(unit_source([kernels[number] for number in group]), group) for group in groups]


def unit_source(kernels: Sequence[Kernel]) -> str:
    """Return the C++ source of an extension module `unit` with a function `kernel_<i>` for each kernel.

    `connect(address)` must be called first, with the address of the function that returns a tensor's data.
    """
    includes = dict.fromkeys(line for kernel in kernels for line in kernel.includes)
    return _UNIT.render(kernels=kernels, includes=includes)


_UNIT = Environment(
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
).from_string(
    r"""
{% for line in includes %}
{{ line }}
{% endfor %}
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <exception>
#include <type_traits>

namespace {

void* (*data_of)(PyObject*) = nullptr;

struct Raised {};  // Python's error is set

template <typename T>
T take(PyObject* object) {
    if constexpr (std::is_pointer_v<T>) {
        return static_cast<T>(data_of(object));
    } else {
        T value;
        if constexpr (std::is_floating_point_v<T>) value = static_cast<T>(PyFloat_AsDouble(object));
        else value = static_cast<T>(PyLong_AsLongLong(object));
        if (value == static_cast<T>(-1) && PyErr_Occurred()) throw Raised();
        return value;
    }
}

template <typename Run>
PyObject* guarded(Py_ssize_t given, Py_ssize_t expected, Run run) {
    if (given != expected)
        return PyErr_Format(PyExc_TypeError, "the kernel takes %zd arguments, got %zd", expected, given);
    if (data_of == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "connect() was not called");
        return nullptr;
    }
    try {
        run();
    } catch (const Raised&) {
        return nullptr;
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    Py_RETURN_NONE;
}

// CPython's table of methods has one type for all of them
PyCFunction method(PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call));
}

PyObject* connect(PyObject*, PyObject* address) {
    data_of = reinterpret_cast<decltype(data_of)>(PyLong_AsVoidPtr(address));
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

}  // namespace

{% for kernel in kernels %}
namespace n{{ loop.index0 }} {

{{ kernel.body }}

PyObject* call(PyObject*, PyObject* const* args, Py_ssize_t given) {
    return guarded(given, {{ kernel.argtypes | length }}, [&] {
        {{ kernel.entry }}({{ kernel.taken }});
    });
}

}

{% endfor %}
static PyMethodDef methods[] = {
    {"connect", connect, METH_O, "Take the address of the function that gives a tensor's data."},
{% for _ in kernels %}
    {"kernel_{{ loop.index0 }}", method(n{{ loop.index0 }}::call), METH_FASTCALL, nullptr},
{% endfor %}
    {nullptr, nullptr, 0, nullptr}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "unit", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit_unit(void) {
    return PyModule_Create(&definition);
}
"""
)
