"""A family of transformers is a folder of its models; its own tests say how small, and with which loss."""

from __future__ import annotations

import inspect
import unittest
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import transformers
from library_entries import EagerError, Families, Member, first_that_runs
from library_tests import entry_of, test_modules
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.models.auto import modeling_auto

from tests.zoo.entry import Entry, Inputs

BASES = {
    *modeling_auto.MODEL_MAPPING_NAMES.values(),
    *modeling_auto.MODEL_FOR_BACKBONE_MAPPING_NAMES.values(),
}
"""Those without a loss."""


def families() -> Families:
    """All folders with a model."""
    root = Path(inspect.getfile(transformers)).parent / "models"
    names = sorted({path.parent.name for path in root.glob("*/modeling_*.py")} - {"auto"})
    return {name: partial(_smallest, name) for name in names}


def _smallest(name: str) -> Member:
    return first_that_runs(_entries(name))


def _entries(name: str) -> Iterator[tuple[str, Entry]]:
    modules = test_modules("transformers", f"models/{name}", "ModelTesterMixin", "CausalLMModelTest")
    tests = [_made(case) for module in modules for case in vars(module).values() if _is_test(case, module)]
    if not tests:
        raise EagerError("the tests at hand have no small model of it")
    classes = [(test, model) for test in tests for model in test.all_model_classes]
    for test, model in sorted(classes, key=lambda pair: _is_base(pair[1])):
        yield model.__name__, entry_of(partial(_build, test, model), partial(_inputs, test, model))


def _is_test(case: Any, module: ModuleType) -> bool:
    """Whether this is a class of tests of a model, defined here."""
    if not (isinstance(case, type) and issubclass(case, unittest.TestCase)):
        return False
    return case.__module__ == module.__name__ and hasattr(case, "_prepare_for_class")


def _is_base(model: type) -> bool:
    return any(model.__name__ == base or model.__name__ in base for base in BASES)


def _made(case: Any) -> Any:
    test = case("setUp")
    test.setUp()
    return test


def _build(test: Any, model: Any) -> nn.Module:
    config, _ = test.model_tester.prepare_config_and_inputs_for_common()
    return _OwnLoss(model(deepcopy(config)))


def _inputs(test: Any, model: Any, batch: int) -> Inputs:
    _set_batch(test.model_tester, batch)
    _, inputs = test.model_tester.prepare_config_and_inputs_for_common()
    labelled = test._prepare_for_class(inputs, model, return_labels=model.__name__ not in BASES)
    return {name: _drawn(name, value) for name, value in labelled.items() if value is not None}


def _set_batch(tester: Any, batch: int) -> None:
    """Of the tester, and of those for parts of the model that it has."""
    for name, value in list(vars(tester).items()):
        if name == "batch_size":
            tester.batch_size = batch
        elif name.endswith("_tester"):
            _set_batch(value, batch)


def _drawn(name: str, value: Any) -> Any:
    """Labels that are zero everywhere teach nothing: random ones."""
    is_zero = (
        name == "labels" and isinstance(value, Tensor) and not value.is_floating_point() and not value.any()
    )
    return torch.randint_like(value, 2) if is_zero else value


class _OwnLoss(nn.Module):
    """The model's own loss; a mean square of what it returns if it has none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        out = self.model(**inputs)
        loss: Tensor | None = getattr(out, "loss", None)
        if loss is not None:
            return loss.mean()
        leaves = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point()]
        return torch.stack([x.square().mean() for x in leaves if x.requires_grad]).sum()
