"""How long a step keeps values: what travels is freed after its last use, 1F1B keeps less than GPipe."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, fx
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxdp
from fxdp.runtime import p2p
from tests.captures import captured_once
from tests.pipeline.models import Skips, skips
from tests.rank_pool import RankPool


class Quiet(Skips):
    """Nothing but the loss lives on after the step."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, y)["loss"]


STAGES = ["b", "c", "d"]
CALLS = ("forward_", "backward_", "input_gradient_", "weight_gradient_")


def _compiled(microbatches: int, schedule: str, checkpoint: str) -> fxdp.CompiledModule:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    pipeline = {"stages": STAGES, "microbatches": microbatches, "schedule": schedule}
    return fxdp.compile(
        Quiet(), mesh, pipeline=pipeline, activation_checkpointing=checkpoint, backend="eager"
    )


# ---- what travels ----


class Watched(fx.Interpreter):
    """Runs a step, letting go of each value after its last use as generated code does, and watches storages.

    After the run, `freed` is the position of the first stage call at which a received or sent value was gone.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.position = {node: i for i, node in enumerate(module.graph.nodes)}
        self.watched: dict[fx.Node, StorageWeakRef] = {}
        self.freed: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        if _is_stage_call(n):
            self.look(self.position[n])
        result = super().run_node(n)
        if n.target is p2p.wait:
            self.watched[n] = StorageWeakRef(result.untyped_storage())
        elif n.op == "call_module" and str(n.target).startswith("send_"):
            (value, *_), _ = self.fetch_args_kwargs_from_env(n)
            assert isinstance(n.args[0], fx.Node)
            self.watched.setdefault(n.args[0], StorageWeakRef(value.untyped_storage()))
        return result

    def look(self, position: int) -> None:
        """Note what is gone."""
        for node, storage in self.watched.items():
            if storage.expired():
                self.freed.setdefault(node, position)

    def released(self, node: fx.Node) -> int:
        """The position after which nothing in the program needs the value, what stages saved included."""
        return max(self.position[user] for user in _holders(node))


def _is_stage_call(node: fx.Node) -> bool:
    return node.op == "call_module" and str(node.target).startswith(CALLS)


def _holders(node: fx.Node) -> set[fx.Node]:
    """The users of a value, of the send that reads it, and of what stage calls keep of it."""
    found: set[fx.Node] = {node}
    open_: list[fx.Node] = [node, *(a for a in node.all_input_nodes if _is_stage_call(a))]
    while open_:
        for user in open_.pop().users:
            if user in found:
                continue
            found.add(user)
            keeps = user.target is operator.getitem and user.name.startswith(("saved_", "rest_"))
            if keeps or _is_stage_call(user) or str(user.target).startswith("send_"):
                open_.append(user)
    return found


def _kept_too_long(schedule: str, checkpoint: str) -> tuple[int, list[str]]:
    """How many values travelled in a step, and those that outlived the stage call after their release."""
    compiled = _compiled(4, schedule, checkpoint)
    batch = skips(8)
    compiled(**batch)
    step = compiled._last().runs
    watched = Watched(step.program)
    step.program = watched.run
    compiled(**batch).backward()
    calls = [i for n, i in watched.position.items() if _is_stage_call(n)]
    watched.look(len(watched.position))
    late = []
    for node in watched.watched:
        due = min((i for i in calls if i > watched.released(node)), default=len(watched.position))
        if watched.freed.get(node, len(watched.position) + 1) > due:
            late.append(f"{node} released at {watched.released(node)}, alive at {due}")
    late += [f"{send} under way after {call}" for send, call in _unsettled(watched)]
    return len(watched.watched), late


def _unsettled(watched: Watched) -> list[tuple[fx.Node, fx.Node]]:
    """Sends of a micro-batch's forward that the program still waits for after its backward began."""
    found = []
    for send in watched.module.graph.find_nodes(op="call_module", target="send_forward"):
        (end,) = send.users
        made = send.args[0].all_input_nodes
        kept = [u for n in made for u in n.users if u.name.startswith("saved_")]
        calls = [u for node in kept for u in node.users]
        found += [(send, call) for call in calls if watched.position[end] > watched.position[call]]
    return found


def _all_kept() -> list[tuple[int, list[str]]]:
    with captured_once():
        return [
            _kept_too_long(schedule, checkpoint)
            for schedule, checkpoint in (
                ("1f1b", "never"), ("1f1b", "always"), ("gpipe", "except_last"), ("zero-bubble", "always"),
            )
        ]  # fmt: skip


def test_values_that_travel_are_freed_after_their_last_use(ranks: RankPool) -> None:
    for found in ranks.run(4, _all_kept):
        for count, late in found:
            assert count >= 8
            assert late == []


# ---- the peak ----


class Peak(TorchDispatchMode):
    """The most bytes that were alive at once among the results of all ops."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        self._add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return result

    def _add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())


def _peak(schedule: str, checkpoint: str) -> int:
    compiled = _compiled(8, schedule, checkpoint)
    batch = skips(256)
    compiled(**batch)
    with Peak() as peak:
        compiled(**batch)
    return peak.bytes


def _peaks() -> dict[str, int]:
    cases = [("gpipe", "never"), ("1f1b", "never"), ("gpipe", "always")]
    with captured_once():
        return {f"{schedule} {checkpoint}": _peak(schedule, checkpoint) for schedule, checkpoint in cases}


def test_one_forward_one_backward_keeps_less_than_gpipe(ranks: RankPool) -> None:
    """GPipe keeps all 8 micro-batches on each rank; 1F1B at most 4, 3, 2 and 1 of them."""
    found = ranks.run(4, _peaks)
    for peaks in found:
        assert peaks["1f1b never"] < peaks["gpipe never"]
        assert peaks["gpipe always"] < peaks["gpipe never"]
    assert found[3]["1f1b never"] < 0.75 * found[3]["gpipe never"]
