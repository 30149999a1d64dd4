"""What fxdp touches of torch is as it was proven: the installed one, and the others by their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from fxdp.torch_compat.releases import PROVEN, installed, release
from tests.torch_compat.surface.files import FOLDER, absent, differences, read
from tests.torch_compat.surface.installed import Surface, shortened, surface
from tests.torch_compat.surface.sources import Named, named, read_file

pytestmark = pytest.mark.xdist_group("surface")  # one worker asks torch

HERE = release(installed())
NEAREST = HERE if HERE in PROVEN else PROVEN[-1]


@pytest.fixture(scope="module")
def found() -> Surface:
    return surface()


def test_each_proven_release_has_its_file() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == set(PROVEN)


@pytest.mark.parametrize("table", ["names", "ops"])
def test_the_installed_torch_is_as_it_was_proven(table: str, found: Surface) -> None:
    """Of another release's functions those that have another text are named, to be read."""
    expected = read(NEAREST)
    wrong = differences(expected, found, [table])
    read_these = [line.partition(":")[0] for line in differences(expected, found, ["texts"])]
    assert not wrong, "\n".join(
        [f"torch {installed()} beside {NEAREST}:", *wrong, f"functions to read: {', '.join(read_these)}"]
    )


@pytest.mark.parametrize("other", [*PROVEN, *({HERE} - set(PROVEN))])
def test_what_fxdp_names_is_there(other: str, found: Surface) -> None:
    """An import or an op that a release lacks is seen with any torch; so CI with one torch is enough."""
    lacking = [f"{place}: torch {other} has no {path}" for path, place in _lacking(other, found)]
    remedy = 'write the files anew (CONTRIBUTING, "A new torch"), or ask first whether it is there'
    assert not lacking, "\n".join([*lacking, remedy])


def _lacking(other: str, found: Surface) -> Iterator[tuple[str, str]]:
    for table, paths in (("names", named().names), ("ops", named().ops)):
        for path, place in paths.items():
            full = shortened(path) if table == "names" else path
            if full not in found[table] if other == HERE else absent(other, NEAREST, table, full):
                yield path, place


def test_a_name_that_came_later_or_is_gone_is_seen_from_any_release() -> None:
    assert absent("2.15", "2.13", "ops", "aten.cholesky.default")  # dropped in 2.14
    assert not absent("2.11", "2.13", "ops", "aten.cholesky.default")
    assert absent("2.11", "2.13", "names", "torch.utils._pytree._no_such_name")  # private
    assert not absent("2.11", "2.13", "names", "torch.arctan2")  # public, and no release came with it


def test_a_signature_that_changed_is_one_line() -> None:
    name = "torch._subclasses.fake_tensor.FakeTensorMode._get_output_tensor_from_cache_entry"
    assert differences({"names": {name: "(self)"}}, {"names": {name: "(other)", "new": ""}}, ["names"]) == [
        f"{name}: (other), not (self)"
    ]
    assert name in "".join(differences(read("2.14"), read("2.15"), ["names"]))


def test_sources_are_read_as_they_bind_names(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        dedent(
            """
            import torch.nn.functional as F
            from torch._guards import tracing
            from fxdp.ir.ops.library import aten

            ops = (aten.mm.default, torch.ops.prims.sum.default, torch.ops.fxdp.begin.default)
            with mock.patch.object(F, "ctc_loss", None):
                F.linear(x)
            if hasattr(F, "new"):
                F.new()
            try:
                torch.newer
            except AttributeError:
                pass
            """
        )
    )
    found = Named()
    read_file(file, found)
    functions = {"torch.nn.functional.ctc_loss", "torch.nn.functional.linear"}
    assert set(found.names) == {"torch._guards.tracing", *functions}
    assert set(found.ops) == {"aten.mm.default", "prims.sum.default"}
