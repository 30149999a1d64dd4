"""A family of diffusers is a module of its models; its own tests say how small one can be."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import diffusers
from diffusers.models import _import_structure as modules
from library_entries import EagerError, Families, Member, WithLoss, first_that_runs
from library_tests import entry_of, test_modules
from torch import Tensor, nn

from tests.zoo.entry import Entry, Inputs


def families() -> Families:
    """All modules with a model."""
    models = {name: [c for c in classes if _is_model(c)] for name, classes in modules.items()}
    return {name: partial(_smallest, classes) for name, classes in models.items() if classes}


def _is_model(name: str) -> bool:
    found = getattr(diffusers, name, None)
    return (
        isinstance(found, type)
        and issubclass(found, diffusers.ModelMixin)
        and found is not diffusers.ModelMixin
    )


def _smallest(classes: list[str]) -> Member:
    return first_that_runs(entry for name in classes for entry in _entries(name))


def _entries(name: str) -> Iterator[tuple[str, Entry]]:
    tests = [case for module in test_modules("diffusers", "models", name) for case in vars(module).values()
             if _tests(case, name)]  # fmt: skip
    if not tests:
        raise EagerError("the tests at hand have no small model of it")
    case = tests[0]()
    yield name, entry_of(partial(_build, case), partial(_inputs, case))


def _tests(case: Any, name: str) -> bool:
    """Whether this class of tests makes the model and its inputs."""
    if not (isinstance(case, type) and hasattr(case, "get_init_dict") and hasattr(case, "get_dummy_inputs")):
        return False
    try:
        return bool(case().model_class.__name__ == name)
    except Exception:  # a base class that names no model
        return False


def _build(case: Any) -> nn.Module:
    return WithLoss(case.model_class(**case.get_init_dict()))


def _inputs(case: Any, batch: int) -> Inputs:
    made: Inputs = _at_batch(case, batch)()
    named = {
        name: value
        for name, value in made.items()
        if name not in ("generator", "return_dict") and value is not None
    }
    sizes = {value.shape[0] for value in named.values() if isinstance(value, Tensor) and value.dim()}
    if sizes == {1}:  # their shapes are written out: as often as there are samples
        return {
            k: v.repeat(batch, *[1] * (v.dim() - 1)) if isinstance(v, Tensor) and v.dim() else v
            for k, v in named.items()
        }
    return named


def _at_batch(case: Any, batch: int) -> Callable[[], Inputs]:
    """The function that makes a batch, for this one: an argument of it, or a name that it sets."""
    function = type(case).get_dummy_inputs
    if "batch_size" in inspect.signature(function).parameters:
        return partial(case.get_dummy_inputs, batch_size=batch)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "batch_size":
            node.value = ast.Constant(batch)
    made: dict[str, Any] = {}
    exec(
        compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec"),
        function.__globals__,
        made,
    )
    return partial(made["get_dummy_inputs"], case)
