"""The only file that imports torch internals; works on torch 2.11 to 2.13.

Inductor takes seconds to import, so the functions that need it import it themselves.

Everything private that fxdp needs passes through here, so that a new torch release is one file to read.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
import operator
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
import torch.utils.checkpoint
from torch import fx, nn
from torch._C._distributed_c10d import ProcessGroup, Store, TCPStore, Work, _register_process_group
from torch._decomp import decomposition_table as torch_decompositions
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.exc import UserError
from torch._dynamo.source import ConstantSource, LocalSource
from torch._functorch._aot_autograd.descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    ForwardTokenAOTInput,
    ForwardTokenAOTOutput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.export import _trace as export_trace
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    ConstraintViolationError,
    DimDynamic,
    GuardOnDataDependentSymNode,
    PropagateUnbackedSymInts,
    ShapeEnv,
    free_symbols,
)
from torch.fx.graph import _BoxedCodeGen
from torch.fx.traceback import preserve_node_meta
from torch.utils._sympy.functions import FloatPow, IntTrueDiv, ToFloat
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

with_effects = torch.ops.higher_order.with_effects
"""The op that torch wraps around ops with effects, to keep their order by tokens."""

CAUSAL_MASK_TEST = (nn.modules.transformer, "_detect_is_causal_mask")
"""Where `nn.TransformerEncoder` and `nn.TransformerDecoder` read a mask to see whether it is causal."""

CHECKPOINT = (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator")
"""What runs around a checkpointed function, up to its first `yield` before and from there on after it."""

__all__ = [
    "CAUSAL_MASK_TEST",
    "CHECKPOINT",
    "AOTInput",
    "AOTOutput",
    "BufferAOTInput",
    "ConstraintViolationError",
    "DataDependentOutputException",
    "FakeTensorMode",
    "ForwardTokenAOTInput",
    "ForwardTokenAOTOutput",
    "GradAOTOutput",
    "GuardOnDataDependentSymNode",
    "InputMutationAOTOutput",
    "OpOverload",
    "OpOverloadPacket",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "ShapeEnv",
    "Store",
    "TCPStore",
    "TangentAOTInput",
    "UserError",
    "Work",
    "all_op_names",
    "as_float",
    "backward_class",
    "compile_lock",
    "default_store",
    "dtensor_spec",
    "exported_module",
    "float_power",
    "in_function_transform",
    "joint_graph",
    "larger_constants",
    "overload_of",
    "register_group",
    "replay",
    "silent_export",
    "torch_decompositions",
    "torch_release",
    "true_quotient",
    "with_effects",
    "without_autograd_kernel",
]


@contextlib.contextmanager
def silent_export() -> Iterator[None]:
    """Keep torch.export from printing the graph it had when it failed: the error says what is needed."""
    export_trace.print = lambda *args, **kwargs: None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del export_trace.print  # type: ignore[attr-defined]


def exported_module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The forward graph of an exported program, without its input checks where torch lets us."""
    accepts_guards = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if accepts_guards else program.module()
    assert isinstance(module, fx.GraphModule)
    return module


@contextlib.contextmanager
def without_autograd_kernel(op: torch._ops.OpOverload) -> Iterator[None]:
    """Let an op keep torch's C++ derivative instead of its Python decomposition."""
    key = torch._C.DispatchKey.Autograd
    kernel = op.py_kernels.pop(key, None)
    op._dispatch_cache.clear()
    try:
        yield
    finally:
        if kernel is not None:
            op.py_kernels[key] = kernel
            op._dispatch_cache.clear()


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` (vmap, grad, ...) is under way."""
    return bool(torch._C._are_functorch_transforms_active())


def torch_release() -> str:
    """As `2.13`."""
    return ".".join(torch.__version__.split(".")[:2])


def stacks_lstm_states() -> bool:
    """Whether torch's decomposition gives an LSTM's states a dim too many, as it does before 2.12."""
    return tuple(int(n) for n in torch_release().split(".")) < (2, 12)


def overload_of(op: Any) -> Any:
    """The overload behind what `torch.library.custom_op` returns; anything else as it is."""
    return getattr(op, "_opoverload", op)


_REGIONS = frozenset(
    {torch.ops.higher_order.wrap_with_set_grad_enabled, torch.ops.higher_order.wrap_with_autocast}
)
"""What `torch.no_grad()` and `torch.autocast()` become: calls of graphs of their own."""


def replay(module: fx.GraphModule, *args: Any) -> Any:
    """Run an exported graph node by node so that what is traced meanwhile keeps its source lines."""
    with preserve_node_meta():
        return _Replay(module).run(*args)


class _Replay(PropagateUnbackedSymInts):
    """Runs the graphs of `torch.no_grad()` and `torch.autocast()` node by node, too."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _REGIONS:
            args = tuple(_Replay(a).run if isinstance(a, fx.GraphModule) else a for a in args)
        return super().call_function(target, args, kwargs)


def joint_graph(
    module: nn.Module,
    fakes: Sequence[Any],
    fake_mode: FakeTensorMode | None,
    decompositions: dict[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """The joint forward and backward graph of `module`, with descriptors on inputs and outputs.

    Under `torch.no_grad()` it is the forward graph alone. Draws that nobody reads stay: others follow them.
    """
    import torch._inductor.config as inductor_config

    with contextlib.ExitStack() as stack:
        stack.enter_context(tracing(TracingContext(fake_mode)))
        stack.enter_context(inductor_config.patch(fallback_random=True))  # else torch drops such draws
        joint = aot_export_joint_with_descriptors(stack, module, tuple(fakes), decompositions=decompositions)
        _correct_attention(joint.graph_module)
        return joint.graph_module


def _correct_attention(gm: fx.GraphModule) -> None:
    """Before torch 2.12 the fake kernel of attention on CPU says float32 where the real one gives float64."""
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    for node in gm.graph.find_nodes(op="call_function", target=target):
        out, sums = node.meta["val"]
        if out.dtype == torch.float64 != sums.dtype:
            node.meta["val"] = (out, sums.double())
            for pick in node.users:
                if pick.target is operator.getitem and pick.args[1] == 1:
                    pick.meta["val"] = node.meta["val"][1]


def sizes_behind(nodes: Iterable[fx.Node], inputs: Iterable[fx.Node]) -> list[fx.Node]:
    """Those inputs that are sizes of which sizes among the nodes are made, whether or not an op reads them.

    nodes `%mul: 3*s0`, `%x: [s1, 4]`, inputs `%b: s0`, `%c: s2`   ->   `%b`: code for the nodes must know s0
    """
    values = [n.meta.get("val") for n in nodes]
    kinds = (torch.Tensor, torch.SymInt, torch.SymFloat)
    mentioned = {symbol for value in values if isinstance(value, kinds) for symbol in free_symbols(value)}
    sizes = [(n, n.meta.get("val")) for n in inputs]
    return [n for n, size in sizes if isinstance(size, torch.SymInt) and size.node.expr in mentioned]


def register_group(name: str, group: ProcessGroup) -> None:
    """Let functional collectives find `group` by its name, until torch's own groups are destroyed."""
    _register_process_group(name, group)  # type: ignore[arg-type]


def default_store() -> Store:
    """The key-value store of the default process group, which must exist."""
    store = distributed_c10d._get_default_store()
    assert isinstance(store, Store)
    return store


def true_quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """The float `a / b` of two integers, as Python divides them."""
    return IntTrueDiv(a, b)


def float_power(base: sympy.Expr, exponent: float) -> sympy.Expr:
    """The float `base ** exponent` of an integer or a float."""
    return FloatPow(base, sympy.Float(exponent))


def as_float(number: sympy.Expr) -> sympy.Expr:
    """An integer as a float."""
    return ToFloat(number)


def _call(function: Callable[..., Any], x: Any) -> Any:
    """Python's own rounding functions ask a number's class, which for an fx proxy says nothing."""
    if isinstance(x, fx.Proxy):
        return x.tracer.create_proxy("call_function", function, (x,), {})
    return function(x)


class _Arithmetic(PythonReferenceAnalysis):
    """What torch's own cannot do with fx proxies."""

    @staticmethod
    def int_truediv(a: Any, b: Any) -> Any:
        return a / b

    @staticmethod
    def floor_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.floor, x)

    @staticmethod
    def ceil_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.ceil, x)

    @staticmethod
    def trunc_to_int(x: Any, dtype: Any) -> Any:
        return _call(math.trunc, x)

    @staticmethod
    def round_to_int(x: Any, dtype: Any) -> Any:
        return _call(round, x)


def interpret_sympy(expr: sympy.Basic, values: Mapping[sympy.Symbol, Any]) -> Any:
    """Evaluate an expression by Python operators on ints, SymInts or fx proxies.

    A quotient stands for an exact integer division.
    """
    numerator, denominator = expr.as_numer_denom()
    if denominator != 1:
        return interpret_sympy(numerator, values) // interpret_sympy(denominator, values)
    return sympy_interp(_Arithmetic, dict(values), expr)


def graph_module(root: nn.Module, graph: fx.Graph, name: str = "GraphModule") -> fx.GraphModule:
    """A graph for passes: its Python code is written when somebody first calls or reads it."""
    return _LazyGraphModule(root, graph, name)


def boxed_code(gm: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The graph as a function of one list, which it empties so that its values can be freed early."""
    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)  # type: ignore[no-untyped-call,unused-ignore]
    return gm.forward


def static_mode() -> FakeTensorMode:
    """A fake mode for fixed sizes; Inductor's cache wants it to have a shape environment all the same."""
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True, allow_non_fake_inputs=True)


class _HalfGuards(ShapeEnv):
    """Sizes of a program whose halves are compiled, and cached, one by one.

    Inductor stores a half with its guards and evaluates them on that half's own sizes. A backward may take
    `25*B` without `B`; a guard that says so could only fail there, by a NameError.
    """

    def produce_guards_expression(
        self, placeholders: Sequence[Any], *, guards: Any = None, ignore_static: bool = True
    ) -> str | None:
        """Guards on the plain sizes among `placeholders`; what is computed from sizes needs none."""
        named = [(p, LocalSource(f"t{i}")) for i, p in enumerate(placeholders) if p.node.expr.is_Symbol]
        sizes = {p.node.expr for p, _ in named}
        own = [g for g in (self.guards if guards is None else guards) if g.expr.free_symbols <= sizes]
        plain, sources = [p for p, _ in named], [source for _, source in named]
        found = self.produce_guards(plain, sources, guards=own, ignore_static=ignore_static)
        return " and ".join(found) or None

    def evaluate_guards_expression(self, code: str, args: Sequence[object]) -> bool:
        """Whether a cached half fits; one stored by plain torch may speak of sizes that it does not take."""
        try:
            return bool(super().evaluate_guards_expression(code, args))
        except NameError:
            return False


def symbolic_sizes(hints: Mapping[str, int]) -> tuple[FakeTensorMode, dict[str, Any]]:
    """A fake mode and one backed, unconstrained SymInt per name."""
    env = _HalfGuards(duck_shape=False, specialize_zero_one=False)
    sizes = {}
    for name, value in hints.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(
            value, source, DimDynamic.DYNAMIC, constraint_dim=None, do_not_specialize_zero_one=True
        )
        sizes[name] = env.create_symintnode(symbol, hint=value, source=source)
    return FakeTensorMode(shape_env=env, allow_non_fake_inputs=True), sizes


def fixed_sizes(sizes: Mapping[str, Any]) -> list[str]:
    """The names of the sizes that tracing or compiling took for constants or for functions of others."""
    symbolic = {name: size.node for name, size in sizes.items() if isinstance(size, torch.SymInt)}
    return [name for name, node in symbolic.items() if node.shape_env.replace(node.expr) != node.expr]


def trace_for_inductor(
    function: Callable[..., Any], fake_mode: FakeTensorMode, primals: Sequence[Any], tangents: Sequence[Any]
) -> fx.GraphModule:
    """Trace `function(primals, tangents)` with the decompositions that Inductor expects."""
    import torch._inductor.lowering  # the decomposition of max pooling looks into it and imports it not
    from torch._inductor.decomposition import select_decomp_table

    # the Python dispatcher decomposes ops whose C++ kernels would fix symbolic sizes
    with fake_mode, tracing(TracingContext(fake_mode)), torch.no_grad(), enable_python_dispatcher():
        traced = make_fx(
            function,
            decomposition_table=select_decomp_table(),
            tracing_mode="real",
            _allow_non_fake_inputs=True,
        )(list(primals), list(tangents))
    assert isinstance(traced, fx.GraphModule)
    traced.graph.set_codegen(fx.graph.CodeGen())  # flat results, not the traced function's structure
    return traced


def partition_for_inductor(
    joint: fx.GraphModule, inputs: Sequence[Any], outputs: int, fake_mode: FakeTensorMode
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Inductor's joint graph passes, then torch's min-cut partitioner; the first `outputs` are forward's."""
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V

    # random ops become one of Inductor's, whose seeds are made under `V`'s fake mode
    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), fake_mode, torch.no_grad():
        forward, backward = partition_fn(joint, list(inputs), num_fwd_outputs=outputs)
    return forward, backward


def joint_passes_for_inference(
    gm: fx.GraphModule, device: torch.device, fake_mode: FakeTensorMode
) -> fx.GraphModule:
    """Inductor's joint graph passes on a program without backward."""
    from torch._inductor.compile_fx import _recursive_joint_graph_passes
    from torch._inductor.virtualized import V

    with tracing(TracingContext(fake_mode)), V.set_fake_mode(fake_mode), fake_mode, torch.no_grad():
        return _recursive_joint_graph_passes(gm, input_device=device)


def compile_with_inductor(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    *,
    backward: bool,
    inference: bool,
    fixed: int,
) -> tuple[Callable[[list[Any]], Any], list[tuple[Any, ...] | None]]:
    """Compile one half; the callable takes a list. Also the strides of its outputs, where Inductor knows.

    The first `fixed` inputs are parameters and the like, whose addresses do not change between steps.
    """
    import torch._inductor.config as inductor_config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.cudagraph_utils import BoxedDeviceIndex
    from torch._inductor.virtualized import V

    _call_products_into_buffers()
    settings = {"cpp.vec_isa_ok": True} if _compiler_knows_vectors() else {}
    context = TracingContext(fake_mode)
    with (
        tracing(context),
        TracingContext.report_output_strides() as strides,
        torch.no_grad(),
        V.set_fake_mode(fake_mode),
        torch._C._DisableAutocast(),
        inductor_config.patch(settings),
    ):
        compiled = compile_fx_inner(
            gm,
            list(inputs),
            static_input_idxs=tuple(range(fixed)),
            is_backward=backward,
            is_inference=inference,
            graph_id=next(_graph_ids),
            boxed_forward_device_index=BoxedDeviceIndex(None),
        )
    return compiled, list(strides or [])


_graph_ids = itertools.count()


def _call_products_into_buffers() -> None:
    """Tell Inductor to call the kernel of `addmm_`, which it never sees otherwise.

    Left to itself it does the same, but not where the environment says `CI`: there it raises, since the op
    has a decomposition (which would compute the product beside the buffer). It also copies transposed
    operands, which this kernel takes as they are.
    """
    from torch._inductor.lowering import lowerings, make_fallback

    if torch.ops.aten.addmm_.default not in lowerings:
        make_fallback(torch.ops.aten.addmm_.default, warn=False)  # type: ignore[no-untyped-call]


class CppBuilding(NamedTuple):
    """What of Inductor builds C++ kernels and loads them."""

    programs: Any
    """The module whose `AsyncCompile` each program that Inductor writes makes one of."""
    extension_cache: Any
    """Builds and loads extension modules, by their source."""
    later: Any
    """A kernel that is still being built."""
    failed: type[Exception]
    """The compiler refused."""
    data_of: int
    """The address of a function `void* (PyObject*)`, from a tensor to its data."""


def cpp_building() -> CppBuilding:
    """Inductor's parts, imported when they are needed."""
    from torch._inductor import async_compile, codecache, exc

    return CppBuilding(
        programs=async_compile,
        extension_cache=codecache.CppPythonBindingsCodeCache,
        later=codecache.LambdaFuture,
        failed=exc.CppCompileError,
        data_of=torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr,  # type: ignore[attr-defined]
    )


def backward_class(function: type[torch.autograd.Function]) -> type:
    """The class of the autograd nodes that a function leaves."""
    found: type = function._backward_cls
    return found


def release_saved_tensors(ctx: Any) -> None:
    """Inside a backward: let go of what the forward saved, unless the graph is to be kept."""
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.maybe_clear_saved_tensors()


@functools.cache
def _compiler_knows_vectors() -> bool:
    """Whether the vector instructions that the processor reports need no test compilation.

    Inductor compiles and loads one program per instruction set, which takes seconds of a cold start. GCC
    knows all sets that torch uses on x86-64 since version 9; elsewhere Inductor may look for itself.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        asked = subprocess.run(
            ["g++", "-dumpversion"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return False
    major = asked.stdout.partition(".")[0].strip()
    return major.isdigit() and int(major) >= 9


def all_op_names() -> list[str]:
    """The qualified names of all registered ops, as `aten::add.Tensor`."""
    return list(torch._C._dispatch_get_all_op_names())


def dtensor_spec(
    mesh: DeviceMesh, placements: Sequence[tuple[str, int, int]], shape: Sequence[int], dtype: torch.dtype
) -> Any:
    """A `DTensorSpec`, one placement per mesh axis: `("R", 0, 1)`, `("P(sum)", 0, 1)`, `("S", dim, outer)`"""
    from torch.distributed.tensor import Partial, Placement, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard

    def spelled(kind: str, dim: int, outer: int) -> Placement:
        if kind != "S":
            return Replicate() if kind == "R" else Partial(kind[2:-1])
        return Shard(dim) if outer == 1 else _StridedShard(dim, split_factor=outer)

    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensorSpec(
        mesh, tuple(spelled(*p) for p in placements), tensor_meta=TensorMeta(size, stride, dtype)
    )


def local_shard(tensor: DTensor) -> torch.Tensor:
    """What this rank holds of a `DTensor`: the very tensor; `to_local()` may make a view at each call."""
    return tensor._local_tensor


@contextlib.contextmanager
def as_if_exporting() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` and `is_exporting()` say yes, as they do during an export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = {flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)}
    for flag in before:
        setattr(torch.compiler, flag, True)
    try:
        yield
    finally:
        for flag, value in before.items():
            setattr(torch.compiler, flag, value)


@contextlib.contextmanager
def larger_constants(elements: int) -> Iterator[None]:
    """Let Python read constant tensors of up to so many elements while they are traced; torch lets one."""
    name = "CONSTANT_NUMEL_LIMIT"
    before = [(vars(module), vars(module)[name]) for module in (fake_tensor, proxy_tensor)]
    for names, _ in before:
        names[name] = elements
    try:
        yield
    finally:
        for names, limit in before:
            names[name] = limit
