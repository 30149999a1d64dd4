"""What the sources of fxdp name of torch, read without running them.

    from torch._guards import tracing              torch._guards.tracing
    F.ctc_loss                                     torch.nn.functional.ctc_loss
    mock.patch.object(pytree, "tree_flatten", f)   torch.utils._pytree.tree_flatten
    inductor_config.patch(fallback_random=True)    fallback_random, a setting
    aten.mm.default                                aten.mm.default, an op

A name that is asked for first (`if hasattr(...)`, `try: ... except ImportError:`) may be gone: left out.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import fxdp

_ROOT = Path(fxdp.__file__).parent
_ASKS = {"release_before", "torch_release", "hasattr", "is_on"}
"""Who calls one of these in a condition knows that a name may be gone."""
_CONFIGS = ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config")


@dataclass(frozen=True)
class Named:
    """What of torch stands in the sources, each with a place of its use."""

    names: dict[str, str] = field(default_factory=dict)
    """Dotted: `torch._guards.tracing`."""
    ops: dict[str, str] = field(default_factory=dict)
    """`aten.mm` or `aten.mm.default`."""
    settings: dict[str, str] = field(default_factory=dict)
    """What may be one, `torch._inductor.config:cpp_wrapper`: any text in a file that has that `config`."""


@functools.cache
def named() -> Named:
    """All that fxdp and its passes name."""
    found = Named()
    files = {file.resolve() for folder in (_ROOT, _ROOT / "passes") for file in folder.rglob("*.py")}
    for file in sorted(files):
        read_file(file, found)
    return found


def read_file(file: Path, found: Named) -> None:
    """Add what one file names."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    known = bound_names(nodes)
    skipped = {id(node) for guard in nodes if _is_guard(guard) for node in ast.walk(guard)}
    skipped |= {
        id(node.value) for node in nodes if isinstance(node, ast.Attribute)
    }  # of `a.b.c` the full value
    for node in nodes:
        if id(node) in skipped:
            continue
        place = f"{file.name}:{getattr(node, 'lineno', '')}"
        for path in torch_paths(node, known):
            if path.startswith("torch.ops."):
                op = path.removeprefix("torch.ops.")
                if "." in op and not op.startswith("fxdp."):
                    found.ops.setdefault(op, place)
            else:
                found.names.setdefault(path, place)
    for config in set(_CONFIGS) & set(known.values()):
        found.settings.update({f"{config}:{text}": file.name for node in nodes if (text := _text(node))})


def bound_names(nodes: list[ast.AST]) -> dict[str, str]:
    """Names that mean something of torch in a file: what is imported, and what is assigned from that."""
    known = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            known |= {a.asname: a.name for a in node.names if a.asname and _is_torch(a.name)}
        elif isinstance(node, ast.ImportFrom) and _is_torch(node.module):
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.ImportFrom):  # `aten` and `prims` of a file of ours
            known |= {a.name: f"torch.ops.{a.name}" for a in node.names if a.name in ("aten", "prims")}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(name := node.targets[0], ast.Name):
            if path := _dotted(node.value, known):
                known[name.id] = path
        elif isinstance(node, ast.arg):
            known.pop(node.arg, None)  # an argument of that name is another thing
    return known


def torch_paths(node: ast.AST, bound: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and _is_torch(node.module):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute) and (path := _dotted(node, bound)):
        yield path
    elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        # a name as text behind its owner: `Patch(Tensor, "data", ...)`, `getattr(aten.random, "from")`
        owner, name = node.args[0], node.args[1].value
        base = bound.get(owner.id) if isinstance(owner, ast.Name) else _dotted(owner, bound)
        if base and isinstance(name, str) and name.isidentifier() and _replaces(node.func):
            yield f"{base}.{name}"


def _replaces(function: ast.AST) -> bool:
    return ast.unparse(function) in ("Patch", "mock.patch.object")


def _dotted(node: ast.AST, bound: Mapping[str, str]) -> str | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    if not parts or not isinstance(node, ast.Name) or node.id not in bound:
        return None
    return ".".join((bound[node.id], *parts))


def _is_guard(node: ast.AST) -> bool:
    """Whether what is in it runs only where a name is there, or has an answer for its absence."""
    if isinstance(node, ast.Try):
        return any(_catches_absence(handler) for handler in node.handlers)
    if isinstance(node, (ast.If, ast.IfExp)):
        return _asks(node.test)
    if isinstance(node, ast.FunctionDef):
        return any(isinstance(line, ast.If) and _asks(line.test) for line in node.body)
    return False


def _catches_absence(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else ""
    return "ImportError" in caught or "AttributeError" in caught


def _asks(test: ast.AST) -> bool:
    calls = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
    return any(isinstance(call, ast.Name) and call.id in _ASKS for call in calls)


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.keyword):
        return node.arg
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _is_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"
