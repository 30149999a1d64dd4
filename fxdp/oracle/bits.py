"""Compare the bits of a step with `fxdp.Bitwise` on virtual ranks with those of one device, in one process.

The step of each rank is the one that `compile` would run with `backend="eager"`: blocks, trees of sums,
gathers of shards, gradients. After it AdamW steps on each rank's parameters, sharded or full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import read_inputs
from fxdp.capture.refusals.stateful import copy_of
from fxdp.capture.sample_cuts import sample_ends
from fxdp.compiler.device_memory import own_memory
from fxdp.compiler.program import Program
from fxdp.compiler.strategy_choice import choose
from fxdp.compiler.watched_step import Watch, watched_step
from fxdp.ir.graph.draws import drawn_seed, kept_random_state, reseed
from fxdp.ir.graph.graphs import copy_graph, results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Gradient, OutputSpec, Parameter, result_words
from fxdp.ir.ops.parameter_shards import own_shard
from fxdp.ir.types.mesh import Mesh, mesh_of
from fxdp.ir.types.placements import ParamShard, Placement, Shard
from fxdp.ir.types.sizes import Cuts, Split, axis, rank_sizes, samples_of
from fxdp.ir.types.value_types import NodeType, TensorType
from fxdp.module.calls.call import request_of
from fxdp.module.calls.call_sizes import CallSizes, RowNumbers
from fxdp.options import Options
from fxdp.oracle.bit_record import BitFault, BitRecord, BitWatch, digest
from fxdp.oracle.rank_threads import RankThreads
from fxdp.oracle.virtual_ranks import VirtualRanks
from fxdp.torch_compat import without_autocast


@dataclass(frozen=True)
class BitRun:
    """The outcome of one split, compared with one device bit by bit.

    Attributes
    ----------
    split : samples per rank.
    fault : the first op on one device whose bits differ on a rank, if any.
    differing : the outputs, gradients, and parameters after a step of AdamW whose bits differ.
    nodes, results : the numbers of compared nodes and results.
    """

    split: tuple[int, ...]
    fault: BitFault | None
    differing: tuple[str, ...]
    nodes: int
    results: int

    @property
    def ok(self) -> bool:
        """True if all bits were equal."""
        return self.fault is None and not self.differing


_Values = dict[str, list[Tensor]]
"""The values of all ranks by the words for a result."""


@dataclass(frozen=True)
class BitSubject:
    """A model and its global batch, with the program of one device as reference.

    Parameters
    ----------
    module : the model in its own dtypes; not changed.
    tensors : the tensors of the global batch.
    found : a capture in which only the loss is differentiated.
    """

    module: nn.Module
    tensors: Sequence[Tensor]
    found: Captured
    options: Options
    seed: int
    ends: Mapping[str, Sequence[int]]
    """Where samples of a ragged batch end along each axis, after a 0; empty for any other batch."""

    @classmethod
    def of(
        cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, seed: int
    ) -> BitSubject:
        """Capture the model as a compiled module does."""
        module = copy_of(module)
        inputs = read_inputs(module, args, kwargs, options.batch_dims)
        found = capture_request(request_of(module, inputs, options, cut=True))
        ends = sample_ends(inputs, joins=False) if inputs.axes.names else {}
        return cls(module, [t.detach() for t in inputs.tensors], found, options, seed, ends)

    def compare(self, mesh: Mesh, splits: Sequence[tuple[int, ...]]) -> tuple[BitRun, ...]:
        """Return a run for each split of the first samples, compared with one device."""
        runs = []
        program = self._program(mesh, max(map(sum, splits)))
        alone = self._program(mesh_of({"dp": 1}, mesh.device_type), max(map(sum, splits)))
        with kept_random_state(), without_autocast():
            for split in splits:
                record = BitRecord()
                expected = self._run(alone, _on_one(split), [record.keep])
                watches = [BitWatch(record, rank) for rank in range(mesh.size)]
                values = self._run(program, split, [watch.see for watch in watches])
                differing = tuple(name for name, of in values.items() if _differ(of, expected[name]))
                faulty = [watch for watch in watches if watch.fault is not None]
                fault = min(faulty, key=lambda watch: watch.place).fault if faulty else None
                nodes = sum(watch.compared for watch in watches)
                runs.append(BitRun(split, fault, differing, nodes, len(values)))
        return tuple(runs)

    def _program(self, mesh: Mesh, batch: int) -> Program:
        options = self.options
        limit = options.memory_limit or (own_memory(mesh.device_type) if options.strategy == "auto" else None)
        own = replace(self.found, gm=copy_graph(self.found.gm))
        return choose(own, mesh, options, {"B": batch}, limit)

    def _run(self, program: Program, split: tuple[int, ...], watches: Sequence[Watch]) -> _Values:
        """Return the global values of all results, as every rank knows them."""
        reseed(self.seed)
        seed = drawn_seed()
        ranks = RankThreads(len(split))
        made = ranks.run(lambda rank: self._step(program, split, rank, seed, watches[rank]))
        virtual = VirtualRanks(split, self._sizes(split, 0).values(self.found), program.mesh)
        kinds = {spec: (meta(node).type, placement) for spec, node, placement in _placed(program)}
        found: _Values = {}
        for spec in made[0][0]:
            values = [results[spec] for results, _ in made]
            found[result_words(spec)] = _global(virtual, values, *kinds[spec])
        for name in made[0][1]:
            type_, placement = kinds[Gradient(Parameter(name))]
            values = [parameters[name] for _, parameters in made]
            found[f"parameter {name} after a step"] = _global(virtual, values, type_, placement)
        return found

    def _step(
        self, program: Program, split: tuple[int, ...], rank: int, seed: int, watch: Watch
    ) -> tuple[dict[OutputSpec, Tensor], dict[str, Tensor]]:
        """Return a rank's results, and its parameters after a step of AdamW."""
        program = replace(program, mesh=replace(program.mesh, rank=rank))
        sizes = self._sizes(split, rank)
        module, sharded = copy_of(self.module), _sharded(program)
        for name in sharded:
            full = module.get_parameter(name)
            rows = own_shard(full.detach(), len(split), rank).clone()
            owner, _, last = name.rpartition(".")
            module.get_submodule(owner).register_parameter(last, nn.Parameter(rows, full.requires_grad))
        symbols, numbers = sizes.values(self.found), RowNumbers().of(sizes)
        step = watched_step(program, module, symbols, sizes.batches, numbers, watch)
        results = step(self._inputs(split, rank), seed)
        specs = [spec for spec, _, _ in program.partition.results]
        found = {s: v for s, v in zip(specs, results, strict=True) if v is not None}
        trained = {s.of.name for s in found if isinstance(s, Gradient) and isinstance(s.of, Parameter)}
        for name in trained:
            parameter, gradient = module.get_parameter(name), found[Gradient(Parameter(name))]
            parameter.grad = gradient[: len(parameter)] if name in sharded else gradient
        parameters = {name: module.get_parameter(name) for name in sorted(trained)}
        if parameters:
            torch.optim.AdamW(parameters.values()).step()
        return found, {name: parameter.detach() for name, parameter in parameters.items()}

    def _inputs(self, split: Sequence[int], rank: int) -> list[Tensor]:
        axes, sizes, found = self.found.axes, rank_sizes(split, rank), []
        kinds = zip_longest(self.found.batch, axes.names, axes.points)
        for tensor, (dim, name, target) in zip(self.tensors, kinds, strict=True):
            if dim is not None:
                own = axis(name or "")
                tensor = tensor.narrow(dim, sizes[own.offset.name], sizes[own.local.name]).clone()
            if target is not None:  # values count from the first row of the rank
                tensor -= sizes[axis(target).offset.name]
            found.append(tensor)
        return found

    def _sizes(self, split: tuple[int, ...], rank: int) -> CallSizes:
        inputs = self._inputs(split, rank)
        device = inputs[0].device if inputs else None
        return CallSizes(self._cut(split, rank), (), tuple(t.shape for t in inputs), rank, device)

    def _cut(self, split: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return a split that says where the blocks of the rank end, if the batch is ragged."""
        if not isinstance(split, Split):
            return split
        samples = samples_of(split)
        first = sum(samples[:rank])
        cuts = range(0, samples[rank], self.options.block or 1)[1:]
        ends = {name: tuple(of[first + cut] - of[first] for cut in cuts) for name, of in self.ends.items()}
        return Split(split, split.further, Cuts(samples, (), ends))


def _on_one(split: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of all samples of a split on one rank."""
    if not isinstance(split, Split):
        return (sum(split),)
    further = {name: (sum(sizes),) for name, sizes in split.further.items()}
    return Split((sum(split),), further, Cuts((sum(samples_of(split)),), (), {}))


def _differ(values: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    (one,) = map(digest, expected)
    return any(digest(value) != one for value in values)


def _sharded(program: Program) -> set[str]:
    """Return the names of the parameters of which a rank holds rows."""
    graph = program.gm.graph
    nodes = graph.find_nodes(op="placeholder")
    specs = (meta(node).spec for node in nodes if isinstance(meta(node).placement, ParamShard))
    return {spec.name for spec in specs if isinstance(spec, Parameter)}


def _placed(program: Program) -> list[tuple[OutputSpec, Any, Placement]]:
    """Return the results of a program with their nodes and placements."""
    output = program.gm.graph.output_node()
    operands = meta(output).operands or [meta(node).placement for _, node in results_of(program.gm.graph)]
    pairs = zip(results_of(program.gm.graph), operands, strict=True)
    return [(spec, node, placement) for (spec, node), placement in pairs]  # type: ignore[misc]


def _global(
    ranks: VirtualRanks, values: Sequence[Tensor], type_: NodeType, placement: Placement
) -> list[Tensor]:
    """Return the global value of a result: once if ranks hold parts, else as each rank has it."""
    if not isinstance(placement, Shard | ParamShard):
        return list(values)
    full = ranks.combine(values, placement, type_)
    if isinstance(placement, ParamShard) and isinstance(type_, TensorType):
        full = full[: int(type_.shape[0])]
    return [full]
