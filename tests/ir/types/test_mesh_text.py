"""Meshes in words."""

from __future__ import annotations

import pytest

from fxdp.errors import MeshError
from fxdp.ir.types.mesh_text import ON_COMMAND_LINE, parse_mesh


def test_axes_keep_their_order() -> None:
    assert list(parse_mesh("pp=2, dp=16384").items()) == [("pp", 2), ("dp", 16384)]


@pytest.mark.parametrize("text", ["", "dp", "2x4", "dp=", "=4", "dp=0", "dp=-1", "dp=2,dp=2", "dp=4,", "."])
def test_what_is_no_mesh_shows_the_grammar_in_the_readers_form(text: str) -> None:
    with pytest.raises(MeshError) as caught:
        parse_mesh(text)
    assert f'mesh="{text}": got ' in str(caught.value)
    assert 'as in  mesh="dp=4"    mesh="pp=2,dp=8"' in str(caught.value)
    with pytest.raises(MeshError, match=r"--mesh .*expected axis=size once(.|\n)*as in  --mesh dp=4"):
        parse_mesh(text, ON_COMMAND_LINE)
