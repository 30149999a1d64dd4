"""Torch's own faults that fxdp mends: each is there on the installed torch, or the mend may go."""

from __future__ import annotations

import pytest
import torch

from fxdp.torch_compat import Mend, mends, releases
from tests.rooms import FXDP
from tests.torch_compat.faults.programs import PROGRAMS

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


@pytest.mark.parametrize("mend", mends(), ids=lambda mend: mend.name)
def test_a_fault_is_in_the_releases_that_are_known_to_have_it(mend: Mend) -> None:
    """Plain torch is run. Where this fails, torch was mended (or broken): change the table, and the mend."""
    known = releases.release(torch.__version__) in mend.releases
    assert PROGRAMS[mend.name]() is known, f"torch {torch.__version__}: {mend.fault}"


def test_each_names_the_file_that_mends_it() -> None:
    for mend in mends():
        assert (FXDP / mend.where).is_file(), mend
        assert set(mend.releases) <= set(releases.PROVEN)
        assert mend.releases, f"{mend.name}: no release that fxdp works with needs it"
    assert [mend.name for mend in mends()] == sorted(PROGRAMS)
