"""Rewrite the raw joint graph in fxdp's form: placeholders and results ordered, named and annotated."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from fxdp import torch_compat
from fxdp.capture.export.rewrites import strip_effects
from fxdp.capture.export.skip_marks import label_of
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.raw_joint import RawJoint
from fxdp.capture.joint.sparse_lookups import rows_of_gradient, sparse_tables
from fxdp.capture.joint.written_parameters import (
    check_written,
    drop_gradients_of_writes,
    is_unread_gradient,
)
from fxdp.capture.locations import LocationIndex, module_path
from fxdp.capture.refusals.dense_only import check_dense
from fxdp.capture.refusals.overlaps import check_overlap
from fxdp.capture.refusals.unwritten import check_unwritten
from fxdp.errors import CaptureError
from fxdp.ir.graph.graphs import attribute_of, results_of
from fxdp.ir.graph.metadata import Metadata, meta
from fxdp.ir.graph.signature import (
    Buffer,
    Constant,
    Gradient,
    Input,
    InputSpec,
    Mutation,
    Output,
    OutputSpec,
    Parameter,
    Tangent,
)
from fxdp.torch_compat import aten

_ORDER = (Parameter, Buffer, Constant, Input, Tangent)
_DROPPED = (aten._assert_tensor_metadata.default,)
_KEPT_META = ("val", "seq_nr", "is_gradient_acc")


@dataclass(frozen=True)
class AnnotatedJoint:
    """A graph in fxdp's form, and the tensors of the graph's constants."""

    gm: fx.GraphModule
    constants: dict[str, torch.Tensor]


def annotate_joint(raw: RawJoint, sizes: Sizes) -> AnnotatedJoint:
    """Rebuild the raw joint graph with metadata on every node."""
    return _Converter(raw, sizes).run()


class _Converter:
    """Converter of a raw graph, node by node, into a new graph."""

    def __init__(self, raw: RawJoint, sizes: Sizes) -> None:
        strip_effects(raw.gm.graph)
        drop_gradients_of_writes(raw.gm.graph, raw.exported.owner)
        self.raw = raw
        self.sizes = sizes
        self.specs = SignatureSpecs(raw.exported.owner, raw.exported.paths)
        self.graph = fx.Graph()
        self.locations = LocationIndex(raw.gm.graph.nodes)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.constants: dict[str, torch.Tensor] = {}

    def run(self) -> AnnotatedJoint:
        """Return the converted graph."""
        check_written(self.raw.gm.graph, self.specs.of_input, self.locations)
        self._placeholders()
        for node in self.raw.gm.graph.nodes:
            if node.op == "output":
                self._output(node)
            elif node.op != "placeholder" and node not in self.copies and node.target not in _DROPPED:
                self._copy(node)
        self.graph.eliminate_dead_code(is_impure_node=_is_kept)
        self._erase_unused()
        check_unwritten(self.graph)
        gm = torch_compat.graph_module(self.raw.gm, self.graph, "Joint")
        return AnnotatedJoint(gm, self.constants)

    def _placeholders(self) -> None:
        """Emit the placeholders in the order of `_ORDER`, including tensor constants."""
        found: list[tuple[InputSpec, fx.Node]] = []
        for node in self.raw.gm.graph.nodes:
            token = isinstance(node.meta.get("desc"), torch_compat.ForwardTokenAOTInput)
            if token or is_unread_gradient(node):
                continue
            if node.op == "placeholder":
                spec = self.specs.of_input(node.meta["desc"])
                found.append((spec, node))
                if isinstance(spec, Constant):
                    self.constants[spec.name] = self.raw.buffers[node.meta["desc"].target]
            elif node.op == "get_attr" and isinstance(attribute_of(self.raw.gm, node), torch.Tensor):
                found.append((self._constant(node), node))
        for spec, node in sorted(found, key=lambda pair: self.specs.rank(pair[0])):
            # a call passes inputs and tangents by position, so unread ones keep their placeholders. An unread
            # buffer may be written (`torch.mv(w, v, out=self.u)`)
            if node.users or isinstance(spec, (Input, Tangent, Buffer)):
                self._placeholder(spec, node)

    def _placeholder(self, spec: InputSpec, node: fx.Node) -> None:
        # torch has a placeholder for each name of a tied parameter, fxdp has one
        made = next((m for m in self.copies.values() if meta(m).spec == spec), None)
        if made is None:
            made = self.graph.placeholder(identifier(spec_name(spec)))
            value = node.meta["val"] if "val" in node.meta else attribute_of(self.raw.gm, node)
            made.meta["val"] = value
            backward = isinstance(spec, Tangent)
            made.meta["fxdp"] = Metadata(type=self.sizes.type(value), spec=spec, backward=backward)
        self.copies[node] = made

    def _erase_unused(self) -> None:
        """Erase placeholders of parameters, buffers and constants that are neither read nor written."""
        written = {spec.of for spec, _ in results_of(self.graph) if isinstance(spec, Mutation)}
        for node in self.graph.find_nodes(op="placeholder"):
            spec = meta(node).spec
            if not node.users and spec not in written and isinstance(spec, (Parameter, Buffer, Constant)):
                self.graph.erase_node(node)
                if isinstance(spec, Constant):
                    self.constants.pop(spec.name, None)

    def _constant(self, node: fx.Node) -> Constant:
        """Return the input spec of a lifted tensor; the same tensor gets the same spec."""
        value = attribute_of(self.raw.gm, node)
        if value.requires_grad:
            raise CaptureError(
                f"the model uses a tensor of shape {list(value.shape)} that requires grad but is no "
                f"registered parameter ({self.locations.location(node)}): it would get no gradient. "
                "Make it an nn.Parameter"
            )
        for name, known in self.constants.items():
            if known is value:
                return Constant(name)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = value
        return Constant(name)

    def _copy(self, node: fx.Node) -> None:
        skip = label_of(node)
        if skip is not None:
            self._label(node, skip)
            return
        location = self.locations.location(node)
        check_dense(node, location)
        check_overlap(node, location)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.copies.__getitem__)
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node_name(node))
        made.meta.update((key, node.meta[key]) for key in _KEPT_META if key in node.meta)
        made.meta["fxdp"] = Metadata(
            type=self.sizes.type(node.meta.get("val")),
            location=location,
            backward=node.meta.get("partitioner_tag") == "is_backward",
        )
        self.copies[node] = made

    def _label(self, alias: fx.Node, skip: str) -> None:
        """Drop the alias that names a skip, and label the aliased value itself."""
        source = alias.args[0]
        assert isinstance(source, fx.Node)
        self.copies[alias] = self.copies[source]
        known = meta(self.copies[source])
        known.skip = skip if known.skip is None else f"{known.skip}, {skip}"

    def _output(self, node: fx.Node) -> None:
        """Emit the results that exist, each with an output spec."""
        results: list[fx.Node] = []
        specs: list[OutputSpec] = []
        values: Any = node.args[0]
        tables = {self.specs.named(Parameter, target) for target in sparse_tables(self.raw.exported.gm)}
        for value, descriptor in zip(values, node.meta["desc"], strict=True):
            spec = self.specs.of_output(descriptor)
            if not isinstance(value, fx.Node) or spec is None:
                continue
            copy = self.copies[value]
            if isinstance(spec, Output) and spec.index in self.raw.cloned:
                copy = _without_clone(copy)
            if isinstance(spec, Gradient) and spec.of in tables:
                copy = rows_of_gradient(self.graph, copy, self.sizes.type)
            results.append(copy)
            specs.append(spec)
        order = sorted(range(len(specs)), key=lambda i: self.specs.result_rank(specs[i]))
        made = self.graph.output(tuple(results[i] for i in order))
        made.meta["fxdp"] = Metadata(results=tuple(specs[i] for i in order))


class SignatureSpecs:
    """Converter from torch's descriptors to input and output specs with the user's names."""

    def __init__(self, module: nn.Module, paths: Sequence[str]) -> None:
        self._paths = paths
        self._names = first_names(module)
        self._order = {name: i for i, name in enumerate(self._names)}

    def of_input(self, descriptor: Any) -> InputSpec:
        """Return the spec of a placeholder."""
        if isinstance(descriptor, torch_compat.ParamAOTInput):
            return self.named(Parameter, descriptor.target)
        if isinstance(descriptor, torch_compat.BufferAOTInput):
            return self.named(Buffer, descriptor.target)
        if isinstance(descriptor, torch_compat.PlainAOTInput):
            return Input(descriptor.idx, self._paths[descriptor.idx])
        if isinstance(descriptor, torch_compat.TangentAOTInput):
            output = descriptor.output
            if isinstance(output, torch_compat.PlainAOTOutput):
                return Tangent(output.idx)
        raise CaptureError(f"the joint graph has an input that fxdp cannot place: {descriptor}")

    def of_output(self, descriptor: Any) -> OutputSpec | None:
        """Return the spec of a result; None for results that torch itself ignores."""
        if descriptor is None or isinstance(descriptor, torch_compat.ForwardTokenAOTOutput):
            return None
        if isinstance(descriptor, torch_compat.PlainAOTOutput):
            return Output(descriptor.idx)
        if isinstance(descriptor, torch_compat.InputMutationAOTOutput):
            of = self.of_input(descriptor.mutated_input)
            if isinstance(of, (Parameter, Buffer, Input)):
                return Mutation(of)
        if isinstance(descriptor, torch_compat.GradAOTOutput):
            grad_of = self.of_input(descriptor.grad_of)
            if isinstance(grad_of, (Parameter, Input)):
                return Gradient(grad_of)
        raise CaptureError(f"the joint graph has a result that fxdp cannot place: {descriptor}")

    def rank(self, spec: InputSpec) -> tuple[int, int]:
        """Return the sort key of a placeholder: by kind, then by order in the module or the call."""
        kind = _ORDER.index(type(spec))
        if isinstance(spec, (Input, Tangent)):
            return kind, spec.index
        return kind, self._order.get(spec.name, 0)

    def result_rank(self, spec: OutputSpec) -> tuple[int, int, int]:
        """Return the sort key of a result: outputs, mutations, gradients, each sorted like inputs."""
        if isinstance(spec, Output):
            return 0, spec.index, 0
        assert isinstance(spec, (Mutation, Gradient))
        return (1 if isinstance(spec, Mutation) else 2), *self.rank(spec.of)

    def named(self, kind: Callable[[str], InputSpec], target: str) -> InputSpec:
        """Return the spec of a parameter or buffer; parameters of a loss function are constants."""
        path = module_path(target)
        return kind(self._names[path]) if path in self._names else Constant(path)


def first_names(owner: nn.Module) -> dict[str, str]:
    """Return a dict from every name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    named = [*owner.named_parameters(remove_duplicate=False), *owner.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def spec_name(spec: InputSpec) -> str:
    """Return the name of a placeholder, not yet converted to a Python identifier."""
    if isinstance(spec, Input):
        return spec.path
    return f"tangent_{spec.index}" if isinstance(spec, Tangent) else spec.name


def identifier(text: str) -> str:
    """Convert a path or dotted name to a Python identifier."""
    name = re.sub(r"\W+", "_", text).strip("_")
    return name if name and not name[0].isdigit() else f"_{name}"


def node_name(node: fx.Node) -> str:
    """Return the name of the op, without the numbers that torch appends while tracing."""
    if isinstance(node.target, torch_compat.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return identifier(str(getattr(node.target, "__name__", node.target)))


def _without_clone(copy: fx.Node) -> fx.Node:
    """Return the operand of a clone that capture inserted before an output; an input stays cloned."""
    source = copy.args[0] if copy.target is aten.clone.default else copy
    root = source
    while isinstance(root, fx.Node) and getattr(root.target, "is_view", False):
        root = root.args[0]
    keep = not isinstance(source, fx.Node) or not isinstance(root, fx.Node) or root.op == "placeholder"
    return copy if keep else source  # type: ignore[return-value]


def _is_kept(node: fx.Node) -> bool:
    """Return whether dead-code elimination must keep a node.

    Kept are placeholders, the output, and random ops, which advance the generator for later random ops.
    """
    draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return node.op in ("placeholder", "output") or draws
