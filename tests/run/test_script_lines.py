"""Whose code a file holds: the script's own, or an installed package's."""

from __future__ import annotations

import pytest

from fxdp.run.script_lines import is_own_file


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/home/me/train.py", True),
        ("/home/me/.local/lib/python3.11/site-packages/torch/_inductor/cpp_builder.py", False),
        ("/usr/lib/python3/dist-packages/torch/hub.py", False),
        ("<frozen runpy>", False),
        (pytest.__file__, False),
    ],
)
def test_packages_are_installed_wherever_they_are(file: str, own: bool) -> None:
    assert is_own_file(file) == own
