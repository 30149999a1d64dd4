"""Find where a data set draws random numbers for its samples, as far as a script's lines tell.

def __getitem__(self, i): random.random()       transforms.RandomCrop(32)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

_DRAWS = re.compile(
    r"(np|numpy|torch|random)\.(random\.)?(rand\w*|random\w*|normal\w*|bernoulli|multinomial|uniform|choices?|sample|shuffle|gauss)"
)
_TRANSFORM = re.compile(r"Random(?!\w*Sampler)\w+")


def dotted(node: ast.AST) -> str:
    """Return a name or a chain of attributes as text, as `self.model`; empty for all else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def called(node: ast.AST) -> str:
    """Return the last name of what a call calls, as `DataLoader`; empty for all else."""
    return dotted(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""


def draws_of_samples(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield the calls by which samples draw."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ("__getitem__", "__iter__", "__getitems__"):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Call) and _DRAWS.fullmatch(dotted(inner.func)):
                    yield inner
        elif isinstance(node, ast.Call) and _TRANSFORM.fullmatch(called(node)):
            yield node
