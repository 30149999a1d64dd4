"""A guess never costs a number: each op with a rule, with batch sizes that collide with every other size."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fxdp.rules.registry import registry
from tests.eager.every_rule import TARGETS, check

CALLS = 250


@settings(max_examples=CALLS, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(sorted(TARGETS)), st.integers(0, 10_000))
def test_an_op_is_one_devices_whatever_its_sizes_count(name: str, seed: int) -> None:
    wrong = check(name, seed)
    assert wrong is None, str(wrong)


def test_nearly_all_rules_are_checked() -> None:
    assert len(TARGETS) > 0.8 * len(registry.targets())
