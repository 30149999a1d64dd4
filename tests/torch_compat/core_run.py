"""What a training step without wings touches of torch.

    FXDP_WINGS=off python -m tests.torch_compat.core_run

Prints a JSON object: the attributes that are replaced while the model is captured, and the private names of
torch that executed code of fxdp names. Code of a module runs when it is imported, that of a function when it
is called; a name below a class or a module counts as far as modules and classes go.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any


class _Executed:
    """The functions of fxdp that run, by file and first line."""

    def __init__(self) -> None:
        self.lines: dict[str, set[int]] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and ("/fxdp/" in code.co_filename or "/passes/" in code.co_filename):
            self.lines.setdefault(code.co_filename, set()).add(code.co_firstlineno)


def _step(backend: str) -> None:
    import torch
    from torch import nn

    import fxdp

    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    compiled = fxdp.compile(model, loss_fn=lambda y, target: (y - target).square().mean(), backend=backend)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    for _ in range(2):
        compiled(torch.randn(6, 8), target=torch.zeros(6, 4)).backward()
        optimizer.step()


def _private_names(executed: _Executed) -> set[str]:
    files = {module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "fxdp"}
    return {name for file in files if file for name in _named_in(file, executed.lines.get(file, set()))}


def _named_in(file: str, lines: set[int]) -> Iterator[str]:
    """Yield the private names of torch in a file, without those in functions that did not run."""
    from tests.torch_compat.surface import sources
    from tests.torch_compat.surface.installed import shortened

    nodes = list(ast.walk(ast.parse(Path(file).read_text())))
    bound = sources.bound_names(nodes)
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for function in (node for node in nodes if isinstance(node, (ast.FunctionDef, ast.Lambda))):
        decorators = function.decorator_list if isinstance(function, ast.FunctionDef) else []
        if min([function.lineno, *(one.lineno for one in decorators)]) not in lines:
            body = function.body if isinstance(function.body, list) else [function.body]
            skipped |= {id(node) for part in body for node in ast.walk(part)}
    for node in nodes:
        paths = () if id(node) in skipped else sources.torch_paths(node, bound)
        yield from (name for name in map(shortened, paths) if _is_private(name))


def _is_private(name: str) -> bool:
    """Whether a part of a name is private; `__init__` and the like are Python's, and ops have schemas."""
    return not name.startswith("torch.ops.") and any(
        part.startswith("_") and not part.endswith("__") for part in name.split(".")
    )


def _count_attributes() -> set[str]:
    """Return a set that gets every attribute which is replaced from now on."""
    from fxdp.torch_compat import patch

    found: set[str] = set()
    plain = patch._installed

    def installed(one: patch.Patch, here: patch.Here) -> Any:
        several = not isinstance(one.owner, (type, dict, tuple))
        owner = one.owner.__name__ if several else getattr(one.owner, "__qualname__", "a table")
        found.add(f"{owner}.{one.name}")
        return plain(one, here)

    patch._installed = installed
    return found


if __name__ == "__main__":
    executed = _Executed()
    threading.setprofile(executed)
    sys.setprofile(executed)
    attributes = _count_attributes()
    _step("eager")
    captured = sorted(attributes)
    _step("inductor")
    sys.setprofile(None)
    threading.setprofile(None)
    print(json.dumps({
        "captured": captured, "compiled": sorted(attributes), "private": sorted(_private_names(executed)),
    }))  # fmt: skip
