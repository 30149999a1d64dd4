"""A family of diffusers is a module of its models, made small by its own tests or beside this."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import diffusers
import torch
from diffusers.models import _import_structure as modules
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.conformance.libraries.diffusers_autoencoders import AUTOENCODERS
from benchmarks.conformance.libraries.diffusers_calls import LIST
from benchmarks.conformance.libraries.diffusers_networks import NETWORKS
from benchmarks.conformance.libraries.entries import EagerError, Families, Member, WithLoss, check_runs
from benchmarks.conformance.libraries.own_tests import entry_of, test_modules
from tests.zoo.entry import Entry, Inputs
from tests.zoo.measure import BATCH

SMALL = {**AUTOENCODERS, **NETWORKS}
NOT_GIVEN = ("generator", "return_dict")
SPREAD = 0.1
"""How far samples that are made of one differ from it."""


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
    known = [name for name in classes if name in SMALL or _cases(name)]
    if not known:
        raise EagerError("neither its tests nor diffusers_*.py beside this file have a small model of it")
    said: dict[str, None] = {}
    for name in known:
        for entry in _entries(name):
            try:
                return check_runs(Member(name, entry))
            except Exception as error:
                said[f"{type(error).__name__}: {error}"] = None
    raise EagerError("; ".join([*said][:3]) or "what its tests call it with is not a batch of samples")


def _entries(name: str) -> Iterator[Entry]:
    """The model as it is small here, else as its tests make it and with what they call it with."""
    if name in SMALL:
        small = SMALL[name]
        yield entry_of(partial(_build, small.build or getattr(diffusers, name), small.settings), small.inputs)
        return
    for case in _cases(name):
        for inputs in _calls(case):
            with suppress(Exception):  # inputs of a size that is written out
                yield entry_of(partial(_build, case.model_class, case.get_init_dict()), inputs)


def _build(made: Callable[..., nn.Module], settings: dict[str, Any]) -> nn.Module:
    return WithLoss(_Unbound(_drawn(made(**settings))))


def _drawn(model: nn.Module) -> nn.Module:
    """The model without weights that are zero at first: through these no gradient comes."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=SPREAD)
    return model


class _Unbound(nn.Module):
    """A model some of whose inputs are lists with a tensor for each sample: here these are one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        listed = {k: list(inputs.pop(k).unbind()) for k in list(inputs) if k.startswith(LIST)}
        return self.model(**inputs, **{k.removeprefix(LIST): v for k, v in listed.items()})


def _cases(name: str) -> list[Any]:
    """The classes of tests that make the model and its inputs, those first that only do this."""
    found = [case for module in test_modules("diffusers", "models", name) for case in vars(module).values()
             if _tests(case, name)]  # fmt: skip
    seen: dict[str, Any] = {}
    for case in sorted(found, key=lambda case: len(case.__mro__)):
        seen.setdefault(repr(case().get_init_dict()), case())
    return list(seen.values())


def _tests(case: Any, name: str) -> bool:
    if not (isinstance(case, type) and hasattr(case, "get_init_dict") and hasattr(case, "get_dummy_inputs")):
        return False
    try:
        return bool(case().model_class.__name__ == name and case().get_init_dict())
    except Exception:  # a base class that names no model
        return False


def _calls(case: Any) -> Iterator[Callable[[int], Inputs]]:
    """What the tests call the model with, as they make it for a batch, or grown to it.

    Some inputs are of one sample, for all: each is tried.
    """
    for made in (partial(_written, case), partial(_grown, case)):
        with suppress(Exception):
            names = [k for k, v in made(2).items() if isinstance(v, Tensor) and v.dim() and len(v) == 2]
            if names and made(2)[names[0]].shape != made(3)[names[0]].shape:
                stacked = partial(_stacked, made, _lists(made))
                yield stacked
                for name in names[1:]:
                    yield partial(_with_one, stacked, name)


def _written(case: Any, batch: int) -> Inputs:
    """Lists of numbers, an entry for each sample, are as long at all batches: as at the largest."""
    made, most = _at_batch(case, batch)(), _at_batch(case, BATCH)()
    return {k: v if _has_tensors(v) else most.get(k, v) for k, v in made.items() if _is_given(k, v)}


def _grown(case: Any, batch: int) -> Inputs:
    """The inputs of the tests, whose samples are repeated, each a little different."""
    made = {k: v for k, v in case.get_dummy_inputs().items() if _is_given(k, v)}
    tensors = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor) and x.dim()]
    own = len(made.get(getattr(case, "main_input_name", ""), tensors[0]))
    rows = torch.arange(batch) % own
    return {k: _at_rows(v, own, rows) for k, v in made.items()}


def _at_rows(value: Any, own: int, rows: Tensor) -> Any:
    """A tensor, or a list of one for each sample, with these of its samples."""
    if isinstance(value, list) and len(value) == own and all(isinstance(x, Tensor) for x in value):
        return [_spread(value[row]) for row in rows]
    return pytree.tree_map_only(Tensor, lambda x: _spread(x[rows]) if x.dim() and len(x) == own else x, value)


def _spread(x: Tensor) -> Tensor:
    """Other numbers for each sample, unless they are a mask or count something."""
    return x if not x.is_floating_point() or x.equal(x.round()) else x + SPREAD * torch.randn_like(x)


def _lists(made: Callable[[int], Inputs]) -> set[str]:
    """The inputs that are lists with a tensor for each sample."""
    two, three = made(2), made(3)
    lists = {k for k, v in two.items() if isinstance(v, list) and _has_tensors(v)}
    return {k for k in lists if (len(two[k]), len(three[k])) == (2, 3)}


def _stacked(made: Callable[[int], Inputs], lists: set[str], batch: int) -> Inputs:
    inputs = made(batch)
    stacked = {LIST + name: torch.stack(inputs.pop(name)) for name in lists}
    return inputs | stacked


def _with_one(made: Callable[[int], Inputs], name: str, batch: int) -> Inputs:
    inputs = made(batch)
    return {**inputs, name: inputs[name][:1]}


def _is_given(name: str, value: Any) -> bool:
    return name not in NOT_GIVEN and value is not None


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))


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
    code = compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec")
    exec(code, function.__globals__, made)
    return partial(made["get_dummy_inputs"], case)
