"""Run one split of a batch on virtual ranks, and compare nodes and results with one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from fxdp.capture.batch_dims import by_sample
from fxdp.capture.captured import Captured
from fxdp.capture.inputs import Inputs, read_inputs
from fxdp.ir.graph.draws import graph_draws, kept_random_state, reseed
from fxdp.ir.graph.gradient_rows import sparse_gradients
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import Location, meta
from fxdp.ir.graph.signature import Gradient, Input, InputSpec, Mutation, OutputSpec
from fxdp.ir.ops.sparse_rows import sparse_gradient
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.sizes import Split
from fxdp.options import Options
from fxdp.oracle.fault import Fault
from fxdp.oracle.lockstep import LockStep
from fxdp.oracle.one_device import first_samples, input_values, run_eager
from fxdp.oracle.reference import Reference
from fxdp.oracle.results import ResultError, compare_results
from fxdp.torch_compat import without_autocast


@dataclass(frozen=True)
class SplitRun:
    """The outcome of one split.

    Attributes
    ----------
    split : samples per rank.
    faults : the first node that differs, if any.
    results : one row per output, gradient and changed buffer; empty after a faulty node.
    nodes : the number of compared nodes.
    worst, worst_node : the largest relative error of a node, and the node's name.
    ties : the lines at which rounding decides (`x > y` for operands equal up to rounding); there the ranks
        continued with the result of one device.
    """

    split: tuple[int, ...]
    faults: tuple[Fault, ...]
    results: tuple[ResultError, ...]
    nodes: int
    worst: float
    worst_node: str
    ties: tuple[Location, ...] = ()

    @property
    def wrong(self) -> tuple[ResultError, ...]:
        """The results that differ."""
        return tuple(row for row in self.results if row.what)

    @property
    def ok(self) -> bool:
        """True if all values were equal."""
        return not self.faults and not self.wrong


@dataclass(frozen=True)
class Subject:
    """A model in two forms: the program of one rank, and the captured graph that the program must equal."""

    module: nn.Module
    local: fx.GraphModule
    reference: Captured
    options: Options
    tolerances: Mapping[str, float]
    mesh: Mesh | None = None

    def run(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], split: tuple[int, ...], seed: int
    ) -> SplitRun:
        """Run the first `sum(split)` samples of the inputs; the caller's random state is not changed."""
        reference, batch = self.reference, sum(split)
        inputs = read_inputs(self.module, args, dict(kwargs), self.options.batch_dims)
        # of a ragged batch all samples are there
        dims = (None,) * len(reference.batch) if isinstance(split, Split) else reference.batch
        tensors = first_samples(inputs.tensors, dims, batch)
        args, kwargs = inputs.rebuild(tensors)
        with kept_random_state():
            reseed(seed)
            asked = self.options
            eager = run_eager(self.module, args, kwargs, reference, asked.loss_fn, asked.precision)
            specs = input_values(self.module, reference, tensors, eager.tangents)
            runner = self._runner(split, _symbol_values(reference, tensors))
            reseed(seed)
            with without_autocast():
                found = runner.run(specs)
            if runner.faults:
                rows: list[ResultError] = []
            else:
                reseed(seed)
                own = self._comparable(runner, found, specs)
                wanted = _by_sample(eager.results, inputs)
                rows = compare_results(own, wanted, self._by_spec(), runner.floors(), eager.changed)
        worst = max(runner.errors, key=runner.errors.__getitem__, default=None)
        return SplitRun(
            split, tuple(runner.faults), tuple(rows), len(runner.errors),
            0.0 if worst is None else runner.errors[worst], "" if worst is None else worst.name,
            tuple(dict.fromkeys(meta(node).location for node in runner.ties)),
        )  # fmt: skip

    def draws_apart(self, world: int) -> bool:
        """Return whether the ranks draw numbers of their own, which eager cannot reproduce."""
        if world == 1 or self.options.single_device_rng:
            return False
        return graph_draws(self.local.graph)

    def _runner(self, split: tuple[int, ...], symbols: Mapping[str, int]) -> LockStep:
        return LockStep(
            self.local, self.reference.gm, split, symbols,
            single_device_rng=self.options.single_device_rng, tolerances=self.tolerances,
            mesh=self.mesh, points=self.reference.axes.points,
        )  # fmt: skip

    def _comparable(
        self, runner: LockStep, found: dict[OutputSpec, Tensor], specs: Mapping[InputSpec, Any]
    ) -> dict[OutputSpec, Tensor]:
        """Return results comparable with eager: the ranks', or the captured graph's if ranks draw apart."""
        if not self.draws_apart(len(runner.sizes)):
            return self._without_rows(found)
        with without_autocast():
            reference = Reference(self.reference.gm, runner.sizes, runner.symbols)
            return self._without_rows(reference.run(specs))

    def _without_rows(self, found: dict[OutputSpec, Tensor]) -> dict[OutputSpec, Tensor]:
        """Return the results with dense gradients instead of the rows of sparse ones."""
        for of in sparse_gradients(self.reference.gm.graph):
            size = self.module.get_parameter(of.name).shape
            found[Gradient(of)] = sparse_gradient(found[Gradient(of)], size).to_dense()
        return found

    def _by_spec(self) -> dict[OutputSpec, float]:
        pairs = results_of(self.local.graph)
        return {spec: self.tolerances[value.name] for spec, value in pairs if spec is not None}


def _by_sample(results: Mapping[OutputSpec, Tensor], inputs: Inputs) -> dict[OutputSpec, Tensor]:
    """Return gradients and changes of inputs in the program's form, with the rows of a sample in one dim."""
    found = dict(results)
    for i, (dim, rows, path) in enumerate(zip(inputs.batch_dims, inputs.rows, inputs.paths, strict=True)):
        for spec in (Gradient(Input(i)), Mutation(Input(i))):
            if spec in found:
                found[spec] = by_sample(found[spec], dim, rows, path)
    return found


def _symbol_values(captured: Captured, tensors: Sequence[Tensor]) -> dict[str, int]:
    """Return the values of the dynamic sizes of the captured program except the batch size."""
    return {name: tensors[index].shape[dim] for name, (index, dim) in captured.symbols.items()}
