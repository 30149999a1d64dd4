"""torch's own samples of its ops and modules, each as a model: does fxdp split it exactly?

    python -m benchmarks.conformance.torch_samples               # all, about 10 minutes of one core
    python -m benchmarks.conformance.torch_samples softmax LSTM  # those with these names

Of each op three samples in float64 whose first input has a batch, and of each module four in training and
four in evaluation, run by `fxdp.verify` on two ranks: all samples but one on the first, all on the second. An
input goes by the batch in its first dim if that is as large as the first input's, which is multiplied by a
parameter, so that there is a gradient. What is refused is listed with its reason, once a name; what differs,
or raises anything but an error of fxdp's, is printed full, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any, TypeAlias

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import fxdp
from fxdp.errors import FxdpError

Sample: TypeAlias = "tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]"

_OF_EACH_OP, _OF_EACH_MODULE = 3, 4
_UNWRITTEN = frozenset({"empty", "empty_like", "new_empty", "new_empty_strided", "empty_strided"})


class _Scaled(nn.Module):
    """A function of a tensor, which a parameter scales before, and of others."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, first: Any, *rest: Any, **named: Any) -> Any:
        def scaled(x: Tensor) -> Tensor:
            return x * self.scale if x.is_floating_point() or x.is_complex() else x

        return self.function(pytree.tree_map_only(Tensor, scaled, first), *rest, **named)


def _ops(names: set[str]) -> Iterator[Sample]:
    for info in op_db:
        undefined_gradients = info.name in _UNWRITTEN or torch.float64 not in info.dtypes
        if undefined_gradients or (names and info.name not in names):
            continue
        samples = (s for s in info.sample_inputs("cpu", torch.float64) if _batch((s.input,)) > 1)
        for sample in islice(samples, _OF_EACH_OP):
            yield info.formatted_name, _Scaled(info.op), (sample.input, *sample.args), dict(sample.kwargs)


def _modules(names: set[str]) -> Iterator[Sample]:
    for info in module_db:
        if names and info.name.removeprefix("nn.") not in names:
            continue
        for training in (True, False):
            given = {"device": "cpu", "dtype": torch.float64, "requires_grad": False, "training": training}
            found = (i for i in info.module_inputs_func(info, **given) if i.forward_input is not None)
            for each in islice((i for i in found if _batch(i.forward_input.args) > 1), _OF_EACH_MODULE):
                made = info.module_cls(*each.constructor_input.args, **each.constructor_input.kwargs)
                args, kwargs = each.forward_input.args, each.forward_input.kwargs
                yield info.name, _Scaled(made.double()).train(training), args, kwargs


def _batch(args: Any) -> int:
    """How many rows the first tensor has; 0 if it has none."""
    first = next((leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)), None)
    return 0 if first is None or first.dim() == 0 else len(first)


def _verdict(sample: Sample) -> tuple[str, str]:
    """`exact`, `refused` with the reason, or what is wrong."""
    _, model, args, kwargs = sample
    batch = _batch(args)

    def dim(leaf: Any) -> int | None:
        return 0 if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch else None

    try:
        model(*pytree.tree_map_only(Tensor, Tensor.clone, args), **kwargs)
    except Exception:
        return "eager fails", ""
    try:
        dims, splits = pytree.tree_map(dim, (tuple(args), kwargs)), [[batch - 1, 1], [0, batch]]
        report = fxdp.verify(model, tuple(args), kwargs, "dp=2", splits=splits, batch_dims=dims)
    except FxdpError as error:
        return "refused", str(error).rpartition("`: ")[2].partition(". ")[0]
    except Exception as error:
        return "raw error", f"{type(error).__name__}: {error}"
    return ("exact", "") if report.ok else ("different", str(report))


def main() -> int:
    """Print what is wrong, then how many samples are exact and why others are refused."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="ops and modules (default: all)")
    names = set(parser.parse_args().names)
    warnings.simplefilter("ignore")
    # samples that draw would seed first, and one device draw the same numbers at each step
    common_methods_invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    logging.disable(logging.CRITICAL)
    console = Console(width=110)
    found: Counter[str] = Counter()
    refused: dict[str, str] = {}
    for sample in (*_ops(names), *_modules(names)):
        torch.manual_seed(0)
        verdict, why = _verdict(sample)
        found[verdict] += 1
        if verdict == "refused":
            refused.setdefault(sample[0], why)
        elif why:
            console.print(f"{sample[0]}: {verdict}: {why}", markup=False)
    for name, why in sorted(refused.items()):
        console.print(f"{name}: {why}", markup=False, overflow="ellipsis", no_wrap=True)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in found.most_common()))
    return int(found["different"] + found["raw error"] > 0)


if __name__ == "__main__":
    sys.exit(main())
