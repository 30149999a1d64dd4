"""For tests of a shortcut: skipped where the installed torch is one that it leaves alone."""

from __future__ import annotations

import pytest

from fxdp.torch_compat import shortcuts, why_off


def taken(name: str) -> pytest.MarkDecorator:
    """The mark of a test that needs the shortcut of this name."""
    why = why_off(next(known for known in shortcuts() if known.name == name))
    return pytest.mark.skipif(why is not None, reason=f"{name} is off: {why}")
