"""The table of rules for dtypes says the same, however often it was filled."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch._inductor.lowering  # noqa: F401 - fills the tables of ops
from torch._inductor import utils
from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

from fxdp.startup.memoized.memoized_dtypes import memoized_dtypes
from tests.torch_compat.taken import taken


def _rules() -> dict[str, tuple[Any, Any]]:
    made = vars(DtypePropagationOpsHandler())
    return {name: (rule.func, rule.keywords) for name, rule in made.items()}


def test_rules_are_torch_s_own() -> None:
    wanted = _rules()
    with memoized_dtypes():
        assert _rules() == _rules() == wanted
    assert len(wanted) > 50


@taken("memoized_dtypes")
def test_the_table_is_filled_once_and_where_there_are_more_rules() -> None:
    plain = DtypePropagationOpsHandler.__init__
    filled = mock.Mock(side_effect=plain)
    with mock.patch.object(DtypePropagationOpsHandler, "__init__", lambda self: filled(self)):
        before = DtypePropagationOpsHandler.__init__
        with memoized_dtypes():
            made = [DtypePropagationOpsHandler() for _ in range(3)]
            assert made[0] is made[1]
            assert filled.call_count == 1
            rule = utils.op_dtype_propagation_rules["exp"]
            with mock.patch.dict(utils.op_dtype_propagation_rules, {"another": rule}):
                assert DtypePropagationOpsHandler().another is not None  # type: ignore[attr-defined]
        assert DtypePropagationOpsHandler.__init__ is before
    del made[0].another  # type: ignore[attr-defined]
