"""What a script asks of the exact type of a tensor, which is false for global tensors: told by line.

isinstance(x, torch.Tensor)       true
type(x).__module__                'torch'
type(x) is torch.Tensor           false: batches of a script are of a subclass
x.__class__ == torch.Tensor       the same
"""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

from fxdp.eager.tensor import GlobalTensor
from fxdp.run.script_lines import is_own_file

_log = logging.getLogger("fxdp")
_OPERATORS = (ast.Is, ast.IsNot, ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def look_like_torchs() -> None:
    """Let global tensors be of a class of torch by its name, of which loggers ask: `torch.GlobalTensor`."""
    GlobalTensor.__module__ = "torch"


@lru_cache(maxsize=1)
def tell_of_exact_types() -> None:
    """Warn of such tests in the script, and in the modules of its own that are imported by now."""
    files = {_file(module) for name, module in [*sys.modules.items()] if not name.startswith("fxdp")}
    own = sorted(file for file in files if file.endswith(".py") and is_own_file(file))
    found = [f"{file}:{line}" for file in own for line in _lines(file)]
    if found:
        _log.warning(
            "%s %s the exact type of a tensor, as `type(x) is torch.Tensor` does; batches are of a subclass "
            "while `fxdp run` runs the script, so this is False for them. Expected isinstance(x, "
            "torch.Tensor), which is True",
            ", ".join(found), "asks" if len(found) == 1 else "ask",
        )  # fmt: skip


def _file(module: object) -> str:
    """Return a module's file without asking its `__getattr__`, by which a lazy module imports others."""
    file = getattr(module, "__dict__", {}).get("__file__")
    return file if isinstance(file, str) else ""


def _lines(file: str) -> Sequence[int]:
    """Return the lines of a file with such tests; none of a file that is no Python text."""
    try:
        text = Path(file).read_text()
        if "Tensor" not in text or not ("type(" in text or "__class__" in text):
            return ()
        compared = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Compare)]
    except (OSError, ValueError, SyntaxError):
        return ()
    return [node.lineno for node in compared if _asks_exactly(node)]


def _asks_exactly(node: ast.Compare) -> bool:
    if not all(isinstance(each, _OPERATORS) for each in node.ops):
        return False
    sides = [node.left, *node.comparators]
    named = (_name(part) for side in sides for part in _parts(side))
    return any(map(_is_type, sides)) and "Tensor" in named


def _is_type(node: ast.expr) -> bool:
    """Return whether an expression is `type(x)` or `x.__class__`."""
    is_call = isinstance(node, ast.Call) and _name(node.func) == "type" and len(node.args) == 1
    return is_call or _name(node) == "__class__"


def _parts(node: ast.expr) -> Iterator[ast.expr]:
    yield from node.elts if isinstance(node, (ast.Tuple, ast.List, ast.Set)) else (node,)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
