"""What no trainer can be given is refused."""

from __future__ import annotations

import pytest

import fxdp
from fxdp.integrations.checks import check_replicated


def test_parameters_stay_those_of_the_optimizer() -> None:
    check_replicated({"backend": "eager"})
    with pytest.raises(fxdp.InputError, match="a trainer made its optimizer before"):
        check_replicated({"strategy": "shard"})
