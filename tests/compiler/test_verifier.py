"""One malformed graph per check; the message shows the line and what is wrong with it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx

import fxdp.rules  # noqa: F401 - the order of imports is any
from fxdp.capture.export.skip_marks import MARK
from fxdp.compiler.invariants import CHECKS
from fxdp.compiler.verifier import verify
from fxdp.errors import VerifierError
from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import Cause, Location
from fxdp.ir.graph.signature import Buffer, Gradient, Input, Mutation, Output, Parameter, Tangent
from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.types.decompositions import Decomposition
from fxdp.ir.types.placements import MOMENTS, P, ParamShard, R, S
from tests.graphs import Sketch

aten = torch.ops.aten
CAUSE = Cause("consumer", "producer", Location(), "gradient of w")


def faults(gm: fx.GraphModule, level: Level) -> list[str]:
    """What the verifier says, without its first line."""
    try:
        verify(gm, level, "some-pass")
    except VerifierError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return []


def _sound() -> Sketch:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    total = g.call(aten.sum.dim_IntList, x, [0], type="f32[4]", at=P, reads=(S(0),))
    pending = g.call(redistributions.all_reduce, total, "sum", type="f32[4]", at=R, reads=(P,), cause=CAUSE)
    done = g.call(redistributions.wait, pending, type="f32[4]", at=R, reads=(R,))
    g.end = g.returns({Gradient(Parameter("w")): done}, (R,))  # type: ignore[attr-defined]
    return g


def test_a_sound_graph_has_no_faults() -> None:
    gm = _sound().end  # type: ignore[attr-defined]
    for level in (Level.CAPTURED, Level.PLACED, Level.EXPLICIT, Level.LOCAL):
        assert faults(gm, level) == []


def test_all_faults_are_reported_at_once() -> None:
    g = Sketch()
    x, again = g.add(Input(0, "x"), "f32[B]"), g.add(Input(0, "x"), "f32[B]")
    gm = g.returns({Output(0): g.call(aten.add.Tensor, x, again), Output(1): x})
    with pytest.raises(VerifierError) as caught:
        verify(gm, Level.PLACED, "batch-dim-analyzer")
    assert_expected_inline(
        str(caught.value) + "\n",
        """\
after batch-dim-analyzer, the graph breaks level PLACED in 5 places:
  %x_1: f32[B] = input(x)
    has the spec of another placeholder
  %add_tensor = aten.add.Tensor(%x, %x_1)
    has no type
  %x: f32[B] = input(x)
    has no placement
  %x_1: f32[B] = input(x)
    has no placement
  %add_tensor = aten.add.Tensor(%x, %x_1)
    has 2 operands and 0 operand placements
""",
    )


def test_every_check_has_a_malformed_graph() -> None:
    checks = {check.__name__.removeprefix("_") for group in CHECKS.values() for check in group}
    assert checks == {build.__name__.removeprefix("_") for build, _, _ in MALFORMED}


# ---- CAPTURED --------------------------------------------------------------------------------------------


def _inputs_have_specs() -> fx.GraphModule:
    g = Sketch()
    g.add(Parameter("w"), "f32[3]")
    g.add(Parameter("w"), "f32[3]")
    return g.returns({Output(0): g.add(None, "f32[3]")})


def _results_have_specs() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[3]")
    gm = g.returns({Output(0): x})
    gm.graph.output_node().args = ((x, x),)
    return gm


def _tensors_have_types() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[3]")
    return g.returns({Output(0): g.call(aten.neg.default, g.call(aten.relu.default, x), type="f32[3]")})


def _outputs_are_in_order() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[3]")
    return g.returns({Output(1): x, Output(0): x})


def _no_skip_marks_are_left() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]")
    return g.returns({Output(0): g.call(MARK, x, "stash a", type="f32[B]")})


# ---- PLACED ----------------------------------------------------------------------------------------------


def _tensors_are_placed() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    y = g.call(aten.relu.default, x, type="f32[B]", reads=(S(0),))
    z = g.call(aten.add.Tensor, x, y, type="f32[B]", at=S(0), reads=(S(0),))
    w = g.call(aten.neg.default, z, type="f32[B]", at=S(0))
    return g.returns({Output(0): w})


def _shards_fit_shapes() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4, B - 1, B*B]", S(0))
    for at in (S(1), S(2), S(3), S(4), S(0, 2)):
        x = g.call(aten.neg.default, x, type="f32[B, 4, B - 1, B*B]", at=at, reads=(R,))
    parts = g.call(aten.split.Tensor, x, 2, type="(f32[B], f32[3])", at=(S(0), S(0)), reads=(R,))
    return g.returns({Output(0): g.call(operator.getitem, parts, 0, type="f32[B]", at=S(0))})


# ---- EXPLICIT --------------------------------------------------------------------------------------------


def _edges_need_no_redistribution() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    y = g.call(aten.det.default, x, type="f32[]", at=R, reads=(R,))
    return g.returns({Output(0): y, Output(1): x}, (R, R))


def _redistributions_do_what_they_say() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, B]", S(0))
    summed = g.call(redistributions.all_reduce, x, "sum", type="f32[B, B]", at=R, reads=(S(0),), cause=CAUSE)
    done = g.call(redistributions.wait, summed, type="f32[B, B]", at=S(1), reads=(R,))
    cut = g.call(
        redistributions.shard,
        g.add(Parameter("w"), "f32[B, B]", R),
        1,
        1,
        type="f32[B, B]",
        at=S(0),
        reads=(R,),
    )
    own = g.call(MOMENTS_OP, x, (0,), type="f32[3, B]", at=MOMENTS, reads=(S(0),))
    added = g.call(
        redistributions.all_reduce, own, "sum", type="f32[3, B]", at=R, reads=(MOMENTS,), cause=CAUSE
    )
    return g.returns({Output(0): done, Output(1): cut, Output(2): g.call(redistributions.wait, added, at=R)})


def _collectives_have_one_wait() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    gather = g.call(redistributions.all_gather, x, 0, 1, 1, type="f32[B]", at=R, reads=(S(0),), cause=CAUSE)
    first = g.call(redistributions.wait, gather, type="f32[B]", at=R, reads=(R,))
    second = g.call(redistributions.wait, gather, type="f32[B]", at=R, reads=(R,))
    third = g.call(redistributions.wait, x, type="f32[B]", at=S(0), reads=(S(0),))
    return g.returns({Output(0): first, Output(1): second, Output(2): third})


def _parameter_buckets_start_in_one_order() -> fx.GraphModule:
    g = Sketch()
    w, x = g.add(Parameter("w"), "f32[4]", ParamShard()), g.add(Input(0, "x"), "f32[B]", S(0))
    reads = {"type": "f32[4]", "at": R, "cause": CAUSE}
    first = g.call(redistributions.all_gather_shards, [w], (2,), (x,), reads=(ParamShard(), None), **reads)
    second = g.call(redistributions.all_gather_shards, [w], (2,), (x,), reads=(ParamShard(), None), **reads)
    done = [g.call(redistributions.wait, n, type="f32[4]", at=R, reads=(R,)) for n in (first, second)]
    return g.returns({Output(i): n for i, n in enumerate(done)})


def _casts_come_before_all_gathers() -> fx.GraphModule:
    g = Sketch()
    results: dict[Any, fx.Node] = {}
    read_as = {"w": ["bf16", "bf16"], "a": ["bf16", "f64"], "b": ["f64"], "c": ["bf16", None]}
    for name, dtypes in read_as.items():
        own = g.add(Parameter(name), "f32[4]", ParamShard())
        for dtype in dtypes:
            start = g.call(
                redistributions.all_gather_shards,
                own,
                type="f32[4]",
                at=R,
                reads=(ParamShard(),),
                cause=CAUSE,
            )
            done = g.call(redistributions.wait, start, type="f32[4]", at=R, reads=(R,))
            target = aten.neg.default if dtype is None else aten._to_copy.default
            read = g.call(target, done, type=f"{dtype or 'f32'}[4]", at=R, reads=(R,))
            results[Output(len(results))] = read
    return g.returns(results, (R,) * len(results))


def _all_gathers_of_the_backward_read_a_tangent() -> fx.GraphModule:
    g = Sketch()
    w, x = g.add(Parameter("w"), "f32[4]", ParamShard()), g.add(Input(0, "x"), "f32[B]", S(0))
    tangent = g.add(Tangent(0), "f32[B]", S(0))
    reads: Any = {"type": "f32[4]", "at": R, "cause": CAUSE, "reads": (ParamShard(), None)}
    starts = [g.call(redistributions.all_gather_shards, [w], (2,), (x,), **reads)]
    starts.append(g.call(redistributions.all_gather_shards, [w], (2,), (x,), backward=True, **reads))
    reads["reads"] = (ParamShard(), None, None)
    starts.append(
        g.call(redistributions.all_gather_shards, [w], (2,), (starts[1], tangent), backward=True, **reads)
    )
    done = [g.call(redistributions.wait, n, type="f32[4]", at=R, reads=(R,)) for n in starts]
    return g.returns({Output(i): n for i, n in enumerate(done)})


def _collectives_have_causes() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    gather = g.call(redistributions.all_gather, x, 0, 1, 1, type="f32[B]", at=R, reads=(S(0),))
    return g.returns({Output(0): g.call(redistributions.wait, gather, type="f32[B]", at=R, reads=(R,))})


def _partial_flows_through_linear_ops() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    total = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    lost = g.call(aten.neg.default, total, type="f32[]", at=R, reads=(P,))
    bent = g.call(aten.exp.default, total, type="f32[]", at=P, reads=(P,))
    square = g.call(aten.mul.Tensor, total, total, type="f32[]", at=P, reads=(P, P))
    more = g.call(aten.add.Tensor, total, lost, type="f32[]", at=P, reads=(P, R))
    filled = g.call(aten.masked_fill.Scalar, total, lost, 1.0, type="f32[]", at=P, reads=(P, R))
    good = g.call(aten.mul.Tensor, total, lost, type="f32[]", at=P, reads=(P, R))
    ones = g.call(aten.ones_like.default, total, type="f32[]", at=P, reads=(P,))
    zeros = g.call(aten.zeros_like.default, total, type="f32[]", at=R, reads=(P,))
    values = (lost, bent, square, more, filled, good, ones, zeros)
    return g.returns({Output(i): n for i, n in enumerate(values)}, (R,))


def _results_are_not_partial() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B]", S(0))
    total = g.call(aten.sum.default, x, type="f32[]", at=P, reads=(S(0),))
    return g.returns({Mutation(Buffer("total")): total}, (P,))


# ---- LOCAL, EMITTED --------------------------------------------------------------------------------------


def _decompositions_are_expanded() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[4, B]", S(1))
    decomposition = Decomposition((), (None,), 0)
    y = g.call(
        aten._softmax.default,
        x,
        1,
        False,
        type="f32[4, B]",
        at=S(1),
        reads=(S(1),),
        decomposition=decomposition,
    )
    return g.returns({Output(0): y}, (S(1),))


def _sizes_are_own() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 3]", S(0))
    size = g.call(aten.sym_size.int, x, 0, type="int(B)")
    return g.returns(
        {Output(0): g.call(aten.view.default, x, [size, 3], type="f32[B, 3]", at=S(0), reads=(S(0),))},
        (S(0),),
    )


def _own_nodes_have_stages() -> fx.GraphModule:
    return _staged(None)


def _forward_goes_on() -> fx.GraphModule:
    return _staged(0)


def _backward_comes_back() -> fx.GraphModule:
    return _staged(1, backward=0)


def _steps_end_last() -> fx.GraphModule:
    return _staged(1, once=True)


def _staged(second: int | None, backward: int = 2, *, once: bool = False) -> fx.GraphModule:
    """x -> relu of stage 1 -> tanh of stage `second` -> neg backward, of `backward`, and again of stage 1."""
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[B, 4]", S(0))
    facts: dict[str, Any] = {"type": "f32[B, 4]", "at": S(0)}
    relu = g.call(aten.relu.default, x, reads=(S(0),), stage=1, **facts)
    tanh = g.call(aten.tanh.default, relu, reads=(S(0),), stage=second, once=once, **facts)
    neg = g.call(aten.neg.default, x, reads=(S(0),), stage=backward, backward=True, **facts)
    both = g.call(aten.mul.Tensor, tanh, neg, reads=(S(0), S(0)), stage=1, backward=True, **facts)
    return g.returns({Output(0): both}, (S(0),))


def _everything_is_executable() -> fx.GraphModule:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[3]", R)
    term = g.call(redistributions.partial, x, type="f32[3]", at=R, reads=(R,))
    method = g.graph.call_method("neg", (term,))
    method.meta = dict(x.meta)
    return g.returns({Output(0): method}, (R,))


MALFORMED: list[tuple[Callable[[], fx.GraphModule], Level, list[str]]] = [
    (
        _inputs_have_specs,
        Level.CAPTURED,
        ["has the spec of another placeholder", "has no spec in the signature"],
    ),
    (
        _results_have_specs,
        Level.CAPTURED,
        ["has 2 results and 1 slots"],
    ),
    (_tensors_have_types, Level.CAPTURED, ["has no type"]),
    (_outputs_are_in_order, Level.CAPTURED, ["has outputs [1, 0]"]),
    (_no_skip_marks_are_left, Level.CAPTURED, ["marks a skip connection that has no route"]),
    (
        _tensors_are_placed,
        Level.PLACED,
        [
            "has no placement",
            "has 2 operands and 1 operand placements",
            "has 1 operands and 0 operand placements",
        ],
    ),
    (
        _shards_fit_shapes,
        Level.PLACED,
        [
            f"cannot be {at}: that dim is no multiple of the batch"
            for at in (S(1), S(2), S(3), S(4), S(0, 2), S(0))
        ],
    ),
    (
        _edges_need_no_redistribution,
        Level.EXPLICIT,
        ["reads %x as R, which is S(0)", "reads %x as R, which is S(0)"],
    ),
    (
        _redistributions_do_what_they_say,
        Level.EXPLICIT,
        [
            "turns S(0) into R",
            "turns R into S(1)",
            "does not name the dim and outer factor of S(0)",
            "reduces P(moments) by sum",
        ],
    ),
    (
        _collectives_have_one_wait,
        Level.EXPLICIT,
        ["needs exactly one wait, has 2 users", "waits for what is no collective"],
    ),
    (_parameter_buckets_start_in_one_order, Level.LOCAL, ["may start before %all_gather_shards"]),
    (
        _all_gathers_of_the_backward_read_a_tangent,
        Level.LOCAL,
        ["is of the backward, but depends on no tangent"],
    ),
    (
        _casts_come_before_all_gathers,
        Level.EXPLICIT,
        ["gathers %w as torch.float32, which is read as torch.bfloat16 alone"],
    ),
    (_collectives_have_causes, Level.EXPLICIT, ["has no cause"]),
    (
        _partial_flows_through_linear_ops,
        Level.EXPLICIT,
        [
            "reads a Partial value but gives none",
            "reads a Partial value in which it is not linear",
            "reads a Partial value in which it is not linear",
            "reads a Partial value in which it is not linear",
            "reads a Partial value in which it is not linear",
            "reads no more than the shape of a Partial value but gives one",
        ],
    ),
    (_results_are_not_partial, Level.EXPLICIT, ["leaves the program as a Partial value"]),
    (_decompositions_are_expanded, Level.EXPLICIT, ["was placed as several ops and is still one"]),
    (_sizes_are_own, Level.LOCAL, ["reads a size from the tensor %x"]),
    (
        _own_nodes_have_stages,
        Level.STAGED,
        ["has no stage, but reads %relu_default of stage 1"],
    ),
    (
        _forward_goes_on,
        Level.STAGED,
        ["of stage 0 reads %relu_default of stage 1: the forward only goes on"],
    ),
    (
        _backward_comes_back,
        Level.STAGED,
        ["of stage 1 reads %neg_default of stage 0: the backward only comes back"],
    ),
    (
        _steps_end_last,
        Level.STAGED,
        ["runs in each micro-batch, but reads %tanh_default, which comes after the last"],
    ),
    (
        _everything_is_executable,
        Level.EMITTED,
        ["is not lowered", "is a call_method, which later stages do not run"],
    ),
]


@pytest.mark.parametrize(("build", "level", "expected"), MALFORMED, ids=lambda v: getattr(v, "__name__", ""))
def test_malformed(build: Callable[[], fx.GraphModule], level: Level, expected: list[str]) -> None:
    check = next(c for group in CHECKS.values() for c in group if c.__name__ == build.__name__)
    gm = build()
    assert [what for _, what in check(gm.graph)] == expected
    assert set(expected) <= set(faults(gm, level)), "the level includes the check"


def test_levels_below_do_not_ask_for_more() -> None:
    assert faults(_edges_need_no_redistribution(), Level.PLACED) == []
    assert faults(_sizes_are_own(), Level.EXPLICIT) == []


def test_results_need_slots_of_their_own() -> None:
    g = Sketch()
    x = g.add(Input(0, "x"), "f32[3]")
    gm = g.returns({Output(0): x})
    gm.graph.output_node().args = ((x, x),)
    gm.graph.output_node().meta["fxdp"].results = (Output(0), Output(0))
    assert "has results without a slot of their own" in faults(gm, Level.CAPTURED)
