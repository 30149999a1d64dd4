"""What only saves time can be left out, one by one and all together, and nothing but the time changes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from fxdp.capture.joint.symbolic_joint import symbolic_joint
from fxdp.errors import MeshError
from fxdp.torch_compat import releases, shortcut_table
from fxdp.torch_compat.releases import PROVEN, installed, release
from fxdp.torch_compat.shortcuts import Shortcut, is_on, shortcut, shortcuts, why_off
from fxdp.torch_compat.torch_names import TorchName, form_of
from tests.rooms import ROOT

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")

NAMES = [known.name for known in shortcuts()]
_INDUCTORS = (
    "cold_start", "cached_pair", "cached_libraries", "translation_units", "op_traces", "program_header",
    "memoized_indices", "repeated_layers", "without_profiling", "vector_instructions",
)  # fmt: skip
"""Those without which a capture is the same, so that a program is compiled by Inductor to see it."""


_LARGE = ("cold_start", "repeated_layers", "repeated_joint", "cached_joint", "cached_pair")


def _groups(names: list[str]) -> list[str]:
    """The large ones by themselves, the small ones together; then all there are."""
    small = ",".join(f"-{name}" for name in names if name not in _LARGE)
    return [*(f"-{name}" for name in names if name in _LARGE), small, "off"]


def _left_out(group: str) -> list[str]:
    return NAMES if group == "off" else [name.removeprefix("-") for name in group.split(",")]


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.down(F.gelu(self.up(x)))


class _GPT(nn.Module):
    """A small GPT with tied words."""

    def __init__(self, layers: int, width: int = 8, words: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(5, width))
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def _model(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return _GPT(layers).double()


def _tokens() -> Tensor:
    return torch.arange(20).reshape(4, 5) * 7 % 12


def _numbers(model: nn.Module) -> list[Tensor]:
    """The loss and the gradients of one step."""
    loss = model(_tokens())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


_FEW, _MANY = 3, 10
"""Layers: first, inner and last, each of which is traced; and so many that a few stand for all."""


def _eager(layers: int) -> tuple[str, list[Tensor]]:
    """The text of a program, and what one computes."""
    sharded = fxdp.plan(_model(layers), (_tokens(),), mesh={"dp": 2}, strategy="shard").text
    return sharded, _numbers(fxdp.compile(_model(layers), backend="eager"))


@pytest.fixture(scope="module")
def eager() -> tuple[str, list[Tensor]]:
    """The same with all shortcuts that there are."""
    return _eager(_FEW)


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """With caches on disk, which tests are without else."""
    monkeypatch.setenv("FXDP_CACHE", "1")


@pytest.fixture
def on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches of this test alone."""
    monkeypatch.setenv("FXDP_CACHE", "1")
    monkeypatch.setenv("FXDP_CACHE_DIR", str(tmp_path / "kept"))


@pytest.mark.parametrize("names", _groups([name for name in NAMES if name not in _INDUCTORS]))
def test_without_some_a_program_is_the_same(
    names: str, eager: tuple[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its text, and its loss and gradients to the last bit."""
    layers = _MANY if "repeated_joint" in names else _FEW
    expected = eager if layers == _FEW else _eager(layers)
    monkeypatch.setenv("FXDP_SHORTCUTS", names)
    assert not any(map(is_on, _left_out(names)))
    text, numbers = _eager(layers)
    assert text == expected[0]
    assert all(map(torch.equal, numbers, expected[1]))
    torch.testing.assert_close(numbers, _numbers(_model(layers)), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("names", _groups([name for name in NAMES if name in _INDUCTORS]))
def test_without_some_inductor_s_code_computes_the_same(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, then loaded where it is kept; a few layers where these are compiled one by one."""
    monkeypatch.setenv("FXDP_SHORTCUTS", names)
    assert not any(map(is_on, _left_out(names)))
    layers = 5 if is_on("repeated_layers") else 1
    wanted = _numbers(_model(layers))
    for _ in range(2):
        torch.testing.assert_close(_numbers(fxdp.compile(_model(layers))), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("on_disk")
@pytest.mark.parametrize("name", ["cached_joint", "lazy_codegen"])
def test_what_is_kept_on_disk_is_not_for_who_leaves_something_out(
    name: str, eager: tuple[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = mock.Mock(side_effect=symbolic_joint.own)
    monkeypatch.setattr(symbolic_joint, "own", made)
    for setting, times in (("on", 1), ("on", 1), (f"-{name}", 2)):
        monkeypatch.setenv("FXDP_SHORTCUTS", setting)
        assert fxdp.plan(_model(_FEW), (_tokens(),), mesh={"dp": 2}, strategy="shard").text == eager[0]
        assert made.call_count == times


@pytest.mark.usefixtures("cached")
def test_all_that_the_table_promises_is_on() -> None:
    """With the installed torch none is left out for a signature, nor for a name that is gone."""
    here = release(installed())
    assert {known.name for known in shortcuts() if why_off(known) is None} == {
        known.name for known in shortcuts() if here in known.releases
    }


def test_the_table_is_sorted_and_a_page_says_what_each_saves() -> None:
    assert sorted({known.name for known in shortcut_table.SHORTCUTS}) == NAMES
    assert [known.name for known in shortcut_table.SHORTCUTS] == NAMES
    page = (ROOT / "docs" / "environment.md").read_text()
    for known in shortcuts():
        assert f"| `{known.name}` | " in page
        assert known.releases <= {*PROVEN}
        assert not known.needless or max(known.releases, key=PROVEN.index) < known.needless


def _known(name: str) -> Shortcut:
    return next(known for known in shortcuts() if known.name == name)


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("name", [known.name for known in shortcuts() if known.names])
def test_another_signature_turns_one_off(name: str) -> None:
    known = _known(name)
    if release(installed()) not in known.releases:
        pytest.skip(f"{name} is off with torch {installed()}: {why_off(known)}")
    last = known.names[-1]
    changed = replace(known, names=(*known.names[:-1], replace(last, known=("(self, what, nobody, knows)",))))
    why = why_off(changed)
    assert why is not None
    assert why.startswith(f"{last.path} is ")
    assert why.endswith("here, not (self, what, nobody, knows)")


def test_a_name_that_is_gone_turns_one_off() -> None:
    for owner, name in (("torch.fx", "gone"), ("torch.gone", "recompile"), ("torch.fx:Gone", "recompile")):
        one = TorchName(owner, name, ("()",))
        assert one.form() is None
        assert why_off(replace(_known("without_profiling"), names=(one,))) == f"{one.path} is gone"
    assert replace(one, earlier="torch.fx:GraphModule").form() == "(self)"


def test_what_replaces_torch_leaves_it_alone_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A shortcut that is off is not entered, and one line at debug level says why, once."""
    unfit = replace(_known("lazy_codegen"), name="unfit", names=(TorchName("torch.fx", "gone", ()),))
    monkeypatch.setattr(sys.modules[is_on.__module__], "SHORTCUTS", (*shortcut_table.SHORTCUTS, unfit))
    entered: list[str] = []

    @shortcut("unfit")
    def never() -> Iterator[None]:
        entered.append("unfit")
        yield

    with caplog.at_level(logging.DEBUG, "fxdp"):
        for _ in range(3):
            with never():
                pass
    assert not entered
    assert [record.getMessage() for record in caplog.records] == [
        "shortcut unfit is off: torch.fx.gone is gone"
    ]


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("version", ["2.16.0+cpu", "2.10.0", "2.15.0.dev20261101+cpu", "3.0.0"])
def test_a_torch_that_nobody_proved_turns_all_off(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed", lambda: version)
    for known in shortcuts():
        why = why_off(known)
        assert why is not None
        itself = version.startswith("2.15") and known.needless
        assert why.startswith("torch saves" if itself else f"it was not proven with torch {version}")
    assert not any(map(is_on, NAMES))


@pytest.mark.parametrize("version", ["2.11.0", "2.14.1", "2.15.0"])
def test_what_torch_does_itself_is_left_to_it(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "installed", lambda: version)
    why = why_off(replace(_known("memoized_indices"), names=()))
    assert why == ("torch saves this time itself since 2.15" if version == "2.15.0" else None)


@pytest.mark.parametrize(
    ("variable", "names"),
    [
        ("FXDP_LAYERS", {"repeated_layers"}),
        ("FXDP_COLD_START", {"cold_start"}),
        ("FXDP_CACHE", {"cached_joint", "cached_pair", "cached_libraries"}),
    ],
)
def test_older_settings_are_the_same_switches(
    variable: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FXDP_CACHE", "1")
    on = {name for name in NAMES if is_on(name)}
    monkeypatch.setenv(variable, "0")
    assert on - {name for name in NAMES if is_on(name)} == names
    assert {why_off(_known(name)) for name in names} == {f"{variable}=0"}


def test_an_unknown_name_is_refused_with_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXDP_SHORTCUTS", "-memoized_fakes,-quick_lunch")
    with pytest.raises(
        MeshError, match=r"FXDP_SHORTCUTS names quick_lunch; expected .*memoized_fakes, memoized_"
    ):
        fxdp.plan(nn.Linear(2, 2), (torch.ones(2, 2),))


def test_forms_are_texts_of_kind_and_signature() -> None:
    class Owner:
        def __init__(self, at: int = 3, by: object = object(), *rest: int) -> None: ...

        @property
        def asked(self) -> int:
            return 1

        @staticmethod
        def made(text: str = "a") -> None: ...

    assert form_of(Owner) == "class(at=3, by=Ellipsis, *rest)"
    assert form_of(vars(Owner)["__init__"]) == "(self, at=3, by=Ellipsis, *rest)"
    assert form_of(vars(Owner)["asked"]) == "property"
    assert form_of(vars(Owner)["made"]) == "staticmethod (text='a')"
    assert form_of({}) == "dict"
    assert form_of(iter) == "builtin_function_or_method"
