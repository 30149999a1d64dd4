"""Name the lines of a script that would be wrong or needless by hand, most of them written for DDP.

dist.all_reduce(total)       total is a sum over the global batch: a second sum counts it once per rank
loss / world_size            the loss is the global batch's mean
if rank == 0: model(x)       a forward of global tensors takes all ranks
def __getitem__(self, i):    a rank loads its own samples, for which alone it would draw; not where it is
    random.random()          edited to load all
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fxdp.cli.port.port_draws import called, dotted, draws_of_samples
from fxdp.cli.port.port_edits import ALL_SAMPLES, edits_of

_SUMS = (
    "all_reduce", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather",
    "gather_object", "reduce_scatter", "reduce_scatter_tensor",
)  # fmt: skip
_FROM = ("dist", "torch.distributed", "distributed")
_DIVIDED = re.compile(r"^(?!.*(batch|workers|len\(|\blr\b|rate|size))")
_MULTIPLIED = re.compile(r"loss|grad")
_RANK_0 = re.compile(r"\brank\b.*== 0|\b(is_)?(main|master)(_process)?\b|not .*\brank\b")

_SAMPLER = (
    "repeats or drops samples where they do not divide, and then is not one device's data: leave the sampler "
    "and set_epoch out, make the loader as for one device (shuffle=True, all ranks' batch size) and take "
    "fxdp.shard(loader_of_parts(loader))"
)
_SUM = (
    "what is computed from global tensors is the global batch's on every rank: leave the line out, or it "
    "counts each value once per rank"
)
_DRAWN = (
    "a rank loads its own samples alone, and draws for these: other numbers than one device's. Take "
    "loader_of_parts(loader, all_samples=True), or fxdp run, which draws as one device"
)
_ALONE = (
    "line {line} runs on one rank alone, and waits for the others in its first sum over the batch: call on "
    "all ranks, print and save on one"
)


@dataclass(frozen=True, order=True)
class Remark:
    """A line of a script, and what to do about it."""

    line: int
    code: str
    text: str


def remarks_of(source: str) -> list[Remark]:
    """Return the remarks about a script, by line.

    Raises
    ------
    SyntaxError : the source is no Python.
    """
    lines = source.splitlines()
    tree = ast.parse(source)
    found = {
        Remark(node.lineno, lines[node.lineno - 1].strip(), text)
        for look in _LOOKS
        for node, text in look(tree)
    }
    return sorted(found)


_Found = Iterator[tuple[ast.expr | ast.stmt, str]]


def _samplers(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) == "DistributedSampler":
            yield node, _SAMPLER


def _collectives(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or called(node) not in _SUMS:
            continue
        owner = dotted(node.func).rpartition(".")[0]
        if owner in _FROM or owner == "":
            yield node, _SUM


def _world_sizes(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
            left, right = node.left, node.right
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Div, ast.Mult)):
            left, right = node.target, node.value
        else:
            continue
        value = _DIVIDED if isinstance(node.op, ast.Div) else _MULTIPLIED
        if _is_world_size(right) and value.search(ast.unparse(left)):
            yield node, "losses, metrics and gradients are the global batch's already: leave the factor out"


def _is_world_size(node: ast.expr) -> bool:
    name = called(node) or dotted(node).rpartition(".")[2]
    return name.lower() in ("get_world_size", "world_size", "worldsize", "num_gpus", "ngpus")


def _sync_batchnorms(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if called(node) == "convert_sync_batchnorm":
            assert isinstance(node, ast.Call)
            yield node, "BatchNorm sees the global batch: leave this call out"


def _rank_0_forwards(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _RANK_0.search(ast.unparse(node.test)):
            continue
        for inner in (inner for statement in node.body for inner in ast.walk(statement)):
            name = dotted(inner.func).rpartition(".")[2] if isinstance(inner, ast.Call) else ""
            if re.fullmatch(r"(model|net|ddp_model|evaluate|validate|test|eval_\w+|estimate_loss)", name):
                yield node, _ALONE.format(line=getattr(inner, "lineno", node.lineno))
                break


def _launches(tree: ast.Module) -> _Found:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("mp.spawn", "torch.multiprocessing.spawn"):
            yield node, "may stay; torchrun, or fxdp.launch(main, nproc=4), start ranks as well"


def _draws_of_samples(tree: ast.Module) -> _Found:
    if not any(ALL_SAMPLES in edit.text for edit in edits_of(ast.unparse(tree))):
        yield from ((node, _DRAWN) for node in draws_of_samples(tree))


_LOOKS: tuple[Callable[[ast.Module], _Found], ...] = (
    _samplers, _collectives, _world_sizes, _sync_batchnorms, _rank_0_forwards, _launches, _draws_of_samples,
)  # fmt: skip
