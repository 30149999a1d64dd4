"""Find the edits of a script: compile the models that it trains, and shard the batches of its loaders.

model = Net()                           model = Net()
                                        model = fxdp.compile(model, rng="single-device")
for x, y in loader:             ->      for x, y in fxdp.shard(loader_of_parts(loader)):
batches = iter(loader)                  batches = iter(fxdp.shard(loader_of_parts(loader)))
model = DDP(model)                      model = fxdp.compile(model, rng="single-device")
trainer = Trainer(model, args)          trainer = compile_trainer(Trainer(model, args), rng="single-device")

What a model draws is one device's: a model that draws nothing, as far as its own lines tell, may be of
layers that do.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from fxdp.cli.port.port_draws import called, dotted, draws_of_samples

_IMPORTS = {
    "fxdp": "import fxdp",
    "parts": "from fxdp.integrations.batch_parts import loader_of_parts",
    "transformers": "from fxdp.integrations.transformers import compile_trainer",
    "accelerate": "from fxdp.integrations.accelerate import compile_accelerator",
    "lightning": "from fxdp.integrations.lightning import FxdpStrategy",
}
_RNG = 'rng="single-device"'
ALL_SAMPLES = "all_samples=True"
"""Each rank loads all samples, as draws for these ask for."""
_WRAPPERS = ("DistributedDataParallel", "DDP", "FullyShardedDataParallel", "FSDP")
_LIGHTNING = ("lightning", "pytorch_lightning", "pl", "L")


@dataclass(frozen=True, order=True)
class Edit:
    """Text that is put into a script, instead of text there or between.

    Attributes
    ----------
    line, column, end_line, end_column : the place of the replaced text; lines count from 1, columns in bytes.
    text : what stands there afterwards.
    needs : the import that the text needs, a key of `_IMPORTS`.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    text: str
    needs: str = "fxdp"


def edits_of(source: str) -> list[Edit]:
    """Return the edits of a script in the order of its lines, imports included; none if nothing was found.

    Raises
    ------
    SyntaxError : the source is no Python.
    """
    tree = ast.parse(source)
    lines = source.splitlines()
    trainers = sorted({*_trainers(tree)})
    found = trainers or sorted({*_models(tree, lines), *_loops(tree)})
    if not found:
        return []
    needs = [key for key in _IMPORTS if any(edit.needs == key for edit in found)]
    if "parts" in needs and "fxdp" not in needs:
        needs.insert(0, "fxdp")
    line = _last_import(tree)
    text = "".join(f"{_IMPORTS[key]}\n" for key in needs)
    return [Edit(line + 1, 0, line + 1, 0, text), *found]


def edited(source: str, edits: list[Edit]) -> str:
    """Return the source with all edits made."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    for edit in sorted(edits, reverse=True):
        while len(lines) < edit.end_line:
            if lines and not lines[-1].endswith(b"\n"):
                lines[-1] += b"\n"
            lines.append(b"")
        before, after = lines[edit.line - 1][: edit.column], lines[edit.end_line - 1][edit.end_column :]
        lines[edit.line - 1 : edit.end_line] = [before + edit.text.encode() + after]
    return b"".join(lines).decode()


def _instead(node: ast.expr, text: str, needs: str = "fxdp") -> Edit:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Edit(node.lineno, node.col_offset, node.end_lineno, node.end_col_offset, text, needs)


def _last_import(tree: ast.Module) -> int:
    """Return the last line of the imports at the top level; of the docstring if there are none."""
    found = 0
    for place, node in enumerate(tree.body):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, (ast.Import, ast.ImportFrom)) or (is_text and not place):
            found = node.end_lineno or 0
    return found


def _models(tree: ast.Module, lines: list[str]) -> Iterator[Edit]:
    """Yield an edit for each model whose parameters the script reads, where it is made."""
    trained = {
        dotted(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters")
    } - {"", "self"}  # fmt: skip
    blocks = list(_blocks(tree))
    for name in trained:
        made = [[one for node in block for one in _made(node, name)] for block in blocks]
        wrappers = [call for found in made for _, call in found if called(call) in _WRAPPERS and call.args]
        for call in wrappers:
            yield _instead(call, f"fxdp.compile({ast.unparse(call.args[0])}, {_RNG})")
        for found in [] if wrappers else made:
            if found:
                last = _last_form(found, name)
                line = (last.end_lineno or last.lineno) + 1
                indent = lines[last.lineno - 1][: last.col_offset]
                yield Edit(line, 0, line, 0, f"{indent}{name} = fxdp.compile({name}, {_RNG})\n")


def _last_form(made: list[tuple[ast.Assign, ast.Call]], name: str) -> ast.Assign:
    """Return the statement after which the first model is complete: what follows may be another model.

    model = Net(); model = model.to(device)     the second
    model = Net(); model = torch.load(path)     the first
    """
    last, _ = made[0]
    for node, call in made[1:]:
        if not any(dotted(inner) == name for inner in ast.walk(call)):
            break
        last = node
    return last


def _blocks(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list):
                yield block


def _made(node: ast.AST, name: str) -> Iterator[tuple[ast.Assign, ast.Call]]:
    """Yield a statement and the call to whose result it binds a name: `model, rate = Net(), 0.1`, too."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        for target, value in _bound(node.targets[0], node.value):
            if isinstance(value, ast.Call) and dotted(target) == name:
                yield node, value


def _bound(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return each name of an assignment beside its value."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def _loops(tree: ast.Module) -> Iterator[Edit]:
    """Yield an edit for each loop over a loader, or iterator of one: around it, in whatever it is wrapped."""
    loaders = {
        dotted(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for one in node.targets
        for target, value in _bound(one, node.value)
        if called(value) == "DataLoader"
    }
    sampled = any(called(node) == "DistributedSampler" for node in ast.walk(tree))
    options = f", {ALL_SAMPLES}" if any(draws_of_samples(tree)) else ""
    for node in ast.walk(tree):
        loader = None
        if isinstance(node, (ast.For, ast.comprehension)):
            loader = _loader_in(node.iter, loaders)
        elif isinstance(node, ast.Call) and called(node) == "iter":
            loader = _loader_in(node, loaders)
        if loader is not None:
            text = ast.unparse(loader)
            parts = text if sampled else f"loader_of_parts({text}{options})"
            yield _instead(loader, f"fxdp.shard({parts})", "fxdp" if sampled else "parts")


def _loader_in(node: ast.expr, loaders: set[str]) -> ast.expr | None:
    """Return the loader over which an iterator goes: by itself, or as an argument of `enumerate`, `tqdm`."""
    name = dotted(node)
    if name:
        return node if name in loaders or "loader" in name.rpartition(".")[2].lower() else None
    if called(node) == "DataLoader":
        return node
    if isinstance(node, ast.Call) and called(node) in ("enumerate", "tqdm", "trange", "iter"):
        return next((found for arg in node.args if (found := _loader_in(arg, loaders)) is not None), None)
    return None


def _trainers(tree: ast.Module) -> Iterator[Edit]:
    """Yield the edits of scripts that leave the loop to transformers, Accelerate or Lightning."""
    imported = {
        alias.asname or alias.name: (node.module or "").partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        owner = imported.get(name) or dotted(node.func).partition(".")[0]
        if name == "Accelerator":
            yield _instead(node, f"compile_accelerator({ast.unparse(node)}, {_RNG})", "accelerate")
        elif owner in _LIGHTNING and name == "Trainer":
            options = [ast.keyword("rng", ast.Constant("single-device"))]
            strategy = ast.keyword("strategy", ast.Call(ast.Name("FxdpStrategy"), [], options))
            given = [word for word in node.keywords if word.arg != "strategy"]
            yield _instead(node, ast.unparse(ast.Call(node.func, node.args, [strategy, *given])), "lightning")
        elif name.endswith("Trainer") and owner == "transformers":
            yield _instead(node, f"compile_trainer({ast.unparse(node)}, {_RNG})", "transformers")
