"""Each metric class of torchmetrics' classification and regression families, on global tensors, as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.eager.programs import Batch, Program

BATCHES = 2
ROUNDED = {"CosineSimilarity": 1e-6}
"""Metrics that make their inputs float32, with the difference that its rounding may make."""
_OPTIONS: dict[str, Any] = {
    "num_classes": 4, "num_labels": 4, "num_groups": 3, "beta": 0.5, "min_precision": 0.4, "min_recall": 0.4,
    "min_sensitivity": 0.4, "min_specificity": 0.4, "p": 3.0, "threshold": 0.5,
}  # fmt: skip
_TASKS = ("binary", "multiclass", "multilabel")


def _given(make: Callable[..., Any]) -> dict[str, Any]:
    """The options that a class cannot be without, and those that say how many classes there are."""
    asked = inspect.signature(make).parameters
    needed = ("num_classes", "num_labels", "num_groups")
    return {
        name: _OPTIONS[name]
        for name, parameter in asked.items()
        if name in _OPTIONS and (parameter.default is inspect.Parameter.empty or name in needed)
    }


def _inputs(name: str, seed: int) -> tuple[Tensor, ...]:
    """Eight samples for a metric: four classes, four labels, so that every size collides."""
    torch.manual_seed(seed)
    if name in _MADE:
        return _MADE[name]()
    if name.startswith("Multiclass"):
        return torch.randn(8, 4).softmax(1), torch.randint(0, 4, (8,))
    if name.startswith("Multilabel"):
        return torch.rand(8, 4), torch.randint(0, 2, (8, 4))
    if name.startswith("Binary"):
        return torch.rand(8), torch.randint(0, 2, (8,))
    return torch.rand(8) + 0.1, torch.rand(8) + 0.1


_MADE: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "BinaryFairness": lambda: (torch.rand(8), torch.randint(0, 2, (8,)), torch.arange(8) % 3),
    "BinaryGroupStatRates": lambda: (torch.rand(8), torch.randint(0, 2, (8,)), torch.arange(8) % 3),
    "MulticlassExactMatch": lambda: (torch.randint(0, 4, (8, 8)), torch.randint(0, 4, (8, 8))),
    "ContinuousRankedProbabilityScore": lambda: (torch.rand(8, 8), torch.rand(8)),
    "CosineSimilarity": lambda: (torch.rand(8, 8), torch.rand(8, 8)),
    "KLDivergence": lambda: (torch.rand(8, 8).softmax(1), torch.rand(8, 8).softmax(1)),
    "JensenShannonDivergence": lambda: (torch.rand(8, 8).softmax(1), torch.rand(8, 8).softmax(1)),
}


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def _run(make: Callable[[], Any], name: str, batch: Batch) -> dict[str, Any]:
    metric = make()
    for seed in range(BATCHES):
        metric.update(*batch(*_inputs(name, seed)))
    at_once = make()(*batch(*_inputs(name, 2)))
    found = {f"value {i}": value for i, value in enumerate(_flat(metric.compute()))}
    return found | {f"at once {i}": value for i, value in enumerate(_flat(at_once))}


def metric_programs() -> dict[str, Program]:
    """A program for each class; those that choose by `task=` once for each task."""
    import torchmetrics.classification as classification
    import torchmetrics.regression as regression

    found: dict[str, Program] = {}
    for module in (classification, regression):
        for name in module.__all__:
            make = getattr(module, name)
            if module is regression or name.startswith(("Binary", "Multiclass", "Multilabel")):
                found[name] = partial(_run, partial(make, **_given(make.__init__)), name)
                continue
            for task in _TASKS:
                family = f"{task.title()}{name}"
                if hasattr(module, family):
                    options = {"task": task, **_given(getattr(module, family).__init__)}
                    found[f"{name} {task}"] = partial(_run, partial(make, **options), family)
    return found
