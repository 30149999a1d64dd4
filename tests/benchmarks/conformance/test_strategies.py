"""How many models need each strategy of capture: the table in CONTRIBUTING.md is that of the results."""

from __future__ import annotations

import re

from benchmarks.conformance.strategies import PAGE, REFUSED, read, table, with_table
from fxdp.capture.capture_strategies import STRATEGIES
from tests.zoo.catalogue import CATALOGUE


def test_the_table_is_that_of_the_results() -> None:
    page = PAGE.read_text()
    assert with_table(page, read()) == page
    names = {name for strategy in read().values() for name in strategy.split(", ")}
    assert names <= {REFUSED, *(strategy.name for strategy in STRATEGIES)}
    assert read().keys() <= CATALOGUE.keys()


def test_a_model_counts_for_each_strategy_that_it_needs() -> None:
    rows = {"gpt2": "symbolic", "led": "hinted numbers, merged loops", "bert": REFUSED}
    shown = table(rows)
    assert f"Of the {len(CATALOGUE)} models of the catalogue 3 were tried in training; 1 of them" in shown
    counts = dict(re.findall(r"^\| ([a-z ]+) \| .* \| (\d+) \| .* \|$", shown, re.MULTILINE))
    assert list(counts) == [strategy.name for strategy in STRATEGIES]
    assert {name for name, count in counts.items() if count == "1"} == {
        "symbolic", "hinted numbers", "merged loops",
    }  # fmt: skip
    assert "| 0 | none of these; tests do |" in shown
