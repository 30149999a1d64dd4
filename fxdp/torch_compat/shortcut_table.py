"""The table of shortcuts: all code that only saves time, with the torch releases on which each is proven.

`shortcuts.py` reads the table and decides whether a shortcut is on. To prove a shortcut with a new release of
torch: read the torch functions that the shortcut names, run the tests, add the release.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxdp.torch_compat.releases import PROVEN
from fxdp.torch_compat.torch_names import TorchName

__all__ = ["SHORTCUTS", "Shortcut"]


@dataclass(frozen=True)
class Shortcut:
    """An optimization that saves time and changes no result, so that turning it off is safe."""

    name: str
    """The name for `FXDP_SHORTCUTS`; the name of the file if the shortcut has one of its own."""
    releases: frozenset[str] = frozenset(PROVEN)
    """The releases of torch with which the shortcut is proven and has an effect."""
    names: tuple[TorchName, ...] = ()
    """The names inside of torch that the shortcut replaces or builds on; each must have a known form."""
    needless: str = ""
    """The first release in which torch saves the same time by itself; empty if there is none."""


def _before(release: str) -> frozenset[str]:
    return frozenset(PROVEN[: PROVEN.index(release)])


def _since(release: str) -> frozenset[str]:
    return frozenset(PROVEN[PROVEN.index(release) :])


_SYM_NODE = "torch.fx.experimental.sym_node:SymNode"
_CODE = "torch._inductor.output_code:CompiledFxGraph"
_FAKE = "torch._subclasses.fake_tensor"
_MODE, _FUNCTIONAL = f"{_FAKE}:FakeTensorMode", "torch._subclasses.functional_tensor:FunctionalTensor"
_PROXY = "torch.fx.experimental.proxy_tensor"
_BUILD = "torch._inductor.async_compile:AsyncCompile"
_LIBRARIES = "torch._inductor.codecache:CppPythonBindingsCodeCache"

BINARY_SIZES = ("add", "sub", "mul", "int_floordiv", "eq", "ne", "lt", "le", "gt", "ge")
"""Operations that depend on two sizes' expressions alone; `mod` also reads a range, which may shrink."""

_FAKE_MEMORY = (
    TorchName(_FAKE, "in_kernel_invocation_manager", ("(fake_mode)",)),
    TorchName(
        f"{_FAKE}:FakeTensor", "__new__",
        (
            "staticmethod (cls, fake_mode, elem, device, constant=None, real_tensor=None, pytype=None, "
            "dispatch_keys=None)",
            "staticmethod (cls, fake_mode_or_elem=None, elem=None, device=None, constant=None, "
            "real_tensor=None, pytype=None, dispatch_keys=None, *, fake_mode=None, fake_device=None, "
            "_fake_device=None, requires_grad=None, _is_param=False, **state)",
        ),
    ),
)  # fmt: skip

SHORTCUTS: tuple[Shortcut, ...] = (
    Shortcut("cached_joint"),
    Shortcut("cached_libraries", names=(
        TorchName(_LIBRARIES, "_load_library", ("classmethod (cls, path, key)",)),
    )),
    Shortcut("cached_pair", names=(
        TorchName(_CODE, "prepare_for_serialization", ("(self)",)),
        TorchName(_CODE, "after_deserialization", ("(self, constants)",)),
        TorchName(_CODE, "post_compile", ("(self, example_inputs, constants, graph_kwargs)",)),
    )),
    Shortcut("cold_start", names=(
        TorchName("torch._inductor.async_compile", "AsyncCompile", ("class()",)),
        TorchName(_BUILD, "cpp_pybinding", ("(self, argtypes, source_code)",)),
        TorchName(_BUILD, "wait", ("(self, scope)",)),
    )),
    Shortcut("dtensor_like", names=(
        TorchName("torch:Tensor", "_dtensor__new__", ("staticmethod builtin_function_or_method",)),
    )),
    Shortcut("lazy_codegen", names=(
        TorchName("torch.fx:GraphModule", "recompile", ("(self)",)),
        TorchName("torch.fx.graph", "_PyTreeCodeGen", ("class(pytree_info)",)),
    )),
    Shortcut("memoized_fakes", names=(
        TorchName(
            _MODE, "_get_output_tensor_from_cache_entry",
            ("(self, state, entry, key, func, args)", "(self, state, entry, key, args)"),
        ),
        *_FAKE_MEMORY,
        TorchName("torch._C", "_DisablePythonDispatcher", ("class",)),
        TorchName("torch", "_functionalize_unsafe_set", ("builtin_function_or_method",)),
    )),
    Shortcut("memoized_indices", releases=_before("2.15"), needless="2.15", names=(
        TorchName(
            "torch._inductor.sizevars", "simplify_index_in_vec_range",
            ("_lru_cache_wrapper(index, var, vec_length)",), earlier="torch._inductor.codegen.cpp",
        ),
    )),
    Shortcut("memoized_sizes", releases=_since("2.12"), names=(  # 2.11 stores sizes in a different way
        *(TorchName(_SYM_NODE, f"_{name}", ("(self, other)",)) for name in BINARY_SIZES),
        TorchName(_SYM_NODE, "wrap_int", ("(self, num)",)),
        TorchName(_SYM_NODE, "maybe_as_int", ("(self)",)),
        TorchName(_SYM_NODE, "expr", ("property",)),
        TorchName(
            _SYM_NODE, "__init__",
            (
                "(self, expr, shape_env, pytype, hint, constant=None, fx_node=None, "
                "optimized_summation=False)",
            ),
        ),
        TorchName(_PROXY, "get_proxy_mode", ("()",)),
    )),
    Shortcut("memoized_stacks", names=(
        TorchName("torch.fx.proxy", "CapturedTraceback", ("class(tb, skip=0)",)),
        TorchName(
            "torch.utils._traceback:CapturedTraceback", "extract",
            ("staticmethod (*, script=False, cpp=False, skip=0)",),
        ),
        TorchName("torch.utils._traceback:CapturedTraceback", "summary", ("(self)",)),
    )),
    Shortcut("memoized_wrappers", releases=_since("2.12") & _before("2.15"), needless="2.15", names=(
        TorchName(_FUNCTIONAL, "__new__", ("staticmethod (cls, elem, mode)",)),
    )),
    Shortcut("op_traces", names=(
        *_FAKE_MEMORY,
        TorchName(_PROXY, "get_proxy_slot", ("(obj, tracer, default=Ellipsis, transform=Ellipsis)",)),
        TorchName(_PROXY, "track_tensor", ("(tensor, proxy, *, constant, tracer)",)),
    )),
    Shortcut("predicted_forward", names=(
        TorchName("torch", "_from_functional_tensor", ("builtin_function_or_method",)),
        TorchName("torch", "_functionalize_has_data_mutation", ("builtin_function_or_method",)),
        TorchName("torch", "_functionalize_has_metadata_mutation", ("builtin_function_or_method",)),
        TorchName("torch", "_functionalize_was_storage_changed", ("builtin_function_or_method",)),
    )),
    Shortcut("program_header", names=(
        TorchName("torch._inductor.utils", "_align", ("(nbytes)",)),
        TorchName("torch._inductor.codecache", "code_hash", ("(code, extra='')",)),
    )),
    Shortcut("repeated_joint"),
    Shortcut("repeated_layers", names=_FAKE_MEMORY),
    Shortcut("translation_units", names=(
        TorchName(_LIBRARIES, "_load_library_inner", ("classmethod (cls, path, key)",)),
    )),
    Shortcut("vector_instructions", names=(
        TorchName("torch._inductor.cpu_vec_isa:VecISA", "check_build", ("(self, code)",)),
        TorchName("torch._inductor.cpu_vec_isa", "valid_vec_isa_list", ("_lru_cache_wrapper()",)),
        TorchName("torch._inductor.config:cpp", "vec_isa_ok", ("NoneType", "bool")),
    )),
    Shortcut("without_profiling", names=(TorchName(_CODE, "__call__", ("(self, inputs)",)),)),
)  # fmt: skip
"""All shortcuts, sorted by name; `docs/environment.md` says how each saves time."""
