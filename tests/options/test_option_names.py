"""Options under former, moved and mistyped names: refused, each with today's spelling, at every door."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxdp
from fxdp.errors import InputError
from fxdp.options import Options
from tests.rooms import FXDP, ROOT

_X = torch.randn(6, 4)
DOORS: dict[str, Callable[..., Any]] = {
    "compile": lambda **options: fxdp.compile(nn.Linear(4, 2), **options),
    "plan": lambda **options: fxdp.plan(nn.Linear(4, 2), (_X,), **options),
    "explain": lambda **options: fxdp.explain(nn.Linear(4, 2), (_X,), **options),
    "verify": lambda **options: fxdp.verify(nn.Linear(4, 2), (_X,), mesh={"dp": 2}, **options),
}
FORMER: list[tuple[dict[str, Any], str]] = [
    ({"compute": "eager"}, "backend='eager'"),
    ({"microbatches": 4}, "pipeline=fxdp.Pipeline(microbatches=4)"),
    ({"stages": ["a"], "schedule": "gpipe"}, "pipeline=fxdp.Pipeline(stages=['a'], schedule='gpipe')"),
    ({"gradients": "owner"}, "pipeline=fxdp.Pipeline(gradients='owner')"),
    ({"batch_stats": "microbatch"}, "pipeline=fxdp.Pipeline(batch_stats='microbatch')"),
    ({"checkpoint": "always"}, "activation_checkpointing='always'"),
    ({"activation_memory_budget": 0.5}, "activation_checkpointing=0.5"),
    ({"recompute": ["layers.*"]}, "activation_checkpointing=['layers.*']"),
    (
        {"recompute": ["a"], "checkpoint": "always"},
        "activation_checkpointing=fxdp.ActivationCheckpointing(modules=['a'], mode='always')",
    ),
    ({"bucket_mb": 1.0}, "communication=fxdp.Communication(bucket_cap_mb=1.0)"),
    ({"bucket_cap_mb": 1.0}, "communication=fxdp.Communication(bucket_cap_mb=1.0)"),
    ({"link_gbit": 10}, "communication=fxdp.Communication(link_gbit=10)"),
    ({"check_replicas": 0}, "debug=fxdp.Debug(check_replicas=0)"),
    ({"verify": False, "dump_dir": "d"}, "debug=fxdp.Debug(verify=False, dump_dir='d')"),
]


@pytest.mark.parametrize(("given", "now"), FORMER, ids=str)
def test_a_former_option_is_refused_with_its_spelling_of_today(given: dict[str, Any], now: str) -> None:
    before = ", ".join(f"{name}={value!r}" for name, value in given.items())
    with pytest.raises(InputError, match=rf"names:\n  {re.escape(f'{before}: now {now}')}\nexpected some of"):
        fxdp.compile(nn.Linear(4, 2), **given)
    Options.named(eval(f"dict({now})", {"fxdp": fxdp}))  # which is accepted


@pytest.mark.parametrize("door", DOORS)
def test_unknown_options_have_near_names(door: str) -> None:
    words = (
        r"names:\n  microbatches=4: now pipeline=fxdp\.Pipeline\(microbatches=4\)\n"
        r"  bucketmb: did you mean communication=fxdp\.Communication\(bucket_cap_mb=1\)\?\n"
        r"  stategy: did you mean strategy='shard'\?\n  q\nexpected some of loss_fn, "
    )
    with pytest.raises(InputError, match=words):
        DOORS[door](bucketmb=1, stategy="shard", q=2, microbatches=4)


def test_compile_has_at_most_sixteen_options_and_takes_all_of_them() -> None:
    parameters = inspect.signature(fxdp.compile).parameters.values()
    names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert len(names) <= 16
    assert names == list(inspect.signature(Options).parameters)
    assert fxdp.compile(nn.Linear(4, 2), **vars(Options()))._options == Options()
    documented = re.findall(r"^(\w+) : ", inspect.getdoc(fxdp.compile) or "", re.M)
    assert set(names) <= set(documented)


def test_no_text_names_a_former_option() -> None:
    """Neither errors nor documents: what they advise would be refused."""
    former = re.compile(r"\b(compute|checkpoint|activation_memory_budget|recompute|bucket_mb)=")
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    texts = {str(page): page.read_text() for page in pages}
    for file in (*FXDP.rglob("*.py"), *(ROOT / "passes").rglob("*.py")):
        strings = [n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant)]
        texts[str(file)] = "\n".join(text for text in strings if isinstance(text, str))
    assert {place: found for place, text in texts.items() if (found := former.findall(text))} == {}
