"""Plans as data and as what people see: text, tables, JSON, differences, explanations."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from expecttest import assert_expected_inline
from rich.console import Console
from torch import nn

import fxdp
from fxdp.ir.graph.metadata import Location
from fxdp.reports.by_line import _folded, _starred
from fxdp.reports.places import place, shown
from fxdp.reports.sheet import Shown
from tests.reports.plan_data.test_collectives import Pairs, Tagger, _inputs, normed

ROOT = Path(__file__).resolve().parents[2]
FILE = "tests/reports/plan_data/test_collectives.py"


def _plan(name: str, mesh: Mapping[str, int], **options: Any) -> fxdp.Plan:
    model: nn.Module = {"tagger": Tagger, "pairs": Pairs, "normed": normed}[name]()
    args, kwargs = _inputs(name, 8)
    return fxdp.plan(model, args, kwargs, mesh, **options)


@pytest.fixture(scope="module")
def pairs() -> fxdp.Plan:
    return _plan("pairs", {"dp": 4})


@pytest.fixture(scope="module")
def pipeline() -> fxdp.Plan:
    return _plan("tagger", {"pp": 2}, pipeline={"microbatches": 2})


def test_a_plan_is_read_by_line_in_a_narrow_terminal(
    pairs: fxdp.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shown = pairs.summary().splitlines()
    assert max(map(len, shown)) <= 80
    assert_expected_inline(
        "\n".join(shown[: shown.index("gradients: 100 B per step") + 1]),
        """\
Pairs on mesh(dp=4), a batch of 32: 4 messages, 1.2 KiB in a step

communication of one step, by line

tests/reports/plan_data/test_collectives.py:43  scores = self.fc(x) @ self.fc(2…
  forward   all_gather                512 B  aten.mm in fc
  forward   all_gather                640 B  aten.mm
  backward  all_reduce                 20 B  gradient of fc.bias
  backward  all_reduce                 80 B  gradient of fc.weight
tests/reports/plan_data/test_collectives.py:44  return F.cross_entropy(scores, …
  forward   all_reduce        x2        8 B  aten.div.Tensor

total: 2 all_gather, 2 all_reduce; 1.1 KiB by gloo, 108 B by messages
gradients: 100 B per step""",
    )
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(pairs)
    wide = console.export_text().splitlines()
    assert all(len(line) <= 60 for line in wide)
    assert any(f"{FILE}:43" in line for line in wide)


def test_a_plan_of_shards_stands_in_columns_and_says_what_is_true_of_it() -> None:
    shown = _plan("tagger", {"dp": 2}, strategy="shard").summary().splitlines()
    rows = [line for line in shown if line.startswith(("  forward ", "  backward "))]
    assert {"all_gather_shards", "reduce_scatter_shards"} <= {row.split()[1] for row in rows}
    assert len({len(re.match(r".*? (KiB|B)  ", row)[0]) for row in rows}) == 1, rows  # type: ignore[index]
    said = " ".join(shown)
    assert "only gradients" not in said, "parameters travel, too"
    assert "everything splits over the ranks: of other ranks' samples each needs sums alone" in said


def test_the_peak_of_a_stage_is_told_in_words(pipeline: fxdp.Plan) -> None:
    for row in pipeline.memory():
        assert re.search(r"at most [\d.]+ \w+ in the backward of micro-batch \d in stage [01]", str(row))


def test_every_object_shows_itself(pairs: fxdp.Plan, pipeline: fxdp.Plan) -> None:
    compiled = fxdp.compile(normed(), backend="eager")
    compiled(*_inputs("normed", 4)[0])
    shown: list[Any] = [
        compiled.graph, compiled.program,
        pairs, pairs.coverage(), pairs.explain("fc.weight"), pairs.diff(pipeline), pairs.graph,
        pipeline.schedule, *pairs.collectives(), *pairs.parameters(), *pairs.memory(),
        *pipeline.communication,
    ]  # fmt: skip
    assert all("\n" not in repr(one) and len(repr(one)) < 160 for one in shown)
    pages = [one._repr_html_() for one in shown if hasattr(one, "_repr_html_")]
    assert len(pages) == 7
    assert all("<table" in page and "<script" not in page and "http" not in page for page in pages)
    assert pipeline.schedule is not None
    assert pipeline.schedule._repr_svg_() == pipeline.schedule_svg()  # type: ignore[attr-defined]
    assert str(pipeline.schedule).startswith("rank 0: 0F0 0F1")
    assert issubclass(type(pairs.coverage()), Shown)
    assert repr(_plan("tagger", {"dp": 1})).endswith("one rank sends nothing)")


def test_json_and_back(pairs: fxdp.Plan, pipeline: fxdp.Plan) -> None:
    for plan in (pairs, pipeline):
        read = fxdp.Plan.from_json(plan.to_json())
        assert read == plan
        assert read.details() == plan.details()
        assert not read.diff(plan)
        assert str(read) == str(plan)
        with pytest.raises(fxdp.StateError, match="plan the model here"):
            _ = read.graph


def test_json_that_is_no_plan_of_this_version(pairs: fxdp.Plan) -> None:
    found = json.loads(pairs.to_json())
    mistakes: dict[Any, str] = {
        "{": "this is no JSON",
        '{"lr": 1, "epochs": 2}': "got JSON with the keys lr, epochs, expected the text",
        "[]": "got a list, expected the text that plan.to_json",
        json.dumps({**found, "version": 2, "fxdp": "9.0"}): "has version 2, made by fxdp 9.0 on torch",
        json.dumps({k: v for k, v in found.items() if k != "causes"}): "has no causes; it is incomplete",
        json.dumps({**found, "parameters": [{"name": "fc"}]}): "has rows that nobody writes so: TypeError",
        Path("plan.json"): "got a PosixPath, expected the text that",
    }
    for text, message in mistakes.items():
        with pytest.raises(fxdp.InputError, match=message):
            fxdp.Plan.from_json(text)


def test_what_differs_between_plans(pairs: fxdp.Plan) -> None:
    other = _plan("pairs", {"dp": 2}, communication={"bucket_cap_mb": 1.0})
    assert not pairs.diff(pairs)
    with pytest.raises(fxdp.InputError, match=r"diff: got a str, expected a plan"):
        pairs.diff(pairs.to_json())  # type: ignore[arg-type]
    rows = {row.what: (row.here, row.there) for row in pairs.diff(other).rows}
    assert rows["mesh"] == ("dp=4", "dp=2")
    assert rows["communication.bucket_cap_mb"][1] == "1.0"
    assert rows["forward all_gather: aten.mm in `scores = self.fc(x) @ self.fc(2 * x).t()`"] == (
        "2x 1.1 KiB", "2x 576 B",
    )  # fmt: skip
    rows = {row.what: (row.here, row.there) for row in pairs.diff(_plan("tagger", {"dp": 4})).rows}
    assert rows["model"] == ("Pairs", "Tagger")
    assert rows["parameter fc.weight"] == ("float32[5, 4] R", "")
    assert rows["parameter embed.weight"] == ("", "float32[12, 6] R")


@pytest.mark.parametrize(
    ("what", "nodes", "collectives", "parameters"),
    [
        ("test_collectives.py:44", {"nll_loss_forward"}, {"aten.div.Tensor"}, set()),
        (f"{FILE}:43", {"mm", "addmm"}, {"aten.mm", "gradient of fc.bias"}, set()),
        ("fc.weight", {"fc_weight"}, {"gradient of fc.weight"}, {"fc.weight"}),
        ("%mm", {"mm"}, {"aten.mm"}, set()),
        ("all_reduce_4", {"add_1"}, {"gradient of fc.bias"}, set()),
        ("fc", {"addmm"}, {"aten.mm"}, set()),
        ("aten.mm torch.ones", set(), set(), set()),
        ("aten.mm 2 * x", {"mm"}, set(), set()),
    ],
)
def test_explain(
    pairs: fxdp.Plan, what: str, nodes: set[str], collectives: set[str], parameters: set[str]
) -> None:
    if not nodes:
        with pytest.raises(fxdp.InputError, match="is called so"):
            pairs.explain(what)
        return
    found = pairs.explain(what)
    assert nodes <= {row.name for row in found.nodes}
    texts = {need.text.partition(" in `")[0] for row in found.collectives for need in row.needs}
    assert collectives <= texts
    assert {row.name for row in found.parameters} == parameters
    assert "<unknown>" not in str(found)


def test_the_cause_of_what_was_asked_for_goes_first(pairs: fxdp.Plan) -> None:
    for name in ("fc.weight", "fc.bias"):
        (both,) = pairs.explain(name).collectives
        assert [need.text for need in both.needs].index(f"gradient of {name}") == 0
        assert len(both.needs) == 2


def test_explain_names_what_is_near(pairs: fxdp.Plan) -> None:
    with pytest.raises(fxdp.InputError, match=r"near it are fc\.weight"):
        pairs.explain("fc.wieght")
    with pytest.raises(fxdp.InputError, match=r"explain: got an int, expected text"):
        pairs.explain(45)  # type: ignore[arg-type]
    with pytest.raises(fxdp.InputError, match=r"near it are test_collectives\.py:4"):
        pairs.explain("test_collectives.py:45")


def test_explain_of_a_model() -> None:
    args, kwargs = _inputs("normed", 4)
    found = fxdp.explain(normed(), args, "1.weight", kwargs, {"dp": 2}, loss_fn=F.cross_entropy)
    assert [row.name for row in found.parameters] == ["1.weight"]
    assert "found = fxdp.explain(normed()" in str(found)


def test_words_of_places() -> None:
    assert _folded("transformer.h.11.attn.c_attn.weight") == "transformer.h.*.attn.c_attn.weight"
    assert _folded("gradient of 0.weight") == "gradient of *.weight"
    assert _folded("fc1.weight2") == "fc1.weight2"
    assert _starred(["gradient of h.0.1.bias", "gradient of h.7.1.bias"]) == "gradient of h.*.1.bias"
    at = Location(str(Path.cwd() / "models" / "gpt.py"), 7, "x = self.fc(x)", "blocks.0")
    assert shown(at) == "models/gpt.py:7 `x = self.fc(x)` in blocks.0"
    assert shown(Location()) == str(Location())
    assert place(Location(str(Path.cwd() / ".venv" / "site-packages" / "a" / "b.py"), 7)) == "a/b.py:7"
    assert place(Location(f"/a/site-packages/{'long/' * 20}model.py", 1234)).endswith("/model.py:1234")
